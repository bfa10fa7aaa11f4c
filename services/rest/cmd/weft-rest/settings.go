package main

import (
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"weft.dev/weft/services/rest/internal/backend"
	"weft.dev/weft/services/rest/internal/identity"
)

const envPrefix = "WEFT_REST_"

// scripts/gen_rest_settings.py writes it, from the declarations that all services share.
//
//go:embed settings.json
var declared []byte

// declaration of a setting. Bounds of durations are in seconds.
type declaration struct {
	Name    string   `json:"name"`
	Default any      `json:"default"`
	Min     *float64 `json:"min"`
	Max     *float64 `json:"max"`
	Help    string   `json:"help"`
}

func (d declaration) allows(value float64) bool { // not a number is within no bounds
	return (d.Min == nil || value >= *d.Min) && (d.Max == nil || value <= *d.Max)
}

func (d declaration) bounds() string {
	least := strconv.FormatFloat(*d.Min, 'f', -1, 64)
	if d.Max == nil {
		return "at least " + least
	}
	return least + " to " + strconv.FormatFloat(*d.Max, 'f', -1, 64)
}

// seconds is a duration that flags give as a number of seconds, as the other services' do.
type seconds struct{ value *time.Duration }

func (s seconds) String() string {
	if s.value == nil {
		return "0"
	}
	return strconv.FormatFloat(s.value.Seconds(), 'g', -1, 64)
}

func (s seconds) Set(text string) error {
	number, err := strconv.ParseFloat(text, 64)
	if err != nil || !(math.Abs(number) <= math.MaxInt32) {
		return errors.New("must be a number of seconds")
	}
	*s.value = time.Duration(number * float64(time.Second))
	return nil
}

// settings of the edge, from defaults < environment (WEFT_REST_*) < flags.
type settings struct {
	listen        string
	backend       string
	metricsListen string
	pickerListen  string
	endpoints     string
	readyFile     string
	maxBodyBytes  int64
	maxHeldBytes  int64
	readyGrace    time.Duration
	drainTimeout  time.Duration
	commentAfter  time.Duration
	tls           identity.Files
	https         identity.Files
	insecure      bool
	otlpEndpoint  string
	sampleRatio   float64
	tracing       bool
	origins       string
}

func (s *settings) byName() map[string]any {
	return map[string]any{
		"listen":             &s.listen,
		"backend":            &s.backend,
		"metrics-listen":     &s.metricsListen,
		"picker-listen":      &s.pickerListen,
		"picker-endpoints":   &s.endpoints,
		"ready-file":         &s.readyFile,
		"max-body-bytes":     &s.maxBodyBytes,
		"max-held-bytes":     &s.maxHeldBytes,
		"ready-grace-s":      &s.readyGrace,
		"drain-timeout":      &s.drainTimeout,
		"comment-after":      &s.commentAfter,
		"tls-cert":           &s.tls.Cert,
		"tls-key":            &s.tls.Key,
		"tls-ca":             &s.tls.CA,
		"https-cert":         &s.https.Cert,
		"https-key":          &s.https.Key,
		"insecure":           &s.insecure,
		"otlp-endpoint":      &s.otlpEndpoint,
		"trace-sample-ratio": &s.sampleRatio,
		"tracing":            &s.tracing,
		"allowed-origins":    &s.origins,
	}
}

// parseSettings reports errors, or the help asked for, to output. The environment is as os.Environ
// has it.
func parseSettings(
	arguments []string, environment []string, output io.Writer,
) (settings, error) {
	var s settings
	flags := flag.NewFlagSet("weft-rest", flag.ContinueOnError)
	flags.SetOutput(output)
	var declarations []declaration
	if err := json.Unmarshal(declared, &declarations); err != nil {
		return s, err
	}
	for _, declaration := range declarations {
		declaration.addTo(flags, s.byName()[declaration.Name])
	}
	if err := setFromEnvironment(flags, environment); err != nil {
		_, _ = fmt.Fprintln(output, err)
		return s, err
	}
	if err := flags.Parse(arguments); err != nil {
		return s, err
	}
	if err := errors.Join(s.checkBounds(flags, declarations), s.check(flags)); err != nil {
		_, _ = fmt.Fprintln(output, err)
		return s, err
	}
	return s, nil
}

// addTo adds the setting's flag, whose value goes to target.
func (d declaration) addTo(flags *flag.FlagSet, target any) {
	help := strings.ReplaceAll(d.Help, "`", "'") // which mean the name of a value to flag
	switch value := target.(type) {
	case *string:
		flags.StringVar(value, d.Name, d.Default.(string), help)
	case *int64:
		flags.Int64Var(value, d.Name, int64(d.Default.(float64)), help)
	case *float64:
		flags.Float64Var(value, d.Name, d.Default.(float64), help)
	case *bool:
		flags.BoolVar(value, d.Name, d.Default.(bool), help)
		flags.BoolFunc("no-"+d.Name, "the contrary of --"+d.Name, func(text string) error {
			no, err := strconv.ParseBool(text)
			*value = !no
			return err
		})
	case *time.Duration:
		*value = time.Duration(d.Default.(float64) * float64(time.Second))
		if strings.HasSuffix(d.Name, "-s") {
			flags.Var(seconds{value}, d.Name, help)
		} else {
			flags.DurationVar(value, d.Name, *value, help)
		}
	default:
		panic("settings.json has " + d.Name + ", which byName lacks")
	}
}

func (s *settings) checkBounds(flags *flag.FlagSet, declarations []declaration) error {
	var problems []error
	for _, declaration := range declarations {
		var value float64
		switch set := s.byName()[declaration.Name].(type) {
		case *int64:
			value = float64(*set)
		case *float64:
			value = *set
		case *time.Duration:
			value = set.Seconds()
		}
		if !declaration.allows(value) {
			problems = append(problems, fmt.Errorf("--%s %s: must be %s", declaration.Name,
				flags.Lookup(declaration.Name).Value, declaration.bounds()))
		}
	}
	return errors.Join(problems...)
}

func setFromEnvironment(flags *flag.FlagSet, environment []string) error {
	var problems []error
	for _, variable := range environment {
		name, value, _ := strings.Cut(variable, "=")
		setting, ours := strings.CutPrefix(name, envPrefix)
		if !ours {
			continue
		}
		setting = strings.ToLower(strings.ReplaceAll(setting, "_", "-"))
		if flags.Lookup(setting) == nil {
			problems = append(problems, fmt.Errorf(
				"%s: no such setting; unset it (see `weft serve rest --help`)", name))
		} else if err := flags.Set(setting, value); err != nil {
			problems = append(problems, fmt.Errorf("invalid value %q of %s: %w", value, name, err))
		}
	}
	return errors.Join(problems...)
}

// pickerEndpoints are those of --picker-endpoints.
func (s settings) pickerEndpoints() ([]string, error) {
	if s.endpoints == "" {
		return nil, nil
	}
	return backend.Split(s.endpoints)
}

// allowedOrigins are the origins of --allowed-origins.
func (s settings) allowedOrigins() []string {
	return strings.FieldsFunc(s.origins, func(r rune) bool { return r == ',' || r == ' ' })
}

// isExposed says whether other machines can reach plain HTTP.
func (s settings) isExposed() bool {
	return s.https.Cert == "" && isOpen(s.listen)
}

// pickerFiles are the certificate that proxies see: that for HTTPS, else that of the mesh.
func (s settings) pickerFiles() identity.Files {
	if s.https.Cert != "" {
		return s.https
	}
	return identity.Files{Cert: s.tls.Cert, Key: s.tls.Key}
}

// isOpen says whether other machines can reach an address.
func isOpen(listen string) bool {
	host, _, err := net.SplitHostPort(listen)
	if err != nil || host == "localhost" {
		return false // a malformed address fails when it is bound
	}
	address, err := netip.ParseAddr(host)
	return err != nil || !address.IsLoopback()
}

func allOrNone(values ...string) bool {
	given := 0
	for _, value := range values {
		if value != "" {
			given++
		}
	}
	return given == 0 || given == len(values)
}

func (s settings) check(flags *flag.FlagSet) error {
	_, badBackend := backend.Split(s.backend)
	_, badEndpoints := s.pickerEndpoints()
	switch {
	case flags.NArg() > 0:
		return fmt.Errorf("unexpected argument %q: weft-rest takes flags only", flags.Arg(0))
	case badBackend != nil:
		return fmt.Errorf("--backend: %w: give the gateways' gRPC addresses", badBackend)
	case !allOrNone(s.tls.Cert, s.tls.Key, s.tls.CA):
		return errors.New("--tls-cert, --tls-key and --tls-ca: give all three, or none")
	case !allOrNone(s.https.Cert, s.https.Key):
		return errors.New("--https-cert and --https-key: give both, or none")
	case (s.pickerListen == "") != (s.endpoints == ""):
		return errors.New("--picker-listen and --picker-endpoints: give both, or none")
	case badEndpoints != nil:
		return fmt.Errorf("--picker-endpoints: %w: give the addresses of REST edges", badEndpoints)
	case s.pickerListen != "" && isOpen(s.pickerListen) && s.pickerFiles().Cert == "" && !s.insecure:
		return fmt.Errorf("--picker-listen %s is open to other machines, and there is no "+
			"--https-cert or --tls-cert; accept that with --insecure", s.pickerListen)
	case s.isExposed() && !s.insecure:
		return fmt.Errorf("--listen %s is open to other machines, and there is no --https-cert; "+
			"accept that with --insecure, for example behind a proxy that does TLS", s.listen)
	}
	return nil
}
