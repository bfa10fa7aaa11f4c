package otlp_test

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/services/rest/internal/otlp"
)

// environment sets variables for this process, which the SDK reads, and gives a look-up of them.
func environment(t *testing.T, pairs ...string) func(string) string {
	t.Helper()
	values := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		t.Setenv(pairs[i], pairs[i+1])
		values[pairs[i]] = pairs[i+1]
	}
	return func(name string) string { return values[name] }
}

func quiet() *slog.Logger { return slog.New(slog.NewJSONHandler(io.Discard, nil)) }

func TestTheEndpointIsTheSettingElseTheVariables(t *testing.T) {
	none := environment(t)
	some := environment(t,
		"OTEL_EXPORTER_OTLP_ENDPOINT", "http://b:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://a:1")
	for _, c := range []struct {
		setting, want string
		getenv        func(string) string
	}{{"", "", none}, {"http://c:1", "http://c:1", some}, {"", "http://a:1", some}} {
		if got := otlp.Endpoint(c.setting, c.getenv); got != c.want {
			t.Fatalf("%q, want %q", got, c.want)
		}
	}
}

func TestWhatCannotBeUsedIsRefused(t *testing.T) {
	for _, endpoint := range []string{"127.0.0.1:4317", "collector:4317", "http://", "ftp://a", "http://a b"} {
		_, err := otlp.NewProvider(context.Background(), endpoint, 1, environment(t), quiet())
		if err == nil || !strings.Contains(err.Error(), "http://HOST:4317") {
			t.Fatalf("%q: %v", endpoint, err)
		}
	}
	getenv := environment(t, "OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
	_, err := otlp.NewProvider(context.Background(), "http://a:1", 1, getenv, quiet())
	if err == nil || !strings.Contains(err.Error(), "http/json") {
		t.Fatal(err)
	}
}

func TestSpansGoOverHTTPWhereThatIsAskedFor(t *testing.T) {
	got := make(chan *collector.ExportTraceServiceRequest, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		request := &collector.ExportTraceServiceRequest{}
		if err := proto.Unmarshal(body, request); err != nil || r.URL.Path != "/v1/traces" {
			t.Errorf("%s: %v", r.URL.Path, err)
		}
		got <- request
	}))
	defer server.Close()
	getenv := environment(t, "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf",
		"OTEL_EXPORTER_OTLP_ENDPOINT", server.URL, "OTEL_RESOURCE_ATTRIBUTES", "service.namespace=mine")
	provider, err := otlp.NewProvider(context.Background(), "", 1, getenv, quiet())
	if err != nil {
		t.Fatal(err)
	}
	_, span := provider.Tracer("test").Start(context.Background(), "work")
	span.End()
	if err := provider.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	resource := (<-got).GetResourceSpans()[0]
	about := map[string]string{}
	for _, pair := range resource.GetResource().GetAttributes() {
		about[pair.GetKey()] = pair.GetValue().GetStringValue()
	}
	if about["service.name"] != "rest" || about["service.namespace"] != "mine" ||
		!strings.HasPrefix(about["service.instance.id"], "rest-") {
		t.Fatalf("%v", about)
	}
	if name := resource.GetScopeSpans()[0].GetSpans()[0].GetName(); name != "work" {
		t.Fatal(name)
	}
}

func TestACollectorThatDoesNotAnswerHoldsUpNothing(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections, says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	getenv := environment(t, "OTEL_BSP_MAX_QUEUE_SIZE", "8", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
	provider, err := otlp.NewProvider(
		context.Background(), "http://"+silent.Addr().String(), 1, getenv, quiet())
	if err != nil {
		t.Fatal(err)
	}
	for range 10_000 { // far more than the queue holds
		_, span := provider.Tracer("test").Start(context.Background(), "work")
		span.End()
	}
	bounded, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if err := provider.Shutdown(bounded); err == nil {
		t.Fatal("spans went to nowhere")
	}
}
