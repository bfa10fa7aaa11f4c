package clientconn_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/services/rest/internal/clientconn"
)

const longest = 30 * time.Second

// serve gives the address of a server whose handler tells how its request ended.
func serve(t *testing.T, handle func(http.ResponseWriter, *http.Request)) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{
		ReadHeaderTimeout: longest,
		ConnContext:       clientconn.WithConn,
		ConnState:         clientconn.Follow,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			time.Sleep(50 * time.Millisecond) // the end of the input is there already
			_, _ = io.Copy(io.Discard, r.Body)
			time.Sleep(50 * time.Millisecond)
			defer clientconn.Answering(r.Context())()
			handle(w, r)
		}),
	}
	go func() { _ = server.Serve(clientconn.Listener{Listener: listener}) }()
	t.Cleanup(func() { _ = server.Close() })
	return listener.Addr().String()
}

func dial(t *testing.T, address, request string) *net.TCPConn {
	t.Helper()
	made, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	client, ok := made.(*net.TCPConn)
	if !ok {
		t.Fatal("no TCP")
	}
	t.Cleanup(func() { _ = client.Close() })
	_ = client.SetDeadline(time.Now().Add(longest))
	if _, err := io.WriteString(client, request); err != nil {
		t.Fatal(err)
	}
	return client
}

const post = "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"

func TestAHalfClosedClientGetsItsAnswer(t *testing.T) {
	gone := make(chan bool, 1)
	address := serve(t, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
			gone <- true
		case <-time.After(300 * time.Millisecond):
			gone <- false
			_, _ = io.WriteString(w, "late")
		}
	})
	client := dial(t, address, post)
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	reader := bufio.NewReader(client)
	answer, err := http.ReadResponse(reader, nil)
	for err == nil && answer.StatusCode == http.StatusContinue {
		answer, err = http.ReadResponse(reader, nil)
	}
	if err != nil || <-gone {
		t.Fatalf("%v: the request was cancelled", err)
	}
	body, _ := io.ReadAll(answer.Body)
	if string(body) != "late" {
		t.Fatalf("%q", body)
	}
	// Nothing more comes, and the connection ends.
	if rest, err := io.ReadAll(reader); err != nil || len(rest) != 0 {
		t.Fatalf("%q %v", rest, err)
	}
}

func TestAHalfClosedClientGetsItsEvents(t *testing.T) {
	address := serve(t, func(w http.ResponseWriter, r *http.Request) {
		for range 5 {
			_, _ = io.WriteString(w, "data: x\n\n")
			_ = http.NewResponseController(w).Flush()
			select {
			case <-r.Context().Done():
				return
			case <-time.After(60 * time.Millisecond):
			}
		}
	})
	client := dial(t, address, post)
	_ = client.CloseWrite()
	got, err := io.ReadAll(client)
	if err != nil || strings.Count(string(got), "data: x") != 5 {
		t.Fatalf("%v %q", err, got)
	}
}

func TestAClientThatIsGoneCancels(t *testing.T) {
	for name, writes := range map[string]bool{"before": false, "amid": true} {
		ended := make(chan struct{})
		began := make(chan struct{})
		address := serve(t, func(w http.ResponseWriter, r *http.Request) {
			defer close(ended)
			close(began)
			for r.Context().Err() == nil {
				if writes {
					_, _ = io.WriteString(w, "data: x\n\n")
					_ = http.NewResponseController(w).Flush()
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
		client := dial(t, address, post)
		<-began
		_ = client.Close()
		select {
		case <-ended:
		case <-time.After(longest):
			t.Fatalf("%s the answer: the request goes on", name)
		}
	}
}

func TestConnectionsAreUsedAgain(t *testing.T) {
	address := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "ok")
	})
	client := dial(t, address, post+post)
	reader := bufio.NewReader(client)
	for range 2 {
		answer, err := http.ReadResponse(reader, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, answer.Body)
	}
	_ = client.CloseWrite()
	if _, err := io.ReadAll(reader); err != nil {
		t.Fatal(err)
	}
}

func TestABodyThatEndsEarlyIsNotWaitedFor(t *testing.T) {
	ended := make(chan struct{})
	address := serve(t, func(http.ResponseWriter, *http.Request) { close(ended) })
	client := dial(t, address, strings.Replace(post, "Length: 2", "Length: 9", 1))
	_ = client.CloseWrite()
	select {
	case <-ended:
	case <-time.After(longest):
		t.Fatal("it waits for the rest")
	}
}
