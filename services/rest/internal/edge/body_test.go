package edge_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/api/httpbody"

	"weft.dev/weft/services/rest/internal/edge"
	"weft.dev/weft/services/rest/internal/forward"
)

// upload begins to send a body of so many bytes, of which the last one is missing.
func upload(t *testing.T, url string, size int) net.Conn {
	t.Helper()
	connection, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	_, err = fmt.Fprintf(connection, "POST /v1/chat/completions HTTP/1.1\r\nHost: edge\r\n"+
		"Content-Length: %d\r\n\r\n%s", size, strings.Repeat(" ", size-1))
	if err != nil {
		t.Fatal(err)
	}
	return connection
}

func statusOf(t *testing.T, connection net.Conn) int {
	t.Helper()
	response, err := http.ReadResponse(bufio.NewReader(connection), nil)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode
}

// countedBody adds up what the edge has read, once it asks for more.
type countedBody struct {
	io.ReadCloser
	last  int
	taken *atomic.Int64
}

func (b *countedBody) Read(p []byte) (int, error) {
	b.taken.Add(int64(b.last))
	var err error
	b.last, err = b.ReadCloser.Read(p)
	return b.last, err
}

func TestBodiesHaveRoomTogether(t *testing.T) {
	release := make(chan struct{})
	gateway := &fakeGateway{chat: func(_ *httpbody.HttpBody, stream server) error {
		if err := stream.Send(events("data: 1\n\n")); err != nil {
			return err
		}
		<-release
		return nil
	}}
	served := handler(t, gateway, edge.Config{
		MaxHeldBytes: 2 * maxBody, BodyPause: time.Minute,
	})
	var taken atomic.Int64
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Body = &countedBody{ReadCloser: r.Body, taken: &taken}
		served.ServeHTTP(w, r)
	}))
	t.Cleanup(front.Close)

	first, second := upload(t, front.URL, maxBody), upload(t, front.URL, maxBody)
	waitFor(t, func() bool { return taken.Load() == 2*(maxBody-1) })
	got := post(t, front.URL, strings.Repeat(" ", 100))
	if got.status != http.StatusServiceUnavailable || got.header.Get("Retry-After") == "" {
		t.Errorf("status %d, headers %v", got.status, got.header)
	}
	// What the gateway has takes no room any more, although its answer goes on.
	for _, connection := range []net.Conn{first, second} {
		if _, err := io.WriteString(connection, " "); err != nil {
			t.Fatal(err)
		}
		if got := statusOf(t, connection); got != http.StatusOK {
			t.Fatalf("status %d", got)
		}
	}
	third := upload(t, front.URL, maxBody)
	if _, err := io.WriteString(third, " "); err != nil {
		t.Fatal(err)
	}
	if got := statusOf(t, third); got != http.StatusOK {
		t.Errorf("status %d", got)
	}
	close(release)
}

func TestABodyThatPausesIsGivenUp(t *testing.T) {
	front := httptest.NewServer(handler(t, &fakeGateway{}, edge.Config{BodyPause: shortly}))
	t.Cleanup(front.Close)
	if got := statusOf(t, upload(t, front.URL, 1000)); got != http.StatusRequestTimeout {
		t.Errorf("status %d", got)
	}
}

func TestABodyThatSaysThatItIsTooLargeIsNotAwaited(t *testing.T) {
	front := httptest.NewServer(handler(t, &fakeGateway{}, edge.Config{BodyPause: time.Minute}))
	t.Cleanup(front.Close)
	connection, err := net.Dial("tcp", strings.TrimPrefix(front.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	_, err = io.WriteString(connection, "POST /v1/chat/completions HTTP/1.1\r\nHost: edge\r\n"+
		"Content-Length: 99999999999\r\n\r\n{")
	if err != nil {
		t.Fatal(err)
	}
	if got := statusOf(t, connection); got != http.StatusRequestEntityTooLarge {
		t.Errorf("status %d", got)
	}
}

func TestAConnectionOfAClientThatNeverReadsEnds(t *testing.T) {
	limits := forward.Limits{WriteStall: 4 * shortly}
	front := httptest.NewServer(handler(t, &fakeGateway{}, edge.Config{Streams: limits}))
	t.Cleanup(front.Close)
	long := strings.Repeat("x", 4000) // comes back in the answer
	for _, path := range []string{"/console/app.js", "/v1/models/" + long, "/nowhere/" + long} {
		connection, err := net.Dial("tcp", strings.TrimPrefix(front.URL, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		request := strings.Repeat("GET "+path+" HTTP/1.1\r\nHost: edge\r\n\r\n", 100)
		_ = connection.SetWriteDeadline(time.Now().Add(60 * time.Second))
		for err == nil {
			_, err = io.WriteString(connection, request)
		}
		if failure, ok := err.(net.Error); ok && failure.Timeout() {
			t.Errorf("%s: the connection is still open", path)
		}
		_ = connection.Close()
	}
}

func waitFor(t *testing.T, holds func() bool) {
	t.Helper()
	for until := time.Now().Add(10 * time.Second); !holds(); time.Sleep(shortly) {
		if time.Now().After(until) {
			t.Fatal("it did not become so in time")
		}
	}
}

func TestBodiesOfAllLengthsPassWhole(t *testing.T) {
	rng := rand.New(rand.NewSource(time.Now().UnixNano()))
	got := make(chan []byte, 1)
	gateway := &fakeGateway{chat: func(body *httpbody.HttpBody, stream server) error {
		got <- body.Data
		return stream.Send(jsonBody("{}"))
	}}
	front := httptest.NewServer(handler(t, gateway, edge.Config{MaxBodyBytes: 8 << 20}))
	t.Cleanup(front.Close)
	for _, size := range []int{1, 511, 512, 513, 1<<20 - 513, 1<<20 - 512, 1 << 20, 3<<20 + 7} {
		body := make([]byte, size)
		rng.Read(body)
		for _, isTold := range []bool{true, false} {
			request, err := http.NewRequest(
				http.MethodPost, front.URL+"/v1/chat/completions", bytes.NewReader(body),
			)
			if err != nil {
				t.Fatal(err)
			}
			if !isTold {
				request.ContentLength = -1
			}
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			_ = response.Body.Close()
			if response.StatusCode != http.StatusOK || !bytes.Equal(<-got, body) {
				t.Errorf("%d bytes, length told: %v: answered %d", size, isTold, response.StatusCode)
			}
		}
	}
}
