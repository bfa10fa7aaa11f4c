package main

import (
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

const maxReadyGrace = 10 * time.Minute

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
	noTracing     bool
	origins       string
}

// parseSettings reports errors, or the help asked for, to output. The environment is as os.Environ
// has it.
func parseSettings(
	arguments []string, environment []string, output io.Writer,
) (settings, error) {
	var s settings
	flags := flag.NewFlagSet("weft-rest", flag.ContinueOnError)
	flags.SetOutput(output)
	flags.StringVar(&s.listen, "listen", "127.0.0.1:8000", "`address` to serve REST on")
	flags.StringVar(&s.backend, "backend", "127.0.0.1:50051",
		"gRPC `addresses` of the gateways, host:port with commas between; calls are spread over all")
	flags.StringVar(&s.metricsListen, "metrics-listen", "",
		"`address` to serve Prometheus metrics on; empty: none are served")
	flags.StringVar(&s.readyFile, "ready-file", "",
		"`file` written once the edge listens: JSON with address, metrics_address, pid")
	flags.Int64Var(&s.maxBodyBytes, "max-body-bytes", 8<<20,
		"largest request body in `bytes`; a larger one is answered with 413")
	flags.Int64Var(&s.maxHeldBytes, "max-held-bytes", 128<<20,
		"most `bytes` of request bodies that are not passed on yet; more are answered with 503")
	flags.Var(seconds{&s.readyGrace}, "ready-grace-s",
		"`seconds` after SIGTERM in which /readyz already says 503, while requests are still taken; "+
			"load balancers go elsewhere in this time")
	flags.DurationVar(&s.drainTimeout, "drain-timeout", 10*time.Second,
		"`time` that running requests then get to finish")
	flags.DurationVar(&s.commentAfter, "comment-after", 15*time.Second,
		"`time` without an event after which a stream gets a comment; 0: never")
	flags.StringVar(&s.tls.Cert, "tls-cert", "",
		"PEM `file` of the certificate that names this edge to the gateway (mutual TLS)")
	flags.StringVar(&s.tls.Key, "tls-key", "", "PEM `file` of that certificate's key")
	flags.StringVar(&s.tls.CA, "tls-ca", "",
		"PEM `file` of the authorities whose gateways are trusted")
	flags.StringVar(&s.https.Cert, "https-cert", "",
		"PEM `file` of the certificate that REST clients see; empty: plain HTTP")
	flags.StringVar(&s.https.Key, "https-key", "", "PEM `file` of that certificate's key")
	flags.BoolVar(&s.insecure, "insecure", false,
		"listen beyond loopback although there is no HTTPS here")
	flags.StringVar(&s.otlpEndpoint, "otlp-endpoint", "",
		"`URL` of the collector that spans are exported to, as http://HOST:4317; "+
			"empty: $OTEL_EXPORTER_OTLP_ENDPOINT, and nowhere without it")
	flags.Float64Var(&s.sampleRatio, "trace-sample-ratio", 1,
		"`share` of traces begun here that are exported, 0 to 1")
	flags.BoolVar(&s.noTracing, "no-tracing", false, "make no spans")
	flags.StringVar(&s.origins, "allowed-origins", "",
		"`origins` whose pages may send requests and read answers in a browser (CORS), as "+
			"https://chat.example.org, with commas between; *: all; empty: none")
	if err := setFromEnvironment(flags, environment); err != nil {
		_, _ = fmt.Fprintln(output, err)
		return s, err
	}
	if err := flags.Parse(arguments); err != nil {
		return s, err
	}
	if err := s.check(flags); err != nil {
		_, _ = fmt.Fprintln(output, err)
		return s, err
	}
	return s, nil
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

// allowedOrigins are the origins of --allowed-origins.
func (s settings) allowedOrigins() []string {
	return strings.FieldsFunc(s.origins, func(r rune) bool { return r == ',' || r == ' ' })
}

// isExposed says whether other machines can reach plain HTTP.
func (s settings) isExposed() bool {
	if s.https.Cert != "" {
		return false
	}
	host, _, err := net.SplitHostPort(s.listen)
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
	switch {
	case flags.NArg() > 0:
		return fmt.Errorf("unexpected argument %q: weft-rest takes flags only", flags.Arg(0))
	case badBackend != nil:
		return fmt.Errorf("--backend: %w: give the gateways' gRPC addresses", badBackend)
	case s.maxBodyBytes < 1 || s.maxBodyBytes > 1<<30:
		return fmt.Errorf("--max-body-bytes %d: must be 1 to 1073741824", s.maxBodyBytes)
	case s.maxHeldBytes < 1:
		return fmt.Errorf("--max-held-bytes %d: must be above 0", s.maxHeldBytes)
	case s.readyGrace < 0 || s.readyGrace > maxReadyGrace:
		return fmt.Errorf("--ready-grace-s %g: must be 0 to %g",
			s.readyGrace.Seconds(), maxReadyGrace.Seconds())
	case s.drainTimeout < 0:
		return fmt.Errorf("--drain-timeout %s: must not be negative", s.drainTimeout)
	case s.commentAfter < 0:
		return fmt.Errorf("--comment-after %s: must not be negative", s.commentAfter)
	case !(s.sampleRatio >= 0 && s.sampleRatio <= 1): // not a number is none either
		return fmt.Errorf("--trace-sample-ratio %g: must be 0 to 1", s.sampleRatio)
	case !allOrNone(s.tls.Cert, s.tls.Key, s.tls.CA):
		return errors.New("--tls-cert, --tls-key and --tls-ca: give all three, or none")
	case !allOrNone(s.https.Cert, s.https.Key):
		return errors.New("--https-cert and --https-key: give both, or none")
	case s.isExposed() && !s.insecure:
		return fmt.Errorf("--listen %s is open to other machines, and there is no --https-cert; "+
			"accept that with --insecure, for example behind a proxy that does TLS", s.listen)
	}
	return nil
}
