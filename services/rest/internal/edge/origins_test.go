package edge_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/api/httpbody"
	"google.golang.org/grpc"

	"weft.dev/weft/services/rest/internal/edge"
)

func TestOnlyPagesOfAllowedOriginsMayReadAnswers(t *testing.T) {
	for _, allowed := range []string{"", "*", "https://chat.example.org"} {
		config := edge.Config{}
		if allowed != "" {
			config.AllowedOrigins = []string{"https://other.example.org", allowed}
		}
		front := httptest.NewServer(handler(t, &fakeGateway{}, config))
		t.Cleanup(front.Close)
		for _, origin := range []string{"https://chat.example.org", "https://evil.example.org"} {
			isAllowed := allowed == "*" || allowed == origin
			preflight := do(t, "OPTIONS", front.URL+"/v1/chat/completions", nil, "Origin", origin,
				"Access-Control-Request-Method", "POST",
				"Access-Control-Request-Headers", "authorization,content-type,x-stainless-os")
			if isAllowed && preflight.status != http.StatusNoContent {
				t.Errorf("%q: a preflight of %s has status %d", allowed, origin, preflight.status)
			}
			read := do(t, "GET", front.URL+"/v1/models/demo", nil, "Origin", origin)
			if read.status != http.StatusOK {
				t.Errorf("%q: a request of %s has status %d", allowed, origin, read.status)
			}
			for _, header := range []http.Header{preflight.header, read.header} {
				told := header.Get("Access-Control-Allow-Origin")
				if isAllowed != (told == "*" || told == origin) || (!isAllowed && told != "") {
					t.Errorf("%q: %s is told %q", allowed, origin, told)
				}
			}
			if isAllowed && !strings.Contains(preflight.header.Get("Access-Control-Allow-Headers"),
				"x-stainless-os") {
				t.Errorf("the preflight allows %v", preflight.header)
			}
		}
	}
}

func TestPagesOfOtherOriginsHaveNoEffect(t *testing.T) {
	const foreign = "https://evil.example.com"
	crossSite := []string{"Origin", foreign, "Sec-Fetch-Site", "cross-site"}
	for _, c := range []struct {
		allowed   []string
		header    []string
		isRefused bool
	}{
		{nil, crossSite, true},
		{nil, []string{"Origin", foreign}, true}, // of an older browser
		{nil, []string{"Origin", "null", "Sec-Fetch-Site", "cross-site"}, true},
		{nil, []string{"Sec-Fetch-Site", "same-site"}, true},
		{nil, []string{"Sec-Fetch-Site", "same-origin", "Origin", foreign}, false},
		{nil, nil, false}, // no browser
		{[]string{"https://chat.example.org"}, crossSite, true},
		{[]string{"https://chat.example.org", foreign}, crossSite, false},
		{[]string{"https://*.example.com"}, crossSite, false},
		{[]string{"*"}, crossSite, false},
	} {
		var numCalls int
		front := httptest.NewServer(handler(t, &fakeGateway{chat: func(
			_ *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
		) error {
			numCalls++
			return stream.Send(jsonBody("{}"))
		}}, edge.Config{AllowedOrigins: c.allowed}))
		t.Cleanup(front.Close)
		got := post(t, front.URL, "{}", append([]string{"Content-Type", "text/plain"}, c.header...)...)
		if !c.isRefused {
			if got.status != http.StatusOK || numCalls != 1 {
				t.Errorf("%v, %v: %d %s", c.allowed, c.header, got.status, got.body)
			}
			continue
		}
		failure := got.failure(t)
		if got.status != http.StatusForbidden || failure.Type != "permission_error" ||
			orEmpty(failure.Code) != "cross_origin" || numCalls != 0 ||
			!strings.Contains(failure.Message, "--allowed-origins") ||
			got.header.Get("X-Request-Id") == "" {
			t.Errorf("%v, %v: %d %s", c.allowed, c.header, got.status, got.body)
		}
		read := do(t, http.MethodGet, front.URL+"/v1/models/demo", nil, c.header...)
		if read.status != http.StatusOK {
			t.Errorf("%v, %v: reading: %d", c.allowed, c.header, read.status)
		}
	}
}
