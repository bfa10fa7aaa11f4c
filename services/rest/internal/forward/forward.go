// Package forward writes streams of HttpBody messages as HTTP responses.
package forward

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/genproto/googleapis/api/httpbody"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/services/rest/internal/apierror"
	"weft.dev/weft/services/rest/internal/reqinfo"
)

const (
	eventStreamType = "text/event-stream"
	linesType       = "application/x-ndjson"
	// announceKey is the metadata in which a gateway that has accepted a request announces the content
	// type of its answer, before the answer begins.
	announceKey = "weft-content-type"
)

// Stream sends the first message's content type, then the bytes of every message.
//
// Server-sent events and lines of JSON are flushed one message at a time, events with comments in
// long pauses; a failure among them becomes an event or a line of the API's error shape, and nothing
// follows it. Any other answer is collected first, so that its failure still has a status code. A
// failure before anything was sent goes to the mux's error handler.
func Stream(
	ctx context.Context,
	mux *runtime.ServeMux,
	marshaler runtime.Marshaler,
	w http.ResponseWriter,
	r *http.Request,
	receive func() (proto.Message, error),
	_ ...func(context.Context, http.ResponseWriter, proto.Message) error,
) {
	CopyHeader(ctx, w)
	events := newEventStream(w, r)
	if kind := announced(ctx); isStream(kind) {
		events.begin(kind)
	}
	var err error
	if place := PlaceOf(ctx); place == nil || !place.IsRelayed() || sendRelayed(ctx, place, events) {
		err = answer(w, events, receive)
	}
	isOpen := events.end()
	switch {
	case err == nil:
	case isOpen:
		err = apierror.Reason(r.Context(), err)
		reqinfo.From(r.Context()).Failure = err
		events.limits.send(w, apierror.From(err).For(r.Context()).Named(w.Header()).Event())
	default:
		runtime.HTTPError(ctx, mux, marshaler, w, r, err)
	}
}

// Place is where events of an answer come beside its own stream.
type Place interface {
	// IsRelayed says whether they do; known once the answer has begun.
	IsRelayed() bool
	// Next waits for events; nil: what follows is on the answer's own stream, or the request is done.
	// Meanwhile events go to `try`, in another goroutine, and are for Next to return where it is false.
	Next(done <-chan struct{}, try func([]byte) bool) []byte
}

type placeKey struct{}

// WithPlace puts a place into the context of a request.
func WithPlace(ctx context.Context, place Place) context.Context {
	return context.WithValue(ctx, placeKey{}, place)
}

// PlaceOf is the place of a request; nil: it has none.
func PlaceOf(ctx context.Context) Place {
	place, _ := ctx.Value(placeKey{}).(Place)
	return place
}

// sendRelayed sends what comes on a relay; it is false when the client has gone.
func sendRelayed(ctx context.Context, place Place, events *eventStream) bool {
	done := ctx.Done() // a context looks for its channel in all that it was made of
	for data := place.Next(done, events.try); data != nil; data = place.Next(done, events.try) {
		if !events.send(data) {
			return false
		}
	}
	return true
}

// Events sends typed messages as server-sent events of JSON, whose fields have their names in the
// contract.
func Events(
	ctx context.Context,
	mux *runtime.ServeMux,
	marshaler runtime.Marshaler,
	w http.ResponseWriter,
	r *http.Request,
	receive func() (proto.Message, error),
	_ ...func(context.Context, http.ResponseWriter, proto.Message) error,
) {
	Stream(ctx, mux, marshaler, w, r, func() (proto.Message, error) {
		message, err := receive()
		if err != nil {
			return nil, err
		}
		data, err := marshaler.Marshal(message)
		if err != nil {
			return nil, err
		}
		event := slices.Concat([]byte("data: "), data, []byte("\n\n"))
		return &httpbody.HttpBody{ContentType: eventStreamType, Data: event}, nil
	})
}

// answer is nil as well when the client has gone.
func answer(
	w http.ResponseWriter,
	events *eventStream,
	receive func() (proto.Message, error),
) error {
	first, err := receiveBody(receive)
	switch {
	case errors.Is(err, io.EOF) && events.opened():
		return nil
	case errors.Is(err, io.EOF):
		return status.Error(codes.Internal, "the gateway sent no answer")
	case err != nil:
		return err
	case isStream(first.GetContentType()):
		events.begin(first.GetContentType())
		return sendEvents(events, first, receive)
	case events.end():
		return status.Error(codes.Internal, "the gateway announced events and sent none")
	default:
		return sendWhole(w, first, receive)
	}
}

func receiveBody(receive func() (proto.Message, error)) (*httpbody.HttpBody, error) {
	message, err := receive()
	if err != nil {
		return nil, err
	}
	body, ok := message.(*httpbody.HttpBody)
	if !ok {
		return nil, status.Errorf(codes.Internal, "unexpected message %T", message)
	}
	return body, nil
}

// sendWhole writes nothing before the stream has ended without an error.
func sendWhole(
	w http.ResponseWriter,
	first *httpbody.HttpBody,
	receive func() (proto.Message, error),
) error {
	whole := bytes.NewBuffer(first.GetData())
	for {
		body, err := receiveBody(receive)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		whole.Write(body.GetData())
	}
	w.Header().Set("Content-Type", first.GetContentType())
	w.Header().Set("Content-Length", strconv.Itoa(whole.Len()))
	_, _ = w.Write(whole.Bytes()) // a client that has gone needs no answer
	return nil
}

func sendEvents(
	events *eventStream, body *httpbody.HttpBody, receive func() (proto.Message, error),
) error {
	for events.send(body.GetData()) {
		var err error
		body, err = receiveBody(receive)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// isStream says whether messages of a content type are passed on as they come.
func isStream(contentType string) bool {
	return strings.HasPrefix(contentType, eventStreamType) ||
		strings.HasPrefix(contentType, linesType)
}

// announced is the content type that the gateway has announced; empty when it has not.
func announced(ctx context.Context) string {
	md, _ := runtime.ServerMetadataFromContext(ctx)
	return strings.Join(md.HeaderMD.Get(announceKey), "")
}

// ClientHeader lets metadata made for clients through, under its own name.
func ClientHeader(key string) (string, bool) {
	return key, key == "request-id" || key == "endpoint-load-metrics" ||
		strings.HasPrefix(key, "x-weft-") || strings.HasPrefix(key, "x-ratelimit-")
}

// CopyHeader puts what a call brought for the client into its answer.
func CopyHeader(ctx context.Context, w http.ResponseWriter) {
	md, _ := runtime.ServerMetadataFromContext(ctx)
	for _, part := range []metadata.MD{md.TrailerMD, md.HeaderMD} {
		for key, values := range part {
			if name, ok := ClientHeader(key); ok {
				w.Header()[http.CanonicalHeaderKey(name)] = values
			}
		}
	}
}
