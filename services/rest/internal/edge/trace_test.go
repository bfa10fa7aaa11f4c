package edge_test

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/genproto/googleapis/api/httpbody"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"weft.dev/weft/services/rest/internal/edge"
)

const (
	clientTrace = "0af7651916cd43dd8448eb211c80319c"
	clientSpan  = "b7ad6b7169203331"
)

// traced is an edge whose spans are kept, and what its gateway got.
type traced struct {
	url   string
	spans *tracetest.InMemoryExporter
	seen  chan metadata.MD
	// answer is what the gateway says to a chat.
	answer func(grpc.ServerStreamingServer[httpbody.HttpBody]) error
}

func startTracing(t *testing.T, sampler sdktrace.Sampler) *traced {
	t.Helper()
	e := &traced{spans: tracetest.NewInMemoryExporter(), seen: make(chan metadata.MD, 1)}
	e.answer = func(stream grpc.ServerStreamingServer[httpbody.HttpBody]) error {
		return stream.Send(jsonBody("{}"))
	}
	gateway := &fakeGateway{chat: func(
		_ *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
	) error {
		incoming, _ := metadata.FromIncomingContext(stream.Context())
		e.seen <- incoming
		return e.answer(stream)
	}}
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithSyncer(e.spans), sdktrace.WithSampler(sdktrace.ParentBased(sampler)))
	t.Cleanup(func() { _ = provider.Shutdown(context.Background()) })
	e.url = startTraced(t, gateway, edge.NewTracing(provider))
	return e
}

// chat asks once; the answer, and what the gateway saw of the trace.
func (e *traced) chat(t *testing.T, header ...string) (got answer, parent, state string) {
	t.Helper()
	got = post(t, e.url, "{}", header...)
	incoming := <-e.seen
	return got, strings.Join(incoming.Get("traceparent"), ","),
		strings.Join(incoming.Get("tracestate"), ",")
}

// only is the one span that has ended since the last call.
func (e *traced) only(t *testing.T) tracetest.SpanStub {
	t.Helper()
	spans := e.spans.GetSpans()
	e.spans.Reset()
	if len(spans) != 1 {
		t.Fatalf("%d spans: %+v", len(spans), spans)
	}
	return spans[0]
}

func value(span tracetest.SpanStub, key attribute.Key) string {
	for _, pair := range span.Attributes {
		if pair.Key == key {
			return pair.Value.Emit()
		}
	}
	return ""
}

func TestTheSpanIsBetweenTheClientsAndTheGateways(t *testing.T) {
	e := startTracing(t, sdktrace.AlwaysSample())
	got, parent, state := e.chat(t, "Traceparent", "00-"+clientTrace+"-"+clientSpan+"-01",
		"Tracestate", "vendor=1", "X-Request-Id", "abc")
	span := e.only(t)
	if got.status != http.StatusOK || span.Name != "POST /v1/chat/completions" ||
		span.SpanKind != trace.SpanKindServer || span.Status.Code != otelcodes.Unset {
		t.Fatalf("%d %+v", got.status, span)
	}
	if span.SpanContext.TraceID().String() != clientTrace ||
		span.Parent.SpanID().String() != clientSpan || !span.Parent.IsRemote() {
		t.Fatalf("%+v of %+v", span.SpanContext, span.Parent)
	}
	want := "00-" + clientTrace + "-" + span.SpanContext.SpanID().String() + "-01"
	if parent != want || state != "vendor=1" {
		t.Fatalf("the gateway saw %q %q, want %q", parent, state, want)
	}
	for key, want := range map[attribute.Key]string{
		"http.request.method": "POST", "http.route": "/v1/chat/completions",
		"url.path": "/v1/chat/completions", "url.scheme": "http",
		"http.response.status_code": "200", "weft.http_request_id": "abc", "error.type": "",
	} {
		if value(span, key) != want {
			t.Fatalf("%s = %q, want %q", key, value(span, key), want)
		}
	}
}

func TestTheEdgeBeginsATraceWhereTheClientHasNone(t *testing.T) {
	for _, ratio := range []float64{1, 0} {
		e := startTracing(t, sdktrace.TraceIDRatioBased(ratio))
		for _, header := range [][]string{
			{}, {"Traceparent", "nonsense", "Tracestate", "vendor=1"},
		} {
			_, parent, state := e.chat(t, header...)
			var w3c propagation.TraceContext
			seen := trace.SpanContextFromContext(w3c.Extract(
				context.Background(), propagation.MapCarrier{"traceparent": parent}))
			if !seen.IsValid() || seen.IsSampled() != (ratio == 1) || state != "" {
				t.Fatalf("the gateway saw %q %q with %g sampled", parent, state, ratio)
			}
			if ratio == 0 {
				continue
			}
			if span := e.only(t); span.Parent.IsValid() || span.SpanContext.SpanID() != seen.SpanID() {
				t.Fatalf("%q of %+v", parent, span)
			}
		}
		if spans := e.spans.GetSpans(); len(spans) != 0 {
			t.Fatalf("%+v", spans)
		}
	}
}

func TestAnUnsampledTracePassesUnchanged(t *testing.T) {
	e := startTracing(t, sdktrace.AlwaysSample())
	given := "00-" + clientTrace + "-" + clientSpan + "-00"
	_, parent, state := e.chat(t, "Traceparent", given, "Tracestate", "vendor=1")
	if parent != given || state != "vendor=1" {
		t.Fatalf("the gateway saw %q %q", parent, state)
	}
	if spans := e.spans.GetSpans(); len(spans) != 0 {
		t.Fatalf("%+v", spans)
	}
}

func TestFailuresAreInTheirSpans(t *testing.T) {
	e := startTracing(t, sdktrace.AlwaysSample())
	cases := []struct {
		name, status, kind string
		err                error
		isInMidStream      bool
	}{
		{"the client's", "400", "", status.Error(codes.InvalidArgument, "m"), false},
		{"the mesh's", "503", "503", status.Error(codes.Unavailable, "m"), false},
		{"in mid stream", "200", "Unavailable", status.Error(codes.Unavailable, "m"), true},
	}
	for _, c := range cases {
		e.answer = func(stream grpc.ServerStreamingServer[httpbody.HttpBody]) error {
			if c.isInMidStream {
				_ = stream.Send(events("data: 1\n\n"))
			}
			return c.err
		}
		e.chat(t)
		span := e.only(t)
		if value(span, "http.response.status_code") != c.status ||
			value(span, "error.type") != c.kind ||
			(span.Status.Code == otelcodes.Error) != (c.kind != "") {
			t.Fatalf("%s: %+v", c.name, span)
		}
	}
}

func TestProbesAndStrayRequestsHaveNoSpan(t *testing.T) {
	e := startTracing(t, sdktrace.AlwaysSample())
	for _, path := range []string{"/healthz", "/readyz", "/nowhere"} {
		do(t, http.MethodGet, e.url+path, nil)
	}
	if spans := e.spans.GetSpans(); len(spans) != 0 {
		t.Fatalf("%+v", spans)
	}
	do(t, http.MethodGet, e.url+"/v1/models/m", nil)
	if span := e.only(t); !strings.HasPrefix(span.Name, "GET /v1/models/") ||
		strings.HasSuffix(span.Name, "/m") {
		t.Fatalf("%q", span.Name)
	}
}
