// Package apierror turns gRPC failures into the error shape of the API that was called.
package apierror

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ErrDraining ends the contexts of requests that the edge does not finish because it shuts down.
var ErrDraining = status.Error(
	codes.Unavailable, "the REST edge is shutting down; send the request again")

// queryParameter finds the name of a query parameter in a message of the router.
var queryParameter = regexp.MustCompile(`^parsing (?:field|list) "(\w+)"`)

// Reason is why a call with the request's context failed. If the edge has ended that context, err
// only says that the call was cancelled, as if the client had gone.
func Reason(ctx context.Context, err error) error {
	if IsDraining(ctx) {
		return ErrDraining
	}
	return err
}

// IsDraining says whether the edge has ended a request's context, not the client.
func IsDraining(ctx context.Context) bool {
	return context.Cause(ctx) == ErrDraining
}

// Error is one failure as a client sees it.
type Error struct {
	// Status is the HTTP status code.
	Status int
	// Message says what failed and what to do.
	Message string
	// Param names the request field at fault; empty when there is none.
	Param string
	// Code is the reason in lower case; empty when the gateway gave none.
	Code string
	// RetryAfter is 0 when the client was given no hint.
	RetryAfter time.Duration
	// Cause is the text that Message replaced because it may name hosts; for logs only.
	Cause string

	shaped shaped
}

// New makes a failure of the edge itself.
func New(httpStatus int, code, message string) Error {
	return Error{Status: httpStatus, Code: code, Message: message}
}

// From converts an error of a gRPC call or of the router.
//
// ErrorInfo gives the code, `metadata.param` the field and `metadata.http_status` overrides the
// status that the gRPC code maps to; RetryInfo gives RetryAfter. A failure without ErrorInfo was
// made by the transport; the text of a 5xx one is replaced.
func From(err error) Error {
	var routing *runtime.HTTPStatusError
	if errors.As(err, &routing) {
		return New(routing.HTTPStatus, "invalid_path", routing.Error())
	}
	grpcStatus := status.Convert(err)
	if errors.Is(err, ErrDraining) {
		failure := New(http.StatusServiceUnavailable, "draining", grpcStatus.Message())
		failure.RetryAfter = time.Second
		return failure
	}
	failure := Error{
		Status:  runtime.HTTPStatusFromCode(grpcStatus.Code()),
		Message: grpcStatus.Message(),
	}
	fromGateway := false
	for _, detail := range grpcStatus.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			fromGateway = true
			failure.Code = strings.ToLower(detail.GetReason())
			failure.Param = detail.GetMetadata()["param"]
			if code, ok := httpStatus(detail.GetMetadata()["http_status"]); ok {
				failure.Status = code
			}
		case *errdetails.RetryInfo:
			failure.RetryAfter = detail.GetRetryDelay().AsDuration()
		}
	}
	if !fromGateway {
		failure.fromTransport(grpcStatus)
	}
	return failure
}

// fromTransport rewrites a failure that the transport made, not a gateway.
func (e *Error) fromTransport(grpcStatus *status.Status) {
	tooLarge := grpcStatus.Code() == codes.ResourceExhausted &&
		strings.Contains(strings.ToLower(grpcStatus.Message()), "larger than max")
	switch {
	case grpcStatus.Code() == codes.InvalidArgument:
		e.fromRouter(grpcStatus.Message())
	case tooLarge:
		e.Status, e.Code = http.StatusRequestEntityTooLarge, "request_too_large"
		e.replace("The request body is larger than the gateway accepts.")
	case e.Status == http.StatusServiceUnavailable:
		e.Code, e.RetryAfter = "unavailable", time.Second
		e.replace("The service is not reachable at the moment; try again shortly.")
	case e.Status == http.StatusGatewayTimeout:
		e.Code = "deadline_exceeded"
		e.replace("The request did not finish within its time limit.")
	case e.Status >= http.StatusInternalServerError:
		e.Code = "internal"
		e.replace("The service failed to answer this request.")
	}
}

// fromRouter names what the router could not read: a query parameter or a header.
func (e *Error) fromRouter(message string) {
	e.Code = "invalid_request"
	if strings.HasPrefix(message, "invalid grpc-timeout") {
		e.Param = "grpc-timeout"
		e.Message = "grpc-timeout: must be a whole number and a unit, such as 1500m"
	} else if found := queryParameter.FindStringSubmatch(message); found != nil {
		e.Param = found[1]
		e.Message = found[1] + ": the value is not of the parameter's type"
	}
}

func (e *Error) replace(message string) {
	e.Cause, e.Message = e.Message, message
}

// payload is OpenAI's shape; absent fields are null.
type payload struct {
	Error struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
	} `json:"error"`
}

// JSON is the body of the answer.
func (e Error) JSON() []byte {
	if template := e.shaped.shape.Body; template != "" {
		return e.render(template)
	}
	var body payload
	body.Error.Message, body.Error.Type = e.Message, e.kind()
	body.Error.Param, body.Error.Code = orNull(e.Param), orNull(e.Code)
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(body) // strings always encode
	line := bytes.TrimRight(buffer.Bytes(), "\n")
	// The encoder escapes U+2028 and U+2029. Some clients cut the lines of a stream here as well.
	return bytes.ReplaceAll(line, []byte("\u0085"), []byte(`\u0085`))
}

// Event is the failure within a stream that has begun, framed.
func (e Error) Event() []byte {
	if template := e.shaped.shape.Event; template != "" {
		return e.render(template)
	}
	return append(append([]byte("data: "), e.JSON()...), "\n\n"...)
}

// Write sends the failure as a whole response.
func (e Error) Write(w http.ResponseWriter) {
	header := w.Header()
	body := e.Named(header).JSON()
	header.Del("Trailer")
	header.Del("Transfer-Encoding")
	header.Set("Content-Type", "application/json")
	header.Set("Content-Length", strconv.Itoa(len(body)))
	if e.RetryAfter > 0 {
		header.Set("Retry-After", strconv.Itoa(int(math.Ceil(e.RetryAfter.Seconds()))))
	}
	if e.Status == http.StatusUnauthorized {
		header.Set("WWW-Authenticate", "Bearer")
	}
	w.WriteHeader(e.Status)
	_, _ = w.Write(body) // a client that has gone needs no answer
}

func (e Error) kind() string {
	switch {
	case e.Status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case e.Status == http.StatusUnauthorized:
		return "authentication_error"
	case e.Status == http.StatusForbidden:
		return "permission_error"
	case e.Status < http.StatusInternalServerError:
		return "invalid_request_error"
	default:
		return "server_error"
	}
}

func httpStatus(text string) (int, bool) {
	code, err := strconv.Atoi(text)
	return code, err == nil && code >= 400 && code <= 599
}

func orNull(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}
