// Package edge is the REST face of the gateway: it routes by the google.api.http rules of the
// gateway's services, passes bodies through unparsed and writes errors in the shape that each
// service declares.
package edge

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/grpc"

	weftv1 "weft.dev/weft/services/rest/gen/weft/v1"
	"weft.dev/weft/services/rest/internal/apierror"
	"weft.dev/weft/services/rest/internal/clientconn"
	"weft.dev/weft/services/rest/internal/console"
	"weft.dev/weft/services/rest/internal/forward"
	"weft.dev/weft/services/rest/internal/relay"
	"weft.dev/weft/services/rest/internal/reqinfo"
)

const requestIDHeader = "X-Request-Id"

// Config is what an edge needs.
type Config struct {
	// Backend is the connection to the gateway.
	Backend grpc.ClientConnInterface
	// MaxBodyBytes bounds a request body; more is answered with 413.
	MaxBodyBytes int64
	// MaxHeldBytes bounds the bodies, all together, that are not passed on yet; more are answered with
	// 503. One body always has room. 0: four of the largest have, and no less than leastHeldBytes.
	MaxHeldBytes int64
	// BodyPause: a body of which nothing comes for this long is answered with 408; 0: 10 s.
	BodyPause time.Duration
	Logger    *slog.Logger
	Metrics   *Metrics
	// Streams are the limits of streamed answers.
	Streams forward.Limits
	// Tracing may be nil; then a client's trace context is passed on unchanged.
	Tracing *Tracing
	// AllowedOrigins are the origins whose pages may send requests other than GET, and read answers,
	// in a browser; "*": all.
	AllowedOrigins []string
	// Leaving is done once clients should go elsewhere: the edge still serves, but says that it is not
	// ready and closes connections behind their next answer. nil: as soon as it drains.
	Leaving context.Context
}

// watchPath is that of a stream without an end, which must not keep the edge from ending.
const watchPath = "/mesh/watch"

type edge struct {
	config  Config
	mux     *runtime.ServeMux
	origins origins
	shapes  shapes
	room    *Room
	relays  *relay.Relays
	ending  context.Context // done as soon as the edge begins to drain
}

// New builds the handler. When ctx ends, the edge begins to drain.
func New(ctx context.Context, config Config) (http.Handler, error) {
	if config.BodyPause == 0 {
		config.BodyPause = bodyPause
	}
	if config.Leaving == nil {
		config.Leaving = ctx
	}
	e := &edge{
		config:  config,
		ending:  ctx,
		origins: newOrigins(config.AllowedOrigins),
		shapes:  readShapes(weftv1.File_weft_v1_dialects_proto),
		room:    NewRoom(config.MaxHeldBytes, config.MaxBodyBytes),
		relays:  relay.New(config.Backend),
	}
	middlewares := []runtime.Middleware{answerProbes, recordRoute}
	if config.Tracing != nil {
		middlewares = append(middlewares, config.Tracing.wrap)
	}
	e.mux = runtime.NewServeMux(
		runtime.WithMarshalerOption(runtime.MIMEWildcard, newRawMarshaler()),
		runtime.WithErrorHandler(e.handleError),
		runtime.WithRoutingErrorHandler(e.handleRoutingError),
		runtime.WithIncomingHeaderMatcher(incomingHeader),
		runtime.WithOutgoingHeaderMatcher(forward.ClientHeader),
		runtime.WithOutgoingTrailerMatcher(noHeader),
		runtime.WithDisablePathLengthFallback(),
		runtime.WithDisableHTTPMethodOverride(),
		runtime.WithWriteContentLength(),
		runtime.WithMiddlewares(middlewares...),
	)
	if err := register(ctx, e.mux, passing{config.Backend}); err != nil {
		return nil, fmt.Errorf("registering the REST routes: %w", err)
	}
	for path, handle := range map[string]runtime.HandlerFunc{
		"/healthz": alive, "/health": alive, "/": greet,
	} {
		if err := e.mux.HandlePath(http.MethodGet, path, handle); err != nil {
			return nil, fmt.Errorf("registering %s: %w", path, err)
		}
	}
	if err := console.Register(e.mux); err != nil {
		return nil, err
	}
	return closing(config.Leaving, e.origins.allow(e)), nil
}

// register adds the routes of every service that has any.
func register(
	ctx context.Context, mux *runtime.ServeMux, backend grpc.ClientConnInterface,
) error {
	return errors.Join(
		weftv1.RegisterOpenAIServiceHandlerClient(
			ctx, mux, weftv1.NewOpenAIServiceClient(backend)),
		weftv1.RegisterResponsesServiceHandlerClient(
			ctx, mux, weftv1.NewResponsesServiceClient(backend)),
		weftv1.RegisterPoolingServiceHandlerClient(
			ctx, mux, weftv1.NewPoolingServiceClient(backend)),
		weftv1.RegisterAnthropicServiceHandlerClient(
			ctx, mux, weftv1.NewAnthropicServiceClient(backend)),
		weftv1.RegisterOllamaServiceHandlerClient(
			ctx, mux, weftv1.NewOllamaServiceClient(backend)),
		weftv1.RegisterServerServiceHandlerClient(
			ctx, mux, weftv1.NewServerServiceClient(backend)),
		weftv1.RegisterTrainerServiceHandlerClient(
			ctx, mux, weftv1.NewTrainerServiceClient(backend)),
		weftv1.RegisterMeshServiceHandlerClient(
			ctx, mux, weftv1.NewMeshServiceClient(backend)),
	)
}

// ServeHTTP gives the request its id, bounds its body and hands it to the router.
func (e *edge) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	info := reqinfo.New(r.Header.Get(requestIDHeader))
	r.Header.Set(requestIDHeader, info.ID)
	w.Header().Set(requestIDHeader, info.ID)
	limits := e.config.Streams
	if clientconn.Of(r.Context()) != nil {
		limits.WriteStall = 0
	}
	ctx := forward.WithLimits(reqinfo.With(r.Context(), info), limits)
	trimSlashes(r)
	r = r.WithContext(apierror.WithShape(ctx, e.shapes.of(r.URL.Path), info.ID))

	recorder := &statusRecorder{
		ResponseWriter: w, limits: limits, leaving: e.config.Leaving,
	}
	defer e.config.Metrics.observe(recorder, info)()

	if e.origins.refuse(recorder, r) || e.refuseReadiness(recorder, r) {
		return
	}
	if !utf8.ValidString(r.URL.Path) {
		apierror.New(http.StatusBadRequest, "invalid_path", "The path is not valid UTF-8.").
			For(r.Context()).Write(recorder)
		return
	}
	if key := unreadable(r.Header); key != "" {
		failure := apierror.New(http.StatusBadRequest, "invalid_request",
			key+": contains characters other than printable ASCII").For(r.Context())
		failure.Param = key
		failure.Write(recorder)
		return
	}
	if encoding := r.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		apierror.New(http.StatusUnsupportedMediaType, "unsupported_encoding",
			"The body is encoded as "+strconv.Quote(encoding)+"; send it without Content-Encoding.").
			For(r.Context()).Write(recorder)
		return
	}
	if r.Body != nil && r.Body != http.NoBody {
		body := newLimitedBody(w, r, e.config, e.room)
		defer body.ended()
		defer body.release()
		placed, endPlace := e.relays.With(r.Context())
		defer endPlace()
		r = r.WithContext(context.WithValue(placed, bodyKey{}, body))
		r.Body = body
	} else if takesInterim(r) {
		defer clientconn.Answering(ctx)()
	}
	if r.URL.Path == watchPath {
		watched, cancel := context.WithCancelCause(r.Context())
		defer context.AfterFunc(e.ending, func() { cancel(apierror.ErrDraining) })()
		r = r.WithContext(watched)
	}
	if r.Method == http.MethodHead {
		r.Method = http.MethodGet // the server sends the header of the answer alone
	}
	e.mux.ServeHTTP(recorder, r)
	if info.Failure != nil {
		e.logStreamFailure(r, apierror.From(info.Failure))
	}
}

// takesInterim says whether the client accepts an interim response, which `clientconn` sends.
func takesInterim(r *http.Request) bool {
	return r.ProtoMajor == 1 && r.ProtoMinor >= 1
}

// trimSlashes takes slashes off the end of the path, which clients append to a base URL's.
func trimSlashes(r *http.Request) {
	if path := strings.TrimRight(r.URL.Path, "/"); path != "" {
		r.URL.Path, r.URL.RawPath = path, strings.TrimRight(r.URL.RawPath, "/")
	}
}

// logStreamFailure also logs the gateway's error, which the client's status does not show. Failures
// of the client, such as its disconnect, are below 500.
func (e *edge) logStreamFailure(r *http.Request, failure apierror.Error) {
	if failure.Status < http.StatusInternalServerError {
		return
	}
	cause := failure.Cause
	if cause == "" {
		cause = failure.Message
	}
	e.warn("stream failed after it had begun", r, failure, cause)
}

func (e *edge) warn(message string, r *http.Request, failure apierror.Error, cause string) {
	e.config.Logger.Warn(message,
		"request_id", reqinfo.From(r.Context()).ID, "method", r.Method, "path", r.URL.Path,
		"status", failure.Status, "code", failure.Code, "cause", cause)
}

// handleError answers a failed call.
func (e *edge) handleError(
	ctx context.Context,
	_ *runtime.ServeMux,
	_ runtime.Marshaler,
	w http.ResponseWriter,
	r *http.Request,
	err error,
) {
	if probeOf(ctx) != nil {
		return
	}
	forward.CopyHeader(ctx, w)
	// When the edge shuts down, a body may be incomplete, which is then not the client's fault.
	if body, ok := r.Body.(*limitedBody); ok && !apierror.IsDraining(r.Context()) {
		if failure, failed := body.problem(); failed {
			failure.For(r.Context()).Write(w)
			return
		}
	}
	failure := apierror.From(apierror.Reason(r.Context(), err)).For(r.Context())
	if failure.Status >= http.StatusInternalServerError && failure.Cause != "" {
		e.warn("call to the gateway failed", r, failure, failure.Cause)
	}
	failure.Write(w)
}

// unserved has the paths of OpenAI's operations that Weft does not have, but that look like the path
// of a response with an id, to which other methods apply.
var unserved = map[string]bool{
	"/v1/responses/compact": true,
}

// handleRoutingError answers a request that no route takes.
func (e *edge) handleRoutingError(
	ctx context.Context,
	_ *runtime.ServeMux,
	_ runtime.Marshaler,
	w http.ResponseWriter,
	r *http.Request,
	httpStatus int,
) {
	if probeOf(ctx) != nil {
		return
	}
	if httpStatus == http.StatusMethodNotAllowed && unserved[r.URL.Path] {
		httpStatus = http.StatusNotFound
	}
	failure := apierror.New(httpStatus, "invalid_path", "The path is malformed.").For(r.Context())
	switch httpStatus {
	case http.StatusNotFound:
		failure.Code, failure.Message = "unknown_url", "Unknown URL: "+r.Method+" "+r.URL.Path
	case http.StatusMethodNotAllowed:
		failure.Code = "method_not_allowed"
		failure.Message = r.Method + " is not allowed for " + r.URL.Path
		w.Header().Set("Allow", e.allowed(r))
	}
	failure.Write(w)
}

// recordRoute notes the matched pattern, which has few values, for metrics and spans.
func recordRoute(next runtime.HandlerFunc) runtime.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request, params map[string]string) {
		if pattern, ok := runtime.HTTPPattern(r.Context()); ok {
			reqinfo.From(r.Context()).Route = pattern.String()
		}
		next(w, r, params)
	}
}

// alive says that the edge itself runs; /readyz asks the gateway.
func alive(w http.ResponseWriter, _ *http.Request, _ map[string]string) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"status":"ok"}`)
}

// greet answers clients that look for a server at its address, as Ollama's do before each command.
func greet(w http.ResponseWriter, _ *http.Request, _ map[string]string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, "Weft is running")
}

// incomingHeader lists the request headers that the gateway sees, those of all APIs on all paths.
// `authorization`, `x-forwarded-for` and `x-forwarded-host` always pass.
func incomingHeader(key string) (string, bool) {
	switch key {
	case requestIDHeader, "X-Routing-Key", "X-Ttft-Target-Ms", "X-Itl-Target-Ms",
		"X-Request-Timeout-Ms", "X-First-Token-Timeout-Ms", "X-Worker-Id", "X-Data-Parallel-Rank",
		"Endpoint-Load-Metrics-Format", "Traceparent", "Tracestate", "X-Api-Key", "Anthropic-Version",
		"Anthropic-Beta":
		return strings.ToLower(key), true
	default:
		return "", false
	}
}

// unreadable returns the name, in lower case, of a header that the gateway should see and that cannot
// be passed on; empty: there is none. Headers of traces are then removed, as their standard wants.
func unreadable(header http.Header) string {
	for key, values := range header {
		if _, isPassed := incomingHeader(key); !isPassed && key != "Authorization" {
			continue
		}
		if !slices.ContainsFunc(values, isUnprintable) {
			continue
		}
		if key != "Traceparent" && key != "Tracestate" {
			return strings.ToLower(key)
		}
		header.Del(key)
	}
	return ""
}

func isUnprintable(value string) bool {
	return strings.ContainsFunc(value, func(char rune) bool { return char < ' ' || char > '~' })
}

func noHeader(string) (string, bool) {
	return "", false
}
