package relay_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	weftv1 "weft.dev/weft/services/rest/gen/weft/v1"
	"weft.dev/weft/services/rest/internal/relay"
)

// fakeGateway serves one relay after another.
type fakeGateway struct {
	weftv1.UnimplementedEdgeServiceServer
	opened chan *opened
}

// opened is a relay on the gateway's side.
type opened struct {
	hello *weftv1.RelayRequest
	call  grpc.BidiStreamingServer[weftv1.RelayRequest, weftv1.RelayResponse]
	end   chan struct{}
}

func (g *fakeGateway) Relay(
	call grpc.BidiStreamingServer[weftv1.RelayRequest, weftv1.RelayResponse],
) error {
	hello, err := call.Recv()
	if err != nil {
		return err
	}
	one := &opened{hello, call, make(chan struct{})}
	if err := call.Send(&weftv1.RelayResponse{}); err != nil {
		return err
	}
	g.opened <- one
	select {
	case <-one.end:
		return status.Error(codes.Unavailable, "it ends")
	case <-call.Context().Done():
		return nil
	}
}

func start(t *testing.T) (*relay.Relays, *fakeGateway, net.Addr) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gateway := &fakeGateway{opened: make(chan *opened, 8)}
	server := grpc.NewServer()
	weftv1.RegisterEdgeServiceServer(server, gateway)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	connection, err := grpc.NewClient(
		listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return relay.New(connection), gateway, listener.Addr()
}

// begin has a request named, and gives its place, edge and number.
func begin(t *testing.T, relays *relay.Relays) (*relay.Stream, string, uint64, func()) {
	t.Helper()
	ctx, end := relays.With(context.Background())
	place := relay.From(ctx)
	named, _ := metadata.FromOutgoingContext(place.Name(ctx))
	edge, text, _ := strings.Cut(strings.Join(named.Get(relay.Key), ""), "/")
	number, err := strconv.ParseUint(text, 10, 64)
	if err != nil || len(edge) != 32 {
		t.Fatalf("named %v", named)
	}
	return place, edge, number, end
}

func answered(place *relay.Stream, address net.Addr, header metadata.MD) {
	place.Answered(peer.NewContext(context.Background(), &peer.Peer{Addr: address}), header)
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestAnswersUseARelayOnceThereIsOne(t *testing.T) {
	relays, gateway, address := start(t)
	first, edge, _, end := begin(t, relays)
	defer end()
	answered(first, address, nil)
	if first.IsRelayed() {
		t.Error("an answer without the header is on its own stream")
	}
	made := <-gateway.opened
	if made.hello.GetEdge() != edge {
		t.Errorf("the relay is of %q, the stream of %q", made.hello.GetEdge(), edge)
	}

	second, _, number, endSecond := begin(t, relays)
	defer endSecond()
	// Data may come before the header.
	send(t, made, []uint64{number, number + 1000, number}, "data: a\n\n", "for nobody", "data: b\n\n")
	answered(second, address, metadata.Pairs(relay.Key, fmt.Sprint(made.hello.GetRelay())))
	if !second.IsRelayed() {
		t.Fatal("the header names a relay")
	}
	send(t, made, []uint64{number, number}, "data: c\n\n", "")
	var got bytes.Buffer
	for data := second.Next(bounded(t).Done(), nil); data != nil; data = second.Next(bounded(t).Done(), nil) {
		got.Write(data)
	}
	if got.String() != "data: a\n\ndata: b\n\ndata: c\n\n" {
		t.Errorf("got %q", got.String())
	}
	select {
	case <-gateway.opened:
		t.Error("one relay is enough")
	default:
	}
}

func TestTheGatewayLearnsInOneMessageWhatClientsHaveTaken(t *testing.T) {
	relays, gateway, address := start(t)
	sizes := []int{20_000, 100, 40_000}
	places, numbers, made := make([]*relay.Stream, 3), make([]uint64, 3), (*opened)(nil)
	for i := range places {
		place, _, number, end := begin(t, relays)
		defer end()
		places[i], numbers[i] = place, number
		answered(place, address, nil)
		if made == nil {
			made = <-gateway.opened
		}
		answered(place, address, metadata.Pairs(relay.Key, fmt.Sprint(made.hello.GetRelay())))
	}
	for i, place := range places {
		data := strings.Repeat("x", sizes[i])
		send(t, made, numbers[i:i+1], data)
		if got := place.Next(bounded(t).Done(), nil); string(got) != data {
			t.Fatalf("%d bytes came", len(got))
		}
		send(t, made, numbers[i:i+1], "")
		if got := place.Next(bounded(t).Done(), nil); got != nil {
			t.Fatalf("%q after the end", got)
		}
	}
	told, err := made.call.Recv()
	if err != nil {
		t.Fatal(err)
	}
	got := map[uint64]uint64{}
	for i, number := range told.GetStreams() {
		got[number] = told.GetBytes()[i]
	}
	if want := map[uint64]uint64{numbers[0]: 20_000, numbers[2]: 40_000}; !maps.Equal(got, want) {
		t.Errorf("told %v, not %v", got, want)
	}
}

func TestEventsOfWaitingHandlersAreSentAtOnceAndInOrder(t *testing.T) {
	relays, gateway, address := start(t)
	const count, rounds = 100, 7
	numbers, ended := make([]uint64, count), make(chan error, count)
	var made *opened
	for i := range numbers {
		place, _, number, end := begin(t, relays)
		t.Cleanup(end)
		numbers[i] = number
		answered(place, address, nil)
		if made == nil {
			made = <-gateway.opened
		}
		answered(place, address, metadata.Pairs(relay.Key, fmt.Sprint(made.hello.GetRelay())))
		refusals := i % 3 // so many pieces are left to the handler
		go func() {
			var got bytes.Buffer
			try := func(data []byte) bool {
				if refusals--; refusals >= 0 {
					return false
				}
				got.Write(data)
				return true
			}
			done := bounded(t).Done()
			for data := place.Next(done, try); data != nil; data = place.Next(done, try) {
				got.Write(data)
			}
			var wanted string
			for round := range 2 * rounds {
				wanted += fmt.Sprintf("%d:%d;", i, round)
			}
			if got.String() != wanted {
				ended <- fmt.Errorf("got %q", got.String())
				return
			}
			ended <- nil
		}()
	}
	twice := append(numbers, numbers...) // two pieces of each stream in a message
	for round := range rounds {
		var pieces []string
		for i := range twice {
			pieces = append(pieces, fmt.Sprintf("%d:%d;", i%count, 2*round+i/count))
		}
		send(t, made, twice, pieces...)
	}
	send(t, made, numbers, make([]string, count)...)
	for range numbers {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

func TestStreamsOfABrokenRelayEndBehindWhatHasCome(t *testing.T) {
	relays, gateway, address := start(t)
	place, _, number, end := begin(t, relays)
	defer end()
	answered(place, address, nil)
	made := <-gateway.opened
	header := metadata.Pairs(relay.Key, fmt.Sprint(made.hello.GetRelay()))
	answered(place, address, header)
	send(t, made, []uint64{number}, "data: a\n\n")
	close(made.end)
	if got := place.Next(bounded(t).Done(), nil); string(got) != "data: a\n\n" {
		t.Errorf("got %q", got)
	}
	if got := place.Next(bounded(t).Done(), nil); got != nil {
		t.Errorf("got %q", got)
	}

	late, _, _, endLate := begin(t, relays)
	defer endLate()
	answered(late, address, header)
	if got := late.Next(bounded(t).Done(), nil); !late.IsRelayed() || got != nil {
		t.Errorf("got %q on a relay that is gone", got)
	}
	<-gateway.opened // the next one
}

func TestAStreamEndsWithItsRequest(t *testing.T) {
	relays, gateway, address := start(t)
	place, _, _, end := begin(t, relays)
	defer end()
	answered(place, address, nil)
	made := <-gateway.opened
	answered(place, address, metadata.Pairs(relay.Key, fmt.Sprint(made.hello.GetRelay())))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if got := place.Next(ctx.Done(), nil); got != nil {
		t.Errorf("got %q", got)
	}
}

func send(t *testing.T, to *opened, streams []uint64, data ...string) {
	t.Helper()
	message := &weftv1.RelayResponse{Streams: streams}
	for _, one := range data {
		message.Data = append(message.Data, []byte(one))
	}
	if err := to.call.Send(message); err != nil {
		t.Error(err)
	}
}
