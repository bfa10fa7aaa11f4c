package apierror

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
)

// Shape is the form of failures on the paths of one API: the ErrorShape that its contract declares.
// The zero value is OpenAI's.
type Shape struct {
	// Body and Event are templates; the contract tells their placeholders. Empty: OpenAI's.
	Body, Event string
	// Types are values of {type} by HTTP status.
	Types map[int]string
	// IDHeader is the header that has {request_id} as well; empty: none.
	IDHeader string
}

type shapeKey struct{}

type shaped struct {
	shape     Shape
	requestID string
}

// WithShape puts the shape of a request's failures, and the id that they show, into its context.
func WithShape(ctx context.Context, shape Shape, requestID string) context.Context {
	return context.WithValue(ctx, shapeKey{}, shaped{shape, requestID})
}

// For converts a failure to the form for the client of a request with this context.
func (e Error) For(ctx context.Context) Error {
	e.shaped, _ = ctx.Value(shapeKey{}).(shaped)
	return e
}

// gatewayIDKey is the header with the gateway's name of a request that has reached it.
const gatewayIDKey = "X-Weft-Request-Id"

// Named gives the failure the id that the answer's headers have: the gateway's, where the request has
// reached one. It adds the API's own header of that id.
func (e Error) Named(header http.Header) Error {
	name := e.shaped.shape.IDHeader
	if name == "" {
		return e
	}
	for _, key := range []string{gatewayIDKey, name} {
		if id := header.Get(key); id != "" {
			e.shaped.requestID = id
		}
	}
	header.Set(name, e.shaped.requestID)
	return e
}

// render fills a template.
func (e Error) render(template string) []byte {
	replacer := strings.NewReplacer(
		"{message}", text(e.Message),
		"{type}", text(e.shaped.shape.kind(e.Status)),
		"{code}", textOrNull(e.Code),
		"{param}", textOrNull(e.Param),
		"{status}", strconv.Itoa(e.Status),
		"{request_id}", textOrNull(e.shaped.requestID),
	)
	return []byte(replacer.Replace(template))
}

// kind is the value of {type}; statuses without one have that of their class.
func (s Shape) kind(status int) string {
	if name, ok := s.Types[status]; ok {
		return name
	}
	if status < http.StatusInternalServerError {
		return s.Types[http.StatusBadRequest]
	}
	return s.Types[http.StatusInternalServerError]
}

func text(value string) string {
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(value) // strings always encode
	return strings.TrimRight(buffer.String(), "\n")
}

func textOrNull(value string) string {
	if value == "" {
		return "null"
	}
	return text(value)
}
