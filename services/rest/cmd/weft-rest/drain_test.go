package main

import (
	"context"
	"crypto/tls"
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
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"google.golang.org/protobuf/types/known/emptypb"

	weftv1 "weft.dev/weft/services/rest/gen/weft/v1"
	"weft.dev/weft/services/rest/internal/backend"
	"weft.dev/weft/services/rest/internal/edge"
)

const drainError = `{"error":{"message":"the REST edge is shutting down; send the request again",` +
	`"type":"server_error","param":null,"code":"draining"}}`

// stuckGateway never ends a streamed call; it is ready.
type stuckGateway struct {
	weftv1.UnimplementedOpenAIServiceServer
	first *httpbody.HttpBody // sent before it gets stuck
	begun chan struct{}
}

func (g *stuckGateway) ChatCompletions(
	_ *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
) error {
	if g.first != nil {
		if err := stream.Send(g.first); err != nil {
			return err
		}
	}
	close(g.begun)
	<-stream.Context().Done()
	return stream.Context().Err()
}

func (g *stuckGateway) Ready(context.Context, *emptypb.Empty) (*httpbody.HttpBody, error) {
	return &httpbody.HttpBody{ContentType: "application/json", Data: []byte("{}")}, nil
}

// dial serves a gateway and connects to it.
func dial(t *testing.T, gateway *stuckGateway) *grpc.ClientConn {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	weftv1.RegisterOpenAIServiceServer(server, gateway)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	connection, err := backend.Dial(listener.Addr().String(), insecure.NewCredentials())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return connection
}

// served is an edge before a gateway: it drains when stop is called, then ended brings what serve
// returns.
func served(
	t *testing.T, gateway *stuckGateway, config *tls.Config,
) (url string, stop func(), ended chan error) {
	t.Helper()
	return servedLeaving(t, gateway, config, context.Background())
}

// servedLeaving is served with an edge that is not ready once leaving is done.
func servedLeaving(
	t *testing.T, gateway *stuckGateway, config *tls.Config, leaving context.Context,
) (url string, stop func(), ended chan error) {
	t.Helper()
	logger := slog.New(slog.NewTextHandler(io.Discard, nil))
	handler, err := edge.New(context.Background(), edge.Config{
		Backend: dial(t, gateway), MaxBodyBytes: 1 << 16, Logger: logger,
		Metrics: edge.NewMetrics(prometheus.NewRegistry()), Leaving: leaving,
	})
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url = "http://" + listener.Addr().String()
	if config != nil {
		url = "https://" + listener.Addr().String()
		listener = tls.NewListener(listener, config)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended = make(chan error, 1)
	server := newServer(handler, logger)
	go func() { ended <- serve(ctx, server, listener, 200*time.Millisecond, logger) }()
	return url, stop, ended
}

func waitFor[T any](t *testing.T, what string, channel <-chan T) T {
	t.Helper()
	select {
	case value := <-channel:
		return value
	case <-time.After(20 * time.Second):
		t.Fatalf("no %s", what)
		panic("unreachable")
	}
}

type outcome struct {
	response *http.Response
	body     string
	err      error
}

func chat(client *http.Client, url string, body io.Reader) outcome {
	response, err := client.Post(url+"/v1/chat/completions", "application/json", body)
	if err != nil {
		return outcome{err: err}
	}
	defer func() { _ = response.Body.Close() }()
	content, err := io.ReadAll(response.Body)
	return outcome{response, string(content), err}
}

// endOf is what a client got of an answer when the drain time ended.
func endOf(t *testing.T, gateway *stuckGateway, client *http.Client, config *tls.Config) outcome {
	t.Helper()
	url, stop, ended := served(t, gateway, config)
	answered := make(chan outcome, 1)
	go func() { answered <- chat(client, url, strings.NewReader("{}")) }()
	waitFor(t, "call", gateway.begun)
	stop()
	got := waitFor(t, "answer", answered)
	if err := waitFor(t, "end", ended); err != nil {
		t.Fatalf("serve: %v", err)
	}
	if got.err != nil {
		t.Fatalf("the answer broke off: %v", got.err)
	}
	return got
}

// eachProtocol runs a test with clients of HTTP/1.1 and of HTTP/2; that has TLS.
func eachProtocol(t *testing.T, test func(*testing.T, *http.Client, *tls.Config)) {
	t.Run("HTTP/1.1", func(t *testing.T) { test(t, &http.Client{}, nil) })
	t.Run("HTTP/2.0", func(t *testing.T) {
		certified := httptest.NewUnstartedServer(nil)
		certified.EnableHTTP2 = true
		certified.StartTLS()
		t.Cleanup(certified.Close)
		test(t, certified.Client(), certified.TLS)
	})
}

func TestAStreamIsToldThatTheDrainTimeEnds(t *testing.T) {
	eachProtocol(t, func(t *testing.T, client *http.Client, config *tls.Config) {
		first := &httpbody.HttpBody{ContentType: "text/event-stream", Data: []byte("data: 1\n\n")}
		gateway := &stuckGateway{first: first, begun: make(chan struct{})}
		got := endOf(t, gateway, client, config)
		if want := "data: 1\n\ndata: " + drainError + "\n\n"; got.body != want {
			t.Fatalf("got %q", got.body)
		}
	})
}

func checkRefusal(t *testing.T, got outcome) {
	t.Helper()
	if got.response.StatusCode != http.StatusServiceUnavailable || got.body != drainError {
		t.Fatalf("got %d %q", got.response.StatusCode, got.body)
	}
	if retry := got.response.Header.Get("Retry-After"); retry != "1" {
		t.Fatalf("Retry-After: %q", retry)
	}
}

func TestACallIsToldThatTheDrainTimeEnds(t *testing.T) {
	part := &httpbody.HttpBody{ContentType: "application/json", Data: []byte(`{"half`)}
	for name, first := range map[string]*httpbody.HttpBody{"no answer": nil, "half of it": part} {
		t.Run(name, func(t *testing.T) {
			eachProtocol(t, func(t *testing.T, client *http.Client, config *tls.Config) {
				gateway := &stuckGateway{first: first, begun: make(chan struct{})}
				checkRefusal(t, endOf(t, gateway, client, config))
			})
		})
	}
}

func TestAnUploadIsToldThatTheDrainTimeEnds(t *testing.T) {
	eachProtocol(t, func(t *testing.T, client *http.Client, config *tls.Config) {
		url, stop, ended := served(t, &stuckGateway{}, config)
		body, upload := io.Pipe()
		defer func() { _ = upload.Close() }()
		answered := make(chan outcome, 1)
		go func() { answered <- chat(client, url, body) }()
		if _, err := upload.Write([]byte("{")); err != nil { // the client has a connection then
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond) // the edge reads
		stop()
		got := waitFor(t, "answer", answered)
		if got.err != nil {
			t.Fatalf("the answer broke off: %v", got.err)
		}
		checkRefusal(t, got)
		if err := waitFor(t, "end", ended); err != nil {
			t.Fatalf("serve: %v", err)
		}
	})
}

// get returns the status of an answer, and whether the edge closes the connection behind it.
func get(t *testing.T, client *http.Client, url string) (int, bool) {
	t.Helper()
	response, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, response.Body)
	_ = response.Body.Close()
	return response.StatusCode, response.Close
}

func TestAnEdgeThatLeavesIsNotReadyButServes(t *testing.T) {
	eachProtocol(t, func(t *testing.T, client *http.Client, config *tls.Config) {
		leaving, leave := context.WithCancel(context.Background())
		defer leave()
		url, stop, ended := servedLeaving(t, &stuckGateway{}, config, leaving)
		if code, closes := get(t, client, url+"/readyz"); code != http.StatusOK || closes {
			t.Fatalf("before: %d, closes %v", code, closes)
		}
		leave()
		isHTTP2 := config != nil // it has GOAWAY in place of the header
		for path, want := range map[string]int{
			"/readyz": http.StatusServiceUnavailable, "/ping": http.StatusServiceUnavailable,
			"/healthz": http.StatusOK, "/v1/models": http.StatusNotImplemented,
		} {
			for range 2 { // each on a connection of its own
				if code, closes := get(t, client, url+path); code != want || closes == isHTTP2 {
					t.Fatalf("%s: %d, closes %v", path, code, closes)
				}
			}
		}
		stop()
		if err := waitFor(t, "end", ended); err != nil {
			t.Fatalf("serve: %v", err)
		}
		if _, err := client.Get(url + "/readyz"); err == nil {
			t.Fatal("the listener is still open")
		}
	})
}

func TestAnAnswerThatBeginsWhileTheEdgeLeavesClosesItsConnection(t *testing.T) {
	leaving, leave := context.WithCancel(context.Background())
	gateway := &stuckGateway{begun: make(chan struct{})}
	url, stop, ended := servedLeaving(t, gateway, nil, leaving)
	answered := make(chan outcome, 1)
	go func() { answered <- chat(&http.Client{}, url, strings.NewReader("{}")) }()
	waitFor(t, "call", gateway.begun)
	leave()
	stop()
	if got := waitFor(t, "answer", answered); got.err != nil || !got.response.Close {
		t.Fatalf("%+v", got)
	}
	if err := waitFor(t, "end", ended); err != nil {
		t.Fatalf("serve: %v", err)
	}
}
