package edge

import (
	"errors"
	"io"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/genproto/googleapis/api/httpbody"
	"google.golang.org/protobuf/encoding/protojson"
)

// firstBodyBytes is the memory with which reading a body begins, whatever length its header gives:
// clients that send no more hold little.
const firstBodyBytes = 16 << 10

// readBody reads all of a body into memory that is at most twice as large as what has come, and in
// the end no larger than a length that the client has given.
func readBody(reader io.Reader) ([]byte, error) {
	data, whole := make([]byte, 0, firstBodyBytes), int64(-1)
	if body, ok := reader.(*limitedBody); ok && body.announced >= 0 {
		whole = body.announced + 1 // the last read finds the end
	}
	for {
		if len(data) == cap(data) {
			size := 2 * int64(cap(data))
			if whole > int64(len(data)) {
				size = min(size, whole)
			}
			data = append(make([]byte, 0, size), data...)
		}
		n, err := reader.Read(data[len(data):cap(data)])
		data = data[:len(data)+n]
		if errors.Is(err, io.EOF) {
			return data, nil
		}
		if err != nil {
			return data, err
		}
	}
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
		data, err := readBody(reader)
		body.ContentType, body.Data = "application/json", data
		return err
	})
}
