package edge

import (
	"context"

	"google.golang.org/grpc"
)

// bodyKey is that of a request's body in its context.
type bodyKey struct{}

// passing is a connection that gives the room of a body back once the gateway's stream has it.
type passing struct {
	grpc.ClientConnInterface
}

func (p passing) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	stream, err := p.ClientConnInterface.NewStream(ctx, desc, method, options...)
	if body, ok := ctx.Value(bodyKey{}).(*limitedBody); ok && err == nil {
		return passingStream{stream, body}, nil
	}
	return stream, err
}

type passingStream struct {
	grpc.ClientStream
	body *limitedBody
}

func (s passingStream) CloseSend() error {
	defer s.body.release()
	return s.ClientStream.CloseSend()
}
