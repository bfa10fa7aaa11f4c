package edge

import (
	"net/http"
	"strconv"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"weft.dev/weft/services/rest/internal/reqinfo"
)

// Probes come every few seconds and are not traced.
var untraced = map[string]bool{
	"/healthz": true, "/health": true, "/readyz": true, "/ping": true, "/health_generate": true,
	"/metrics": true, "/": true,
}

// Tracing makes one span of each request that a route takes; the gateway's is its child.
type Tracing struct {
	tracer trace.Tracer
}

// NewTracing makes the spans with a provider, which exports them.
func NewTracing(provider trace.TracerProvider) *Tracing {
	return &Tracing{provider.Tracer("weft.dev/weft/services/rest")}
}

// wrap is a middleware, inside of recordRoute.
func (t *Tracing) wrap(next runtime.HandlerFunc) runtime.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request, params map[string]string) {
		info := reqinfo.From(r.Context())
		span := t.begin(r, info)
		if span == nil {
			next(w, r, params)
			return
		}
		recorder := &statusRecorder{ResponseWriter: w}
		defer func() { end(span, recorder.statusCode(), info.FailureCode()) }()
		next(recorder, r, params)
	}
}

// begin puts the new span's context into the request's header, which goes on to the gateway. It is
// nil for a request that is not traced; a client's context then passes unchanged.
func (t *Tracing) begin(r *http.Request, info *reqinfo.Info) trace.Span {
	if untraced[info.Route] {
		return nil
	}
	var w3c propagation.TraceContext
	header := propagation.HeaderCarrier(r.Header)
	ctx := w3c.Extract(r.Context(), header)
	if caller := trace.SpanContextFromContext(ctx); caller.IsValid() && !caller.IsSampled() {
		return nil
	}
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	ctx, span := t.tracer.Start(ctx, r.Method+" "+info.Route,
		trace.WithSpanKind(trace.SpanKindServer),
		trace.WithAttributes(
			semconv.HTTPRequestMethodKey.String(r.Method),
			semconv.HTTPRoute(info.Route),
			semconv.URLPath(r.URL.Path),
			semconv.URLScheme(scheme),
			attribute.String("weft.http_request_id", info.ID),
		))
	r.Header.Del("tracestate") // that of an invalid traceparent means nothing
	w3c.Inject(ctx, header)
	return span
}

func end(span trace.Span, status int, failure string) {
	span.SetAttributes(semconv.HTTPResponseStatusCode(status))
	if failure == "" && status >= http.StatusInternalServerError {
		failure = strconv.Itoa(status)
	}
	if failure != "" {
		span.SetAttributes(semconv.ErrorTypeKey.String(failure))
		span.SetStatus(codes.Error, failure)
	}
	span.End()
}
