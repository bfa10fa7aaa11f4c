package backend

import (
	"bytes"
	"context"
	"io"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/genproto/googleapis/api/httpbody"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/emptypb"

	weftv1 "weft.dev/weft/services/rest/gen/weft/v1"
)

// leaving is a gateway that ends when calls reach it, and says that it has looked at none of them.
type leaving struct {
	address string
	gone    chan struct{} // closed when nobody listens there any more
}

// startLeaving starts one that ends with as many calls.
func startLeaving(t *testing.T, calls int) *leaving {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	l := &leaving{address: listener.Addr().String(), gone: make(chan struct{})}
	go func() {
		defer close(l.gone)
		connection, err := listener.Accept()
		if err != nil {
			return
		}
		defer func() { _ = connection.Close() }()
		if err := leave(connection, listener, calls); err != nil {
			t.Errorf("the gateway that leaves: %v", err)
		}
	}()
	return l
}

// leave serves health on a connection until there are as many calls.
func leave(connection net.Conn, listener net.Listener, calls int) error {
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(connection, preface); err != nil {
		return err
	}
	framer := http2.NewFramer(connection, connection)
	framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if err := framer.WriteSettings(); err != nil {
		return err
	}
	for last := uint32(0); calls > 0; {
		frame, err := framer.ReadFrame()
		if err != nil {
			return err
		}
		headers, ok := frame.(*http2.MetaHeadersFrame)
		switch {
		case !ok:
		case headers.PseudoValue("path") == grpc_health_v1.Health_Watch_FullMethodName:
			last = headers.StreamID
			if err := answerUnimplemented(framer, last); err != nil {
				return err
			}
		default:
			if calls--; calls == 0 {
				_ = listener.Close()
				return framer.WriteGoAway(last, http2.ErrCodeNo, nil)
			}
		}
	}
	return nil
}

// answerUnimplemented ends a stream; of a health check it says that the gateway is well.
func answerUnimplemented(framer *http2.Framer, stream uint32) error {
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for _, field := range []hpack.HeaderField{
		{Name: ":status", Value: "200"},
		{Name: "content-type", Value: "application/grpc"},
		{Name: "grpc-status", Value: "12"},
	} {
		if err := encoder.WriteField(field); err != nil {
			return err
		}
	}
	return framer.WriteHeaders(http2.HeadersFrameParam{
		StreamID: stream, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: true,
	})
}

// failsSoon makes a call that no gateway takes.
func failsSoon(t *testing.T, call func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), longest)
	defer cancel()
	began := time.Now()
	if err := call(ctx); !isUnreached(err) {
		t.Errorf("got %v", err)
	}
	if took := time.Since(began); took > 2*patience {
		t.Errorf("it took %s", took)
	}
}

func TestAUnaryCallFailsWhenTheLastGatewayHasLeft(t *testing.T) {
	t.Parallel()
	client := connect(t, startLeaving(t, 1).address)
	failsSoon(t, func(ctx context.Context) error {
		_, err := client.Models(ctx, &emptypb.Empty{})
		return err
	})
}

// Not parallel, since it counts goroutines.
func TestStreamsFailWhenTheLastGatewayHasLeft(t *testing.T) {
	const calls = 50 // far more than there are goroutines of a connection
	before := runtime.NumGoroutine()
	client := connect(t, startLeaving(t, calls).address)
	failsSoon(t, func(ctx context.Context) error {
		failures := make(chan error, calls)
		for range calls {
			go func() { failures <- ask(ctx, client) }()
		}
		var failure error
		for range calls {
			failure = <-failures
			if failure == nil || !strings.Contains(failure.Error(), "no gateway within") {
				t.Errorf("got %v", failure)
			}
		}
		until(t, "failed streams have goroutines", func() bool { // though ctx goes on
			return runtime.NumGoroutine() < before+calls
		})
		return failure
	})
}

// ask waits until an answer has begun, as the edge does.
func ask(ctx context.Context, client weftv1.OpenAIServiceClient) error {
	call, err := client.ChatCompletions(ctx, &httpbody.HttpBody{})
	if err != nil {
		return err
	}
	if _, err := call.Header(); err != nil {
		return err
	}
	_, err = call.Recv()
	return err
}

func TestAStreamGoesOnWhenAGatewayComesBack(t *testing.T) {
	t.Parallel()
	first := startLeaving(t, 1)
	client := connect(t, first.address)
	answer := chatLater(t, client, slow)
	<-first.gone
	time.Sleep(patience / 5)
	startGateway(t, "next", first.address)
	if got := <-answer; got != "next "+slow {
		t.Errorf("got %q", got)
	}
}

// No gateway is ready then, yet one has the stream.
func TestAStreamThatAGatewayHasOutlivesItsDrain(t *testing.T) {
	t.Parallel()
	for _, text := range []string{slow, halting} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			g := startGateway(t, "a", "127.0.0.1:0")
			client := connect(t, g.address)
			answer := chatLater(t, client, text)
			until(t, "no call", func() bool { return g.calls.Load() == 1 })
			g.health.SetServingStatus(service, grpc_health_v1.HealthCheckResponse_NOT_SERVING)
			go g.server.GracefulStop() // GOAWAY at once, the end with the call
			if got := <-answer; got != "a "+text {
				t.Errorf("got %q", got)
			}
		})
	}
}
