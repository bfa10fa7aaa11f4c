package edge

import (
	"io"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/genproto/googleapis/api/httpbody"
	"google.golang.org/protobuf/encoding/protojson"
)

// rawMarshaler passes HttpBody through untouched in both directions. The stock one would decode
// the request's JSON into the HttpBody message itself.
type rawMarshaler struct {
	runtime.HTTPBodyMarshaler
}

func newRawMarshaler() *rawMarshaler {
	return &rawMarshaler{runtime.HTTPBodyMarshaler{Marshaler: &runtime.JSONPb{
		MarshalOptions:   protojson.MarshalOptions{UseProtoNames: true},
		UnmarshalOptions: protojson.UnmarshalOptions{DiscardUnknown: true},
	}}}
}

// NewDecoder reads the whole body into HttpBody.data, which the gateway parses.
func (m *rawMarshaler) NewDecoder(reader io.Reader) runtime.Decoder {
	return runtime.DecoderFunc(func(target any) error {
		body, ok := target.(*httpbody.HttpBody)
		if !ok {
			return m.HTTPBodyMarshaler.NewDecoder(reader).Decode(target)
		}
		data, err := io.ReadAll(reader)
		body.ContentType, body.Data = "application/json", data
		return err
	})
}
