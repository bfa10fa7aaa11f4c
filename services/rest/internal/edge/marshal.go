package edge

import (
	"bytes"
	"io"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/genproto/googleapis/api/httpbody"
	"google.golang.org/protobuf/encoding/protojson"
)

// mostFirstBytes bounds the memory that a body gets before any of it has come, whatever length its
// header gives.
const mostFirstBytes = 1 << 20

// firstBodyBytes is the memory with which reading a body begins. A buffer that grows from nothing
// copies a body of a megabyte about four times.
func firstBodyBytes(reader io.Reader) int64 {
	body, ok := reader.(*limitedBody)
	if !ok || body.announced < 0 {
		return bytes.MinRead
	}
	// With fewer free bytes the buffer would grow once more to find the end.
	return min(body.announced+bytes.MinRead, mostFirstBytes)
}

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
		data := bytes.NewBuffer(make([]byte, 0, firstBodyBytes(reader)))
		_, err := data.ReadFrom(reader)
		body.ContentType, body.Data = "application/json", data.Bytes()
		return err
	})
}
