package backend

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
)

// While no gateway is healthy, a stream waits this long for one: a restarting gateway may come
// back, or a new one may be found.
const patience = 5 * time.Second

// errNoGateway ends the contexts of streams that have waited for that long.
var errNoGateway = errors.New("no gateway")

// patienceKey is of the timer that ends a stream's context.
type patienceKey struct{}

// openSoon opens a stream that gives up when it waits too long for a gateway; no gateway has seen
// it then.
func openSoon(
	ctx context.Context, open func(context.Context) (grpc.ClientStream, error),
) (grpc.ClientStream, error) {
	bounded, cancel := context.WithCancelCause(ctx) // it ends with ctx
	timer := time.AfterFunc(patience, func() { cancel(errNoGateway) })
	bounded = context.WithValue(bounded, patienceKey{}, timer)
	opened, err := open(bounded)
	if err != nil {
		timer.Stop()
		return nil, orNoGateway(bounded, err)
	}
	return &impatient{ClientStream: opened, ctx: bounded}, nil
}

// impatient is a stream whose error says that no gateway was found. gRPC's own error only says that
// it was cancelled, or how its first connection ended.
type impatient struct {
	grpc.ClientStream
	ctx context.Context
}

// SendMsg implements grpc.ClientStream.
func (i *impatient) SendMsg(message any) error {
	return orNoGateway(i.ctx, i.ClientStream.SendMsg(message))
}

// RecvMsg implements grpc.ClientStream.
func (i *impatient) RecvMsg(message any) error {
	return orNoGateway(i.ctx, i.ClientStream.RecvMsg(message))
}

func orNoGateway(ctx context.Context, err error) error {
	if err == nil || context.Cause(ctx) != errNoGateway {
		return err
	}
	return status.Errorf(codes.Unavailable, "no gateway within %s: %v", patience, err)
}

// waits runs the timers of streams while they wait for a gateway. A stream waits when it is opened,
// and again, within any of its methods, when a gateway leaves (GOAWAY) without having seen it,
// since gRPC then sends it to another one. The connection's state would not show this, since a
// leaving gateway still answers the calls that it has accepted.
type waits struct{}

// HandleRPC implements stats.Handler.
func (waits) HandleRPC(ctx context.Context, event stats.RPCStats) {
	timer, ok := ctx.Value(patienceKey{}).(*time.Timer)
	if !ok {
		return
	}
	switch event := event.(type) {
	case *stats.Begin:
		if event.IsTransparentRetryAttempt {
			timer.Reset(patience)
		}
	case *stats.OutHeader, *stats.End: // a gateway has it, or it is over
		timer.Stop()
	}
}

// TagRPC implements stats.Handler.
func (waits) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// TagConn implements stats.Handler.
func (waits) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (waits) HandleConn(context.Context, stats.ConnStats) {}
