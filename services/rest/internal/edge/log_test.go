package edge_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/api/httpbody"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/services/rest/internal/edge"
)

// logged is what an edge logs of one chat, which sends an event first. It is read with react.
func logged(t *testing.T, chat func(server) error, react func(*http.Response)) string {
	t.Helper()
	var log bytes.Buffer
	made := handler(t, &fakeGateway{chat: func(_ *httpbody.HttpBody, stream server) error {
		if err := stream.Send(events("data: 1\n\n")); err != nil {
			return err
		}
		return chat(stream)
	}}, edge.Config{Logger: slog.New(slog.NewJSONHandler(&log, nil))})
	ended := make(chan struct{})
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(ended)
		made.ServeHTTP(w, r)
	}))
	defer front.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(
		ctx, http.MethodPost, front.URL+"/v1/chat/completions", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("X-Request-Id", "mine")
	response, err := front.Client().Do(request)
	if err != nil {
		t.Fatal(err)
	}
	react(response)
	_ = response.Body.Close()
	<-ended
	return log.String()
}

func readAll(response *http.Response) {
	_, _ = io.Copy(io.Discard, response.Body)
}

func TestAStreamsFailureIsLoggedOnce(t *testing.T) {
	lost := detailed(t, codes.Unavailable, "worker died", &errdetails.ErrorInfo{Reason: "PEER"})
	for name, c := range map[string]struct {
		failure     error
		code, cause string
		status      int
	}{
		"of the gateway":   {lost, "peer", "worker died", 503},
		"of the transport": {status.Error(codes.Unavailable, "EOF"), "unavailable", "EOF", 503},
		"unknown":          {status.Error(codes.Unknown, "oops"), "internal", "oops", 500},
	} {
		t.Run(name, func(t *testing.T) {
			log := logged(t, func(server) error { return c.failure }, readAll)
			var line struct {
				Level, Path, Method, Code, Cause string
				Status                           int
				RequestID                        string `json:"request_id"`
			}
			if err := json.Unmarshal([]byte(log), &line); err != nil {
				t.Fatalf("not one line: %q (%v)", log, err)
			}
			if line.Level != "WARN" || line.Path != "/v1/chat/completions" || line.Method != "POST" ||
				line.RequestID != "mine" || line.Status != c.status || line.Code != c.code ||
				line.Cause != c.cause {
				t.Fatalf("got %q", log)
			}
		})
	}
}

func TestTheEndOfAStreamByTheClientIsNotLogged(t *testing.T) {
	wait := func(stream server) error {
		<-stream.Context().Done()
		return stream.Context().Err()
	}
	leave := func(response *http.Response) { _ = response.Body.Close() }
	if log := logged(t, wait, leave); log != "" {
		t.Fatalf("a client that left: %q", log)
	}
	cancelled := detailed(t, codes.Canceled, "cancelled", &errdetails.ErrorInfo{Reason: "CANCELLED"})
	if log := logged(t, func(server) error { return cancelled }, readAll); log != "" {
		t.Fatalf("a cancel: %q", log)
	}
	if log := logged(t, func(server) error { return nil }, readAll); log != "" {
		t.Fatalf("a good end: %q", log)
	}
}
