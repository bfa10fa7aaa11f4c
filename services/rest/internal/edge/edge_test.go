package edge_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/genproto/googleapis/api/httpbody"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/emptypb"

	weftv1 "weft.dev/weft/services/rest/gen/weft/v1"
	"weft.dev/weft/services/rest/internal/backend"
	"weft.dev/weft/services/rest/internal/edge"
)

const maxBody = 1 << 16

// fakeGateway answers chats with what the test sets.
type fakeGateway struct {
	weftv1.UnimplementedOpenAIServiceServer
	chat func(*httpbody.HttpBody, grpc.ServerStreamingServer[httpbody.HttpBody]) error
	// dialects may be nil.
	dialects *fakeDialects
	// relays may be nil.
	relays weftv1.EdgeServiceServer
}

func (g *fakeGateway) ChatCompletions(
	request *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
) error {
	return g.chat(request, stream)
}

func (g *fakeGateway) RetrieveModel(
	ctx context.Context, request *weftv1.RetrieveModelRequest,
) (*httpbody.HttpBody, error) {
	header := metadata.Pairs("x-weft-worker", "decode-0", "secret", "hidden",
		"x-ratelimit-remaining-requests", "7",
		"endpoint-load-metrics", "TEXT named_metrics.num_requests_waiting=3")
	if err := grpc.SetHeader(ctx, header); err != nil {
		return nil, err
	}
	return jsonBody(`{"id":"` + request.GetModel() + `"}`), nil
}

func (g *fakeGateway) Ready(context.Context, *emptypb.Empty) (*httpbody.HttpBody, error) {
	return nil, status.Error(codes.Unavailable, "dial tcp 10.1.2.3:50051: connection refused")
}

func jsonBody(text string) *httpbody.HttpBody {
	return &httpbody.HttpBody{ContentType: "application/json", Data: []byte(text)}
}

func events(text string) *httpbody.HttpBody {
	return &httpbody.HttpBody{ContentType: "text/event-stream", Data: []byte(text)}
}

// start serves a fake gateway behind an edge and gives the edge's URL.
func start(t *testing.T, gateway *fakeGateway) string {
	t.Helper()
	return startTraced(t, gateway, nil)
}

// startTraced is start with an edge that makes spans.
func startTraced(t *testing.T, gateway *fakeGateway, tracing *edge.Tracing) string {
	t.Helper()
	front := httptest.NewServer(handler(t, gateway, edge.Config{Tracing: tracing}))
	t.Cleanup(front.Close)
	return front.URL
}

// handler is an edge before a fake gateway; of config it takes what is not needed to run.
func handler(t *testing.T, gateway *fakeGateway, config edge.Config) http.Handler {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	weftv1.RegisterOpenAIServiceServer(server, gateway)
	if gateway.dialects != nil {
		weftv1.RegisterAnthropicServiceServer(server, gateway.dialects)
		weftv1.RegisterOllamaServiceServer(server, gateway.dialects)
	}
	if gateway.relays != nil {
		weftv1.RegisterEdgeServiceServer(server, gateway.relays)
	}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)

	connection, err := backend.Dial("127.0.0.1:1", insecure.NewCredentials(),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return listener.DialContext(ctx)
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })

	config.Backend = connection
	if config.MaxBodyBytes == 0 {
		config.MaxBodyBytes = maxBody
	}
	if config.Logger == nil {
		config.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	config.Metrics = edge.NewMetrics(prometheus.NewRegistry())
	made, err := edge.New(context.Background(), config)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func TestSlashesAtTheEndOfAPathDoNotMatter(t *testing.T) {
	url := start(t, &fakeGateway{})
	for _, path := range []string{"/v1/models/demo", "/v1/models/demo/", "/v1/models/demo//"} {
		if got := do(t, "GET", url+path, nil); got.status != 200 || got.body != `{"id":"demo"}` {
			t.Errorf("%s: %d %s", path, got.status, got.body)
		}
	}
	if got := do(t, "GET", url+"/", nil); got.status != 200 || got.body != "Weft is running" {
		t.Errorf("/: %d %s", got.status, got.body)
	}
}

type answer struct {
	status int
	header http.Header
	body   string
}

func do(t *testing.T, method, url string, body io.Reader, header ...string) answer {
	t.Helper()
	request, err := http.NewRequest(method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	content, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{response.StatusCode, response.Header, string(content)}
}

func post(t *testing.T, url, body string, header ...string) answer {
	t.Helper()
	return do(t, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(body), header...)
}

type openAIError struct {
	Message, Type string
	Param, Code   *string
}

func (a answer) failure(t *testing.T) openAIError {
	t.Helper()
	var body struct{ Error *openAIError }
	if err := json.Unmarshal([]byte(a.body), &body); err != nil || body.Error == nil {
		t.Fatalf("not an OpenAI error: %q (%v)", a.body, err)
	}
	if kind := a.header.Get("Content-Type"); kind != "application/json" {
		t.Fatalf("content type %q", kind)
	}
	return *body.Error
}

func orEmpty(text *string) string {
	if text == nil {
		return ""
	}
	return *text
}

func detailed(t *testing.T, code codes.Code, message string, details ...protoadapt.MessageV1) error {
	t.Helper()
	withDetails, err := status.New(code, message).WithDetails(details...)
	if err != nil {
		t.Fatal(err)
	}
	return withDetails.Err()
}

func TestBodiesPassThroughUnparsed(t *testing.T) {
	noise := make([]byte, 4096)
	_, _ = rand.Read(noise)
	url := start(t, &fakeGateway{chat: func(
		request *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
	) error {
		// In two messages: the edge joins the parts of a large answer.
		half := len(request.GetData()) / 2
		first := &httpbody.HttpBody{ContentType: "application/json", Data: request.GetData()[:half]}
		if err := stream.Send(first); err != nil {
			return err
		}
		return stream.Send(&httpbody.HttpBody{Data: request.GetData()[half:]})
	}})
	for _, body := range []string{`{"a": 1}`, "", "{not json", string(noise)} {
		got := post(t, url, body, "Content-Type", "application/x-www-form-urlencoded")
		if got.status != http.StatusOK || got.body != body {
			t.Fatalf("sent %q, got %d %q", body, got.status, got.body)
		}
	}
}

func TestEventsArriveOneByOne(t *testing.T) {
	next := make(chan struct{})
	url := start(t, &fakeGateway{chat: func(
		_ *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
	) error {
		for _, event := range []string{"data: 1\n\n", "data: 2\n\n", "data: [DONE]\n\n"} {
			if err := stream.Send(events(event)); err != nil {
				return err
			}
			<-next // the client has read it: nothing was held back
		}
		return nil
	}})
	response, err := http.Post(url+"/v1/chat/completions", "application/json", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	if kind := response.Header.Get("Content-Type"); kind != "text/event-stream" {
		t.Fatalf("content type %q", kind)
	}
	lines := bufio.NewScanner(response.Body)
	for _, want := range []string{"data: 1", "data: 2", "data: [DONE]"} {
		for lines.Scan() && lines.Text() == "" {
		}
		if lines.Text() != want {
			t.Fatalf("got %q, want %q", lines.Text(), want)
		}
		next <- struct{}{}
	}
}

func TestFailuresBecomeOpenAIErrors(t *testing.T) {
	info := func(reason, param, httpStatus string) *errdetails.ErrorInfo {
		return &errdetails.ErrorInfo{Reason: reason, Metadata: map[string]string{
			"param": param, "http_status": httpStatus,
		}}
	}
	retry := func(delay time.Duration) *errdetails.RetryInfo {
		return &errdetails.RetryInfo{RetryDelay: durationpb.New(delay)}
	}
	cases := []struct {
		name                                   string
		err                                    error
		status                                 int
		kind, code, param, retryAfter, mustSay string
		mustNotSay                             string
	}{
		{"invalid", detailed(t, codes.InvalidArgument, "n must be >= 1", info("INVALID", "n", "")),
			400, "invalid_request_error", "invalid", "n", "", "n must be", ""},
		{"unknown model", detailed(t, codes.NotFound, "no such model", info("MODEL_NOT_FOUND", "model", "")),
			404, "invalid_request_error", "model_not_found", "model", "", "no such", ""},
		{"own status", detailed(t, codes.InvalidArgument, "bad shape", info("INVALID", "x", "422")),
			422, "invalid_request_error", "invalid", "x", "", "bad shape", ""},
		{"absurd own status", detailed(t, codes.InvalidArgument, "m", info("INVALID", "x", "200")),
			400, "invalid_request_error", "invalid", "x", "", "m", ""},
		{"busy, sub-second", detailed(t, codes.ResourceExhausted, "full", info("OVERLOADED", "", ""), retry(200*time.Millisecond)),
			429, "rate_limit_error", "overloaded", "", "1", "full", ""},
		{"busy", detailed(t, codes.ResourceExhausted, "full", info("OVERLOADED", "", ""), retry(2100*time.Millisecond)),
			429, "rate_limit_error", "overloaded", "", "3", "full", ""},
		{"no worker", detailed(t, codes.Unavailable, "no decode worker", info("NO_WORKER", "", "")),
			503, "server_error", "no_worker", "", "", "no decode worker", ""},
		{"key", detailed(t, codes.Unauthenticated, "bad key", info("INVALID_API_KEY", "", "")),
			401, "authentication_error", "invalid_api_key", "", "", "bad key", ""},
		{"transport down", status.Error(codes.Unavailable, "dial tcp 10.0.0.9:1: refused"),
			503, "server_error", "unavailable", "", "1", "not reachable", "10.0.0.9"},
		{"internal", status.Error(codes.Internal, "/home/someone/secret.py"),
			500, "server_error", "internal", "", "", "failed", "secret"},
		{"message too large", status.Error(codes.ResourceExhausted, "Received message larger than max (9 vs. 5)"),
			413, "invalid_request_error", "request_too_large", "", "", "larger", "9 vs"},
	}
	gateway := &fakeGateway{}
	url := start(t, gateway)
	for _, c := range cases {
		for _, part := range []string{"at once", "in a JSON answer"} {
			t.Run(c.name+" "+part, func(t *testing.T) {
				gateway.chat = func(
					_ *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
				) error {
					if part != "at once" {
						_ = stream.Send(jsonBody(`{"half":`))
					}
					return c.err
				}
				got := post(t, url, "{}")
				failure := got.failure(t)
				if got.status != c.status || failure.Type != c.kind ||
					orEmpty(failure.Code) != c.code || orEmpty(failure.Param) != c.param ||
					got.header.Get("Retry-After") != c.retryAfter {
					t.Fatalf("got %d %v %s", got.status, got.header, got.body)
				}
				if !strings.Contains(failure.Message, c.mustSay) ||
					(c.mustNotSay != "" && strings.Contains(got.body, c.mustNotSay)) {
					t.Fatalf("message %q", failure.Message)
				}
			})
		}
	}
}

func TestFailureAmongEventsBecomesAnEvent(t *testing.T) {
	url := start(t, &fakeGateway{chat: func(
		_ *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
	) error {
		_ = stream.Send(events("data: 1\n\n"))
		return detailed(t, codes.Unavailable, "worker died", &errdetails.ErrorInfo{Reason: "PEER"})
	}})
	got := post(t, url, "{}")
	want := "data: 1\n\n" +
		`data: {"error":{"message":"worker died","type":"server_error","param":null,"code":"peer"}}` +
		"\n\n"
	if got.status != http.StatusOK || got.body != want {
		t.Fatalf("got %d %q", got.status, got.body)
	}
}

func TestAnEmptyStreamIsAFailure(t *testing.T) {
	url := start(t, &fakeGateway{chat: func(
		*httpbody.HttpBody, grpc.ServerStreamingServer[httpbody.HttpBody],
	) error {
		return nil
	}})
	if got := post(t, url, "{}"); got.status != http.StatusInternalServerError {
		t.Fatalf("got %d %q", got.status, got.body)
	}
}

func TestDisconnectCancelsTheCall(t *testing.T) {
	for _, first := range []*httpbody.HttpBody{nil, events("data: 1\n\n")} {
		begun, ended := make(chan struct{}), make(chan struct{})
		url := start(t, &fakeGateway{chat: func(
			_ *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
		) error {
			if first != nil {
				_ = stream.Send(first)
			}
			close(begun)
			<-stream.Context().Done()
			close(ended)
			return stream.Context().Err()
		}})
		ctx, cancel := context.WithCancel(context.Background())
		request, err := http.NewRequestWithContext(
			ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			response, err := http.DefaultClient.Do(request)
			if err == nil {
				_, _ = io.Copy(io.Discard, response.Body)
				_ = response.Body.Close()
			}
		}()
		<-begun
		cancel()
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			t.Fatal("the gateway's call went on")
		}
	}
}

func TestTooLargeBodies(t *testing.T) {
	url := start(t, &fakeGateway{chat: func(
		request *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
	) error {
		return stream.Send(jsonBody("{}"))
	}})
	if got := post(t, url, strings.Repeat("x", maxBody)); got.status != http.StatusOK {
		t.Fatalf("a body of the limit: %d %s", got.status, got.body)
	}
	for name, body := range map[string]io.Reader{
		"known length": bytes.NewReader(make([]byte, maxBody+1)),
		"chunked":      io.LimitReader(rand.Reader, maxBody+1),
		"far too long": bytes.NewReader(make([]byte, 10<<20)),
	} {
		got := do(t, http.MethodPost, url+"/v1/chat/completions", body)
		if got.status != http.StatusRequestEntityTooLarge {
			t.Fatalf("%s: %d %s", name, got.status, got.body)
		}
		if failure := got.failure(t); !strings.Contains(failure.Message, "65536") {
			t.Fatalf("%s: %q", name, failure.Message)
		}
	}
}

func TestRouting(t *testing.T) {
	url := start(t, &fakeGateway{})
	cases := []struct {
		method, path string
		status       int
		code         string
	}{
		{http.MethodGet, "/healthz", 200, ""},
		{http.MethodPost, "/healthz", 405, "method_not_allowed"},
		{http.MethodGet, "/v1/chat/completions", 405, "method_not_allowed"},
		{http.MethodGet, "/nowhere", 404, "unknown_url"},
		{http.MethodPost, "/v1/nowhere", 404, "unknown_url"},
		{http.MethodPost, "/v1/responses/input_tokens", 501, "internal"},
		{http.MethodPost, "/v1/responses/compact/", 404, "unknown_url"},
		{http.MethodPost, "/v1/responses/resp_1", 405, "method_not_allowed"},
		{http.MethodGet, "/v1/models/%ff", 400, "invalid_path"},
		{http.MethodGet, "/readyz", 503, "unavailable"},
		{http.MethodPost, "/tokenize", 501, "internal"},
	}
	for _, c := range cases {
		got := do(t, c.method, url+c.path, nil, "X-HTTP-Method-Override", "GET",
			"Content-Type", "application/x-www-form-urlencoded")
		if got.status != c.status {
			t.Fatalf("%s %s: %d %s", c.method, c.path, got.status, got.body)
		}
		if c.code != "" {
			if failure := got.failure(t); orEmpty(failure.Code) != c.code {
				t.Fatalf("%s %s: %s", c.method, c.path, got.body)
			}
		}
		if strings.Contains(got.body, "10.1.2.3") {
			t.Fatalf("an address leaked: %s", got.body)
		}
	}
	for _, path := range []string{"/v1/models/org/name", "/v1/models/org%2Fname"} {
		if got := do(t, http.MethodGet, url+path, nil); got.body != `{"id":"org/name"}` {
			t.Fatalf("%s: %d %s", path, got.status, got.body)
		}
	}
}

func TestHeadersThatCannotBePassedOnAreRefused(t *testing.T) {
	url := start(t, &fakeGateway{chat: func(
		_ *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
	) error {
		return stream.Send(&httpbody.HttpBody{ContentType: "application/json", Data: []byte("{}")})
	}})
	for _, header := range []string{"X-Routing-Key", "Authorization", "X-Ttft-Target-Ms"} {
		for _, value := range []string{"schl\u00fcssel", "a\tb", "\xff"} {
			got := post(t, url, "{}", header, value)
			failure := got.failure(t)
			if got.status != http.StatusBadRequest || orEmpty(failure.Param) != strings.ToLower(header) {
				t.Fatalf("%s %q: %d %s", header, value, got.status, got.body)
			}
		}
	}
	for _, header := range []string{"X-Request-Id", "Traceparent", "Tracestate", "X-Other"} {
		if got := post(t, url, "{}", header, "schl\u00fcssel"); got.status != http.StatusOK {
			t.Fatalf("%s: %d %s", header, got.status, got.body)
		}
	}
}

func TestRefusedMethodsAreToldWhatIsAllowed(t *testing.T) {
	gateway := &fakeGateway{}
	url := start(t, gateway)
	cases := []struct{ method, path, allow string }{
		{http.MethodPut, "/healthz", "GET, HEAD"},
		{http.MethodGet, "/v1/chat/completions", "POST"},
		{http.MethodPost, "/v1/models/org/name", "GET, HEAD"},
		{http.MethodGet, "/nowhere", ""},
	}
	for _, c := range cases {
		got := do(t, c.method, url+c.path, nil)
		if allow := got.header.Get("Allow"); allow != c.allow {
			t.Fatalf("%s %s: %d Allow %q", c.method, c.path, got.status, allow)
		}
	}
}

func TestHeadersPassByAllowList(t *testing.T) {
	seen := make(chan metadata.MD, 1)
	url := start(t, &fakeGateway{chat: func(
		_ *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
	) error {
		incoming, _ := metadata.FromIncomingContext(stream.Context())
		seen <- incoming
		return stream.Send(jsonBody("{}"))
	}})
	got := post(t, url, "{}", "X-Request-Id", "abc-1.2", "Authorization", "Bearer k",
		"Traceparent", "00-1-2-3", "X-Routing-Key", "chat 7",
		"X-TTFT-Target-Ms", "800", "x-itl-target-ms", "40.5", "Grpc-Metadata-Evil", "1", "Cookie", "c=1",
		"X-Request-Timeout-Ms", "900", "X-First-Token-Timeout-Ms", "70", "X-Worker-Id", "decode-3",
		"endpoint-load-metrics-format", "TEXT")
	incoming := <-seen
	for key, want := range map[string]string{
		"x-request-id": "abc-1.2", "authorization": "Bearer k", "traceparent": "00-1-2-3",
		"x-routing-key": "chat 7", "x-ttft-target-ms": "800", "x-itl-target-ms": "40.5",
		"x-request-timeout-ms": "900", "x-first-token-timeout-ms": "70", "x-worker-id": "decode-3",
		"endpoint-load-metrics-format": "TEXT", "evil": "", "cookie": "", "grpcgateway-cookie": "",
	} {
		if value := strings.Join(incoming.Get(key), ","); value != want {
			t.Fatalf("%s = %q, want %q", key, value, want)
		}
	}
	if id := got.header.Get("X-Request-Id"); id != "abc-1.2" {
		t.Fatalf("request id %q", id)
	}

	got = post(t, url, "{}", "X-Request-Id", "bad id\"; drop")
	made := strings.Join((<-seen).Get("x-request-id"), ",")
	if id := got.header.Get("X-Request-Id"); id != made || !strings.HasPrefix(id, "req-") {
		t.Fatalf("request id %q, the gateway saw %q", id, made)
	}

	got = do(t, http.MethodGet, url+"/v1/models/m", nil, "TE", "trailers")
	if got.header.Get("X-Ratelimit-Remaining-Requests") != "7" {
		t.Fatalf("headers %v", got.header)
	}
	if got.header.Get("Endpoint-Load-Metrics") != "TEXT named_metrics.num_requests_waiting=3" {
		t.Fatalf("headers %v", got.header)
	}
	if got.header.Get("X-Weft-Worker") != "decode-0" {
		t.Fatalf("headers %v", got.header)
	}
	for key := range got.header {
		if strings.Contains(strings.ToLower(key), "secret") || strings.HasPrefix(key, "Grpc-") {
			t.Fatalf("header %s leaked", key)
		}
	}
}

func TestGrpcTimeoutsCount(t *testing.T) {
	left := make(chan time.Duration, 1)
	url := start(t, &fakeGateway{chat: func(
		_ *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
	) error {
		deadline, _ := stream.Context().Deadline()
		left <- time.Until(deadline)
		<-stream.Context().Done()
		return stream.Context().Err()
	}})
	got := post(t, url, "{}", "Grpc-Timeout", "150m")
	if limit := <-left; limit <= 0 || limit > 150*time.Millisecond {
		t.Fatalf("the gateway has %s", limit)
	}
	if got.status != http.StatusGatewayTimeout || !strings.Contains(got.body, `"deadline_exceeded"`) {
		t.Fatalf("%d %s", got.status, got.body)
	}
	for _, text := range []string{"soon", "-1", "1.5S", strings.Repeat("9", 9000) + "m"} {
		got = post(t, url, "{}", "Grpc-Timeout", text)
		failure := got.failure(t)
		if got.status != http.StatusBadRequest || orEmpty(failure.Param) != "grpc-timeout" ||
			orEmpty(failure.Code) != "invalid_request" || len(failure.Message) > 200 {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
}
