package main

import (
	"io"
	"strings"
	"testing"
)

func TestSettingsPrecedence(t *testing.T) {
	environment := []string{
		"PATH=/bin", "WEFT_REST_LISTEN=127.0.0.1:1", "WEFT_REST_BACKEND=gateway:2", "WEFT_ADDRESS=x",
	}
	s, err := parseSettings([]string{"--listen", "127.0.0.1:3"}, environment, io.Discard)
	if err != nil || s.listen != "127.0.0.1:3" || s.backend != "gateway:2" || s.maxBodyBytes != 8<<20 {
		t.Fatalf("%+v %v", s, err)
	}
	for _, wrong := range []string{"WEFT_REST_MAX_BODY_BYTES=many", "WEFT_REST_LISTENS=127.0.0.1:1"} {
		var told strings.Builder
		name, _, _ := strings.Cut(wrong, "=")
		if _, err := parseSettings(nil, append(environment, wrong), &told); err == nil ||
			!strings.Contains(told.String(), name) {
			t.Fatalf("%v %q", err, told.String())
		}
	}
}

func TestTracingIsTurnedOffInEitherForm(t *testing.T) {
	for _, given := range []struct {
		arguments, environment []string
		tracing                bool
	}{
		{nil, nil, true},
		{[]string{"--no-tracing"}, nil, false},
		{[]string{"--tracing=false"}, nil, false},
		{nil, []string{"WEFT_REST_NO_TRACING=true"}, false},
		{[]string{"--tracing"}, []string{"WEFT_REST_NO_TRACING=true"}, true},
	} {
		s, err := parseSettings(given.arguments, given.environment, io.Discard)
		if err != nil || s.tracing != given.tracing {
			t.Fatalf("%v: %v %v", given, s.tracing, err)
		}
	}
}

func TestSettingsAreChecked(t *testing.T) {
	for _, arguments := range [][]string{
		{"--nonsense"}, {"stray"}, {"--backend", ""}, {"--max-body-bytes", "0"}, {"--drain-timeout", "-1s"},
		{"--listen", "0.0.0.0:8000"}, {"--listen", ":8000"}, {"--listen", "[::]:8000"},
		{"--ready-grace-s", "-1"}, {"--ready-grace-s", "5s"}, {"--ready-grace-s", "NaN"},
		{"--trace-sample-ratio", "1.5"}, {"--trace-sample-ratio", "NaN"}, {"--no-tracing=maybe"},
		{"--max-body-bytes", "1073741825"}, {"--comment-after", "-1s"},
		{"--tls-cert", "c", "--tls-key", "k"}, {"--https-cert", "c"},
		{"--picker-listen", "127.0.0.1:0"}, {"--picker-endpoints", "a:1"},
		{"--picker-listen", "127.0.0.1:0", "--picker-endpoints", "a:1,b"},
		{"--picker-listen", ":0", "--picker-endpoints", "a:1"},
	} {
		var told strings.Builder
		if _, err := parseSettings(arguments, nil, &told); err == nil || told.Len() == 0 {
			t.Fatalf("%q was accepted silently: %v", arguments, err)
		}
	}
}

func TestOtherMachinesReachRestByHTTPSOrByChoice(t *testing.T) {
	for _, arguments := range [][]string{
		{"--listen", "[::1]:8000"}, {"--listen", "localhost:8000"}, {"--listen", ":8000", "--insecure"},
		{"--listen", ":8000", "--https-cert", "c", "--https-key", "k"},
		{"--picker-listen", ":0", "--picker-endpoints", "a:1", "--tls-cert", "c", "--tls-key", "k",
			"--tls-ca", "a"},
		{"--picker-listen", ":0", "--picker-endpoints", "a:1", "--insecure"},
	} {
		if _, err := parseSettings(arguments, nil, io.Discard); err != nil {
			t.Fatalf("%q: %v", arguments, err)
		}
	}
}
