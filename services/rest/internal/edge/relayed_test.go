package edge_test

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/api/httpbody"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	weftv1 "weft.dev/weft/services/rest/gen/weft/v1"
	"weft.dev/weft/services/rest/internal/clientconn"
	"weft.dev/weft/services/rest/internal/edge"
	"weft.dev/weft/services/rest/internal/relay"
)

const readWithin = 60 * time.Second

type relayCall = grpc.BidiStreamingServer[weftv1.RelayRequest, weftv1.RelayResponse]

// fakeRelays keeps the relays that an edge opens.
type fakeRelays struct {
	weftv1.UnimplementedEdgeServiceServer
	opened chan relayCall
	number chan uint64
}

func (f *fakeRelays) Relay(call relayCall) error {
	hello, err := call.Recv()
	if err == nil {
		err = call.Send(&weftv1.RelayResponse{})
	}
	if err != nil {
		return err
	}
	f.opened <- call
	f.number <- hello.GetRelay()
	<-call.Context().Done()
	return nil
}

// client is a connection that has sent a request for a stream.
type client struct {
	net.Conn
	number uint64 // of its stream on the relay
	wanted string // events that were sent and not read
	answer io.Reader
}

func (c *client) body(t *testing.T) io.Reader {
	t.Helper()
	if c.answer == nil {
		response, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		c.answer = response.Body
	}
	return c.answer
}

func ask(t *testing.T, address, protocol string) *client {
	t.Helper()
	connection, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	_ = connection.SetDeadline(time.Now().Add(readWithin))
	_, err = io.WriteString(connection, "POST /v1/chat/completions "+protocol+
		"\r\nHost: edge\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
	if err != nil {
		t.Fatal(err)
	}
	return &client{Conn: connection}
}

// event is one of random text.
func event(size int) string {
	random := make([]byte, size/2)
	_, _ = rand.Read(random)
	return "data: " + hex.EncodeToString(random) + "\n\n"
}

// Each client gets the events of its own stream in order, whether it reads or not, and one that reads
// nothing holds back itself alone.
func TestRelayedEventsReachEachClient(t *testing.T) {
	const last, rounds = "data: [DONE]\n\n", 30
	relays := &fakeRelays{opened: make(chan relayCall, 1), number: make(chan uint64, 1)}
	named, finish := make(chan uint64, 1), make(chan struct{})
	var number uint64
	gateway := &fakeGateway{relays: relays}
	gateway.chat = func(_ *httpbody.HttpBody, stream server) error {
		if number == 0 {
			return stream.Send(events(last))
		}
		asked, _ := metadata.FromIncomingContext(stream.Context())
		_, text, _ := strings.Cut(strings.Join(asked.Get(relay.Key), ""), "/")
		place, err := strconv.ParseUint(text, 10, 64)
		if err == nil {
			err = announce(stream, relay.Key, fmt.Sprint(number))
		}
		if err != nil {
			return err
		}
		named <- place
		<-finish
		return stream.Send(events(last))
	}
	front := httptest.NewUnstartedServer(handler(t, gateway, edge.Config{}))
	front.Listener = clientconn.Listener{Listener: front.Listener, WriteStall: readWithin}
	front.Config.ConnContext, front.Config.ConnState = clientconn.WithConn, clientconn.Follow
	front.Start()
	t.Cleanup(front.Close)
	address := front.Listener.Addr().String()

	if _, err := io.ReadAll(ask(t, address, "HTTP/1.1")); err != nil {
		t.Fatal(err)
	}
	call := <-relays.opened // an answer on its own call has made the edge open it
	number = <-relays.number
	var clients []*client
	for i := range 100 {
		one := ask(t, address, []string{"HTTP/1.1", "HTTP/1.0"}[i%2])
		one.number = <-named
		clients = append(clients, one)
	}
	slow, fast := clients[:4], clients[4:]
	send := func(to []*client, text func() string) {
		message := &weftv1.RelayResponse{}
		for _, one := range to {
			data := text()
			one.wanted += data
			message.Streams = append(message.Streams, one.number)
			message.Data = append(message.Data, []byte(data))
		}
		if err := call.Send(message); err != nil {
			t.Fatal(err)
		}
	}
	for range rounds {
		send(slow, func() string { return event(1 << 19) }) // more than a connection takes unread
		send(clients, func() string { return event(200) })
	}
	read := func(from []*client) {
		for _, one := range from {
			got := make([]byte, len(one.wanted))
			if _, err := io.ReadFull(one.body(t), got); err != nil || string(got) != one.wanted {
				t.Fatalf("stream %d: %d bytes are not those that were sent, %v", one.number, len(got), err)
			}
			one.wanted = ""
		}
	}
	read(fast)
	read(slow[:2])
	ended := &weftv1.RelayResponse{Data: make([][]byte, len(clients))}
	for _, one := range clients {
		ended.Streams = append(ended.Streams, one.number)
	}
	if err := call.Send(ended); err != nil {
		t.Fatal(err)
	}
	close(finish)
	for _, one := range clients { // two have not read anything yet
		rest, err := io.ReadAll(one.body(t))
		if err != nil || string(rest) != one.wanted+last {
			t.Fatalf("stream %d: its last %d bytes are not those that were sent, %v", one.number, len(rest), err)
		}
	}
}
