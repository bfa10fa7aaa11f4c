package edge_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/api/httpbody"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	weftv1 "weft.dev/weft/services/rest/gen/weft/v1"
)

// fakeDialects sends the first messages of a stream and fails then, with an odd message.
type fakeDialects struct {
	weftv1.UnimplementedAnthropicServiceServer
	weftv1.UnimplementedOllamaServiceServer
	kind  string
	first []string
}

const oddMessage = "quotes \" and {message} and\nlines <&>"

func (f *fakeDialects) fail(stream grpc.ServerStreamingServer[httpbody.HttpBody]) error {
	if err := stream.SendHeader(metadata.Pairs("request-id", "msg-1")); err != nil {
		return err
	}
	for _, text := range f.first {
		if err := stream.Send(&httpbody.HttpBody{ContentType: f.kind, Data: []byte(text)}); err != nil {
			return err
		}
	}
	details := &errdetails.ErrorInfo{
		Reason: "OVERLOADED", Metadata: map[string]string{"http_status": "429", "param": "x"},
	}
	failed, err := status.New(codes.ResourceExhausted, oddMessage).WithDetails(details)
	if err != nil {
		return err
	}
	return failed.Err()
}

func (f *fakeDialects) CreateMessage(
	_ *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
) error {
	return f.fail(stream)
}

func (f *fakeDialects) Chat(
	_ *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
) error {
	return f.fail(stream)
}

type anthropicError struct {
	Type  string
	Error struct{ Type, Message string }
	// RequestID is the same as the header Request-Id.
	RequestID string `json:"request_id"`
}

func TestAFailureBeforeAStreamHasTheServicesShape(t *testing.T) {
	url := start(t, &fakeGateway{dialects: &fakeDialects{}})
	got := do(t, http.MethodPost, url+"/v1/messages", nil, "X-Request-Id", "mine")
	var failure anthropicError
	if err := json.Unmarshal([]byte(got.body), &failure); err != nil {
		t.Fatalf("%s: %v", got.body, err)
	}
	if got.status != http.StatusTooManyRequests || got.header.Get("Request-Id") != "msg-1" {
		t.Fatalf("%d %v", got.status, got.header)
	}
	if failure.Type != "error" || failure.Error.Type != "rate_limit_error" ||
		failure.Error.Message != oddMessage || failure.RequestID != "msg-1" {
		t.Fatalf("%+v", failure)
	}
	var line struct{ Error string }
	got = do(t, http.MethodPost, url+"/api/chat", nil)
	if err := json.Unmarshal([]byte(got.body), &line); err != nil || line.Error != oddMessage {
		t.Fatalf("%s: %v", got.body, err)
	}
}

func TestAFailureWithinAStreamIsFramedAsTheServiceDeclares(t *testing.T) {
	lines := &fakeDialects{kind: "application/x-ndjson", first: []string{"{\"a\":1}\n", "{\"a\":2}\n"}}
	got := do(t, http.MethodPost, start(t, &fakeGateway{dialects: lines})+"/api/chat", nil)
	parts := strings.Split(got.body, "\n")
	if got.status != http.StatusOK || got.header.Get("Content-Type") != lines.kind || len(parts) != 4 {
		t.Fatalf("%d %v %q", got.status, got.header, got.body)
	}
	var line struct{ Error string }
	if err := json.Unmarshal([]byte(parts[2]), &line); err != nil || line.Error != oddMessage {
		t.Fatalf("%s: %v", parts[2], err)
	}
	named := &fakeDialects{kind: "text/event-stream", first: []string{"event: a\ndata: 1\n\n"}}
	got = do(t, http.MethodPost, start(t, &fakeGateway{dialects: named})+"/v1/messages", nil)
	if !strings.HasPrefix(got.body, "event: a\ndata: 1\n\nevent: error\ndata: {\"type\":\"error\",") ||
		!strings.HasSuffix(got.body, "\"request_id\":\"msg-1\"}\n\n") {
		t.Fatalf("%q", got.body)
	}
}

func TestFailuresOfTheEdgeItselfHaveTheShapeOfThePath(t *testing.T) {
	url := start(t, &fakeGateway{})
	tooLarge := strings.Repeat(" ", maxBody+1)
	for _, c := range []struct {
		method, path, body, key string
		status                  int
	}{
		{http.MethodPost, "/v1/messages", tooLarge, "type", http.StatusRequestEntityTooLarge},
		{http.MethodPost, "/v1/messages/count_tokens", "{}", "type", http.StatusNotImplemented},
		{http.MethodDelete, "/v1/messages", "", "type", http.StatusMethodNotAllowed},
		{http.MethodGet, "/v1/messages/batches", "", "type", http.StatusNotFound},
	} {
		got := do(t, c.method, url+c.path, strings.NewReader(c.body))
		var failure map[string]any
		if err := json.Unmarshal([]byte(got.body), &failure); err != nil {
			t.Fatalf("%s %s: %s", c.method, c.path, got.body)
		}
		if id := got.header.Get("Request-Id"); id == "" || failure["request_id"] != id {
			t.Fatalf("%s %s: %v %s", c.method, c.path, got.header, got.body)
		}
		if _, ok := failure[c.key]; !ok || got.status != c.status {
			t.Fatalf("%s %s: %d %s", c.method, c.path, got.status, got.body)
		}
	}
	got := do(t, http.MethodGet, url+"/api/chat", nil)
	if got.body != `{"error":"GET is not allowed for /api/chat"}` {
		t.Fatalf("%q", got.body)
	}
	got = do(t, http.MethodPost, url+"/api/pull", nil)
	if got.body != `{"error":"Unknown URL: POST /api/pull"}` {
		t.Fatalf("%q", got.body)
	}
	got = do(t, http.MethodPut, url+"/v1/responses/resp_1", nil)
	if failure := got.failure(t); failure.Type != "invalid_request_error" {
		t.Fatalf("%+v", failure)
	}
}

func TestHeadIsAnsweredWhereGetIs(t *testing.T) {
	url := start(t, &fakeGateway{})
	for path, status := range map[string]int{
		"/v1/models/m": http.StatusOK, "/healthz": http.StatusOK, "/": http.StatusOK,
		"/v1/messages": http.StatusMethodNotAllowed, "/nowhere": http.StatusNotFound,
	} {
		got := do(t, http.MethodHead, url+path, nil)
		if got.status != status || got.body != "" {
			t.Fatalf("%s: %d %q", path, got.status, got.body)
		}
	}
}
