package backend

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// draining is the reason of ErrorInfo with which a gateway refuses a call, whole, while it drains.
const draining = "DRAINING"

// pauses before a call is repeated that a draining gateway has refused. The news of the drain may
// arrive after the refusal, so the same gateway may be asked once more.
var pauses = []time.Duration{0, 50 * time.Millisecond, 200 * time.Millisecond, time.Second}

// notFound is the reason with which a gateway says that it has no request of an id. Another one may
// have it.
const notFound = "REQUEST_NOT_FOUND"

// visits of each gateway before all of them count as asked, since round robin also counts other
// calls.
const visits = 2

// askUnary repeats a call that a draining gateway has refused. A call about a request goes from
// gateway to gateway until one has that request.
func askUnary(
	ctx context.Context,
	method string,
	request, reply any,
	connection *grpc.ClientConn,
	invoke grpc.UnaryInvoker,
	options ...grpc.CallOption,
) error {
	err := askAll(ctx, func(extra ...grpc.CallOption) error {
		return invoke(ctx, method, request, reply, connection, append(extra, options...)...)
	})
	for _, pause := range pauses {
		if !isDraining(err) || !sleep(ctx, pause) {
			return err
		}
		again := invoke(ctx, method, request, reply, connection, options...)
		if isUnreached(again) {
			return err // it says when to come again
		}
		err = again
	}
	return err
}

// askAll makes a call at one gateway after the other while they do not know the request that it is
// about.
func askAll(ctx context.Context, invoke func(...grpc.CallOption) error) error {
	asked := map[string]int{}
	for {
		var gateway peer.Peer
		err := invoke(grpc.Peer(&gateway))
		reason, _ := reasonOf(err)
		if err == nil || reason != notFound || gateway.Addr == nil || ctx.Err() != nil {
			return err
		}
		address := gateway.Addr.String()
		if asked[address]++; asked[address] > visits {
			return err
		}
	}
}

// askStream opens a stream that is opened again if a draining gateway refuses it.
func askStream(
	ctx context.Context,
	description *grpc.StreamDesc,
	connection *grpc.ClientConn,
	method string,
	streamer grpc.Streamer,
	options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	options = append(options, grpc.WaitForReady(true))
	open := func() (grpc.ClientStream, error) {
		return openSoon(ctx, func(ctx context.Context) (grpc.ClientStream, error) {
			return streamer(ctx, description, connection, method, options...)
		})
	}
	first, err := open()
	if err != nil {
		return nil, err
	}
	return &stream{ClientStream: first, ctx: ctx, open: open}, nil
}

// stream is a call with one request, which it keeps until the answer begins.
type stream struct {
	grpc.ClientStream
	ctx     context.Context // of the call, beyond the end of one stream
	open    func() (grpc.ClientStream, error)
	request any
	// failure of a call that ended without an answer; RecvMsg returns it.
	failure error
}

// SendMsg implements grpc.ClientStream.
func (s *stream) SendMsg(message any) error {
	s.request = message
	return s.ClientStream.SendMsg(message)
}

// Header waits until the answer begins. For a call that failed at once it returns the trailer,
// since gRPC sends both as one.
func (s *stream) Header() (metadata.MD, error) {
	for attempt := 0; ; attempt++ {
		header, err := s.ClientStream.Header()
		if header != nil || err != nil {
			s.request = nil
			return header, err
		}
		s.failure = s.RecvMsg(&emptypb.Empty{}) // nothing is received: the stream has ended
		if attempt == len(pauses) || !isDraining(s.failure) || !s.again(pauses[attempt]) {
			return s.Trailer(), nil
		}
		s.failure = nil
	}
}

// again opens the stream anew; returns false, and changes nothing, if it cannot.
func (s *stream) again(pause time.Duration) bool {
	if !sleep(s.ctx, pause) {
		return false
	}
	next, err := s.open()
	if err != nil {
		return false
	}
	// io.EOF: it has ended already, and Header tells why.
	if err := next.SendMsg(s.request); err != nil && !errors.Is(err, io.EOF) {
		return false
	}
	if err := next.CloseSend(); err != nil {
		return false
	}
	s.ClientStream = next
	return true
}

// RecvMsg implements grpc.ClientStream.
func (s *stream) RecvMsg(message any) error {
	if s.failure != nil {
		return s.failure
	}
	return s.ClientStream.RecvMsg(message)
}

func isDraining(err error) bool {
	reason, ok := reasonOf(err)
	return ok && reason == draining && status.Code(err) == codes.Unavailable
}

// isUnreached says whether the failure happened before any gateway was reached.
func isUnreached(err error) bool {
	_, ok := reasonOf(err)
	return !ok && status.Code(err) == codes.Unavailable
}

func reasonOf(err error) (string, bool) {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info.GetReason(), true
		}
	}
	return "", false
}

// sleep is false when ctx has ended.
func sleep(ctx context.Context, pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return ctx.Err() == nil
	}
}
