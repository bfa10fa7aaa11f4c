package forward

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"testing"

	"weft.dev/weft/services/rest/internal/clientconn"
)

// Events that net/http does not send are chunks of its answer, as long as the answer can take them.
func TestEventsAreSentPastNetHTTP(t *testing.T) {
	for protocol, wanted := range map[string]string{"HTTP/1.1": "abc", "HTTP/1.0": "ac"} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		sent := make(chan bool, 3)
		server := &http.Server{
			ConnContext: clientconn.WithConn,
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				events := newEventStream(w, r)
				sent <- events.try([]byte("too early"))
				events.begin("text/event-stream")
				events.send([]byte("a"))
				sent <- events.try([]byte("b"))
				events.send([]byte("c"))
				events.end()
				sent <- events.try([]byte("too late"))
			}),
		}
		go func() { _ = server.Serve(clientconn.Listener{Listener: listener}) }()
		connection, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.WriteString(connection, "GET / "+protocol+"\r\nHost: edge\r\nConnection: close\r\n\r\n")
		if err != nil {
			t.Fatal(err)
		}
		answer, err := http.ReadResponse(bufio.NewReader(connection), nil)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(answer.Body)
		if err != nil || string(body) != wanted {
			t.Errorf("%s: %q instead of %q (%v)", protocol, body, wanted, err)
		}
		if early, between, late := <-sent, <-sent, <-sent; early || late || between != (protocol == "HTTP/1.1") {
			t.Errorf("%s: sent at once: %t, %t, %t", protocol, early, between, late)
		}
		_ = connection.Close()
		_ = server.Close()
	}
}
