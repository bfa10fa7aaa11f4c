package edge

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"weft.dev/weft/services/rest/internal/relay"
)

// bodyKey is that of a request's body in its context.
type bodyKey struct{}

// passing is a connection that gives the room of a body back once the gateway's stream has it, and
// lets the events of an answer come on a relay.
type passing struct {
	grpc.ClientConnInterface
}

func (p passing) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	body, ok := ctx.Value(bodyKey{}).(*limitedBody)
	if !ok {
		return p.ClientConnInterface.NewStream(ctx, desc, method, options...)
	}
	place := relay.From(ctx)
	if place != nil {
		ctx = place.Name(ctx)
	}
	stream, err := p.ClientConnInterface.NewStream(ctx, desc, method, options...)
	if err != nil {
		return nil, err
	}
	return passingStream{stream, body, place}, nil
}

type passingStream struct {
	grpc.ClientStream
	body  *limitedBody
	place *relay.Stream // nil: there are no relays
}

// Header also tells the relays where the answer's events come.
func (s passingStream) Header() (metadata.MD, error) {
	header, err := s.ClientStream.Header()
	if err == nil && s.place != nil {
		s.place.Answered(s.Context(), header)
	}
	return header, err
}

func (s passingStream) CloseSend() error {
	defer s.body.release()
	return s.ClientStream.CloseSend()
}
