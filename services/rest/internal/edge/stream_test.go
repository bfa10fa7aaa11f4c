package edge_test

import (
	"bufio"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/api/httpbody"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"weft.dev/weft/services/rest/internal/edge"
	"weft.dev/weft/services/rest/internal/forward"
)

const (
	shortly = 50 * time.Millisecond
	waiting = ": waiting"
)

type server = grpc.ServerStreamingServer[httpbody.HttpBody]

// serveStreams serves an edge over HTTP/1.1, or over HTTPS with HTTP/2, and gives a client for it.
func serveStreams(
	t *testing.T, gateway *fakeGateway, limits forward.Limits, protocol string,
) (*http.Client, string) {
	t.Helper()
	front := httptest.NewUnstartedServer(handler(t, gateway, edge.Config{Streams: limits}))
	if protocol == "HTTP/2.0" {
		front.EnableHTTP2 = true
		front.StartTLS()
	} else {
		front.Start()
	}
	t.Cleanup(front.Close)
	return front.Client(), front.URL
}

func openStream(t *testing.T, client *http.Client, url string) *http.Response {
	t.Helper()
	response, err := client.Post(url+"/v1/chat/completions", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	return response
}

// lines reads the rest of a stream, without empty lines.
func lines(t *testing.T, scanner *bufio.Scanner) []string {
	t.Helper()
	var found []string
	for scanner.Scan() {
		if scanner.Text() != "" {
			found = append(found, scanner.Text())
		}
	}
	if err := scanner.Err(); err != nil {
		t.Fatalf("after %q: %v", found, err)
	}
	return found
}

// without is all lines but those.
func without(all []string, what string) string {
	var rest []string
	for _, line := range all {
		if line != what {
			rest = append(rest, line)
		}
	}
	return strings.Join(rest, "|")
}

func announce(stream server, pairs ...string) error {
	pairs = append(pairs, "weft-content-type", "text/event-stream")
	return stream.SendHeader(metadata.Pairs(pairs...))
}

func TestAStreamOutlivesPausesBeyondTheWriteLimit(t *testing.T) {
	for _, protocol := range []string{"HTTP/1.1", "HTTP/2.0"} {
		t.Run(protocol, func(t *testing.T) {
			next := make(chan struct{})
			gateway := &fakeGateway{chat: func(_ *httpbody.HttpBody, stream server) error {
				if err := stream.Send(events("data: 1\n\n")); err != nil {
					return err
				}
				<-next
				return stream.Send(events("data: 2\n\n"))
			}}
			client, url := serveStreams(t, gateway, forward.Limits{WriteStall: shortly}, protocol)
			response := openStream(t, client, url)
			if response.Proto != protocol {
				t.Fatalf("got %s", response.Proto)
			}
			scanner := bufio.NewScanner(response.Body)
			if !scanner.Scan() || scanner.Text() != "data: 1" {
				t.Fatalf("got %q %v", scanner.Text(), scanner.Err())
			}
			time.Sleep(4 * shortly)
			close(next)
			if rest := lines(t, scanner); without(rest, "") != "data: 2" {
				t.Fatalf("got %q", rest)
			}
		})
	}
}

func TestAConnectionOutlivesTheWriteLimitOfAnAnswer(t *testing.T) {
	gateway := &fakeGateway{chat: func(_ *httpbody.HttpBody, stream server) error {
		return stream.Send(jsonBody(`{"whole": true}`))
	}}
	client, url := serveStreams(t, gateway, forward.Limits{WriteStall: shortly}, "HTTP/1.1")
	for range 2 {
		response := openStream(t, client, url)
		if got := lines(t, bufio.NewScanner(response.Body)); len(got) != 1 {
			t.Fatalf("got %q", got)
		}
		time.Sleep(4 * shortly)
		model, err := client.Get(url + "/v1/models/m")
		if err != nil {
			t.Fatal(err)
		}
		if got := lines(t, bufio.NewScanner(model.Body)); len(got) != 1 || model.StatusCode != http.StatusOK {
			t.Fatalf("got %d %q", model.StatusCode, got)
		}
		_ = model.Body.Close()
	}
}

func TestCommentsFillPauses(t *testing.T) {
	heard := make(chan struct{})
	gateway := &fakeGateway{chat: func(_ *httpbody.HttpBody, stream server) error {
		if err := announce(stream); err != nil {
			return err
		}
		<-heard // the client has read a comment: nothing else has come
		if err := stream.Send(events("data: 1\n\n")); err != nil {
			return err
		}
		<-heard
		return stream.Send(events("data: 2\n\n"))
	}}
	client, url := serveStreams(t, gateway, forward.Limits{CommentAfter: shortly}, "HTTP/1.1")
	response := openStream(t, client, url)
	if kind := response.Header.Get("Content-Type"); kind != "text/event-stream" {
		t.Fatalf("content type %q", kind)
	}
	scanner := bufio.NewScanner(response.Body)
	for _, before := range []string{"", "data: 1"} {
		var got []string
		for scanner.Scan() && scanner.Text() != waiting {
			got = append(got, scanner.Text())
		}
		if without(got, "") != before {
			t.Fatalf("got %q before the comment", got)
		}
		heard <- struct{}{}
	}
	if rest := without(lines(t, scanner), waiting); rest != "data: 2" {
		t.Fatalf("got %q", rest)
	}
}

func TestNoCommentsBeforeTheGatewayHasTakenAStream(t *testing.T) {
	for name, header := range map[string][]string{
		"nothing announced": {"x-weft-request-id", "r"},
		"a whole answer":    {"weft-content-type", "application/json"},
	} {
		t.Run(name, func(t *testing.T) {
			gateway := &fakeGateway{chat: func(_ *httpbody.HttpBody, stream server) error {
				if err := stream.SendHeader(metadata.Pairs(header...)); err != nil {
					return err
				}
				time.Sleep(4 * shortly)
				return detailed(t, codes.Unavailable, "all workers died", &errdetails.ErrorInfo{Reason: "PEER"})
			}}
			client, url := serveStreams(t, gateway, forward.Limits{CommentAfter: shortly}, "HTTP/1.1")
			response := openStream(t, client, url)
			body := strings.Join(lines(t, bufio.NewScanner(response.Body)), "|")
			if response.StatusCode != http.StatusServiceUnavailable || strings.Contains(body, waiting) {
				t.Fatalf("got %d %q", response.StatusCode, body)
			}
		})
	}
}

func TestAFailureAfterCommentsIsAnEvent(t *testing.T) {
	heard := make(chan struct{})
	gateway := &fakeGateway{chat: func(_ *httpbody.HttpBody, stream server) error {
		if err := announce(stream); err != nil {
			return err
		}
		<-heard
		return detailed(t, codes.Unavailable, "all workers died", &errdetails.ErrorInfo{Reason: "PEER"})
	}}
	client, url := serveStreams(t, gateway, forward.Limits{CommentAfter: shortly}, "HTTP/1.1")
	response := openStream(t, client, url)
	scanner := bufio.NewScanner(response.Body)
	if !scanner.Scan() || scanner.Text() != waiting {
		t.Fatalf("got %q", scanner.Text())
	}
	close(heard)
	want := `data: {"error":{"message":"all workers died","type":"server_error","param":null,"code":"peer"}}`
	if rest := without(lines(t, scanner), waiting); response.StatusCode != http.StatusOK || rest != want {
		t.Fatalf("got %d %q", response.StatusCode, rest)
	}
}

func TestAFailureBeforeCommentsHasAStatus(t *testing.T) {
	gateway := &fakeGateway{chat: func(_ *httpbody.HttpBody, stream server) error {
		if err := announce(stream); err != nil {
			return err
		}
		return detailed(t, codes.Unavailable, "all workers died", &errdetails.ErrorInfo{Reason: "PEER"})
	}}
	client, url := serveStreams(t, gateway, forward.Limits{CommentAfter: time.Hour}, "HTTP/1.1")
	if response := openStream(t, client, url); response.StatusCode != http.StatusServiceUnavailable {
		t.Fatalf("got %d", response.StatusCode)
	}
}

func TestTheGatewaysRequestIDComesThrough(t *testing.T) {
	name := func(stream server) error {
		return stream.SendHeader(metadata.Pairs("x-weft-request-id", "chatcmpl-1", "secret", "hidden"))
	}
	cases := map[string]func(stream server) error{
		"a whole answer": func(stream server) error {
			_ = name(stream)
			return stream.Send(jsonBody("{}"))
		},
		"events": func(stream server) error {
			_ = name(stream)
			return stream.Send(events("data: 1\n\n"))
		},
		"a refusal": func(stream server) error {
			stream.SetTrailer(metadata.Pairs("x-weft-request-id", "chatcmpl-1", "secret", "hidden"))
			return detailed(t, codes.ResourceExhausted, "full", &errdetails.ErrorInfo{Reason: "OVERLOADED"})
		},
		"a later failure": func(stream server) error {
			_ = name(stream)
			return detailed(t, codes.Unavailable, "lost", &errdetails.ErrorInfo{Reason: "PEER"})
		},
	}
	for what, chat := range cases {
		t.Run(what, func(t *testing.T) {
			gateway := &fakeGateway{chat: func(_ *httpbody.HttpBody, stream server) error { return chat(stream) }}
			got := post(t, start(t, gateway), "{}", "X-Request-Id", "mine")
			header := got.header
			if header.Get("X-Weft-Request-Id") != "chatcmpl-1" || header.Get("X-Request-Id") != "mine" {
				t.Fatalf("got %d %v", got.status, header)
			}
			if header.Get("Secret") != "" {
				t.Fatalf("metadata leaked: %v", header)
			}
		})
	}
}
