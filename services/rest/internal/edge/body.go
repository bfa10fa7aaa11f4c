package edge

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"weft.dev/weft/services/rest/internal/apierror"
	"weft.dev/weft/services/rest/internal/halfclose"
)

const (
	// A body must have arrived within this time.
	bodyTimeout = 60 * time.Second
	// This much of a body that is too large is read and discarded, so that a client that sends first
	// and reads later gets the answer instead of a reset connection.
	drainBytes = 64 << 20
)

// limitedBody is a request body that is not read past its limit, nor for longer than bodyTimeout.
type limitedBody struct {
	limited    io.ReadCloser
	raw        io.ReadCloser
	controller *http.ResponseController
	ended      func() // to be called when the handler returns
	received   func() // to be called when all of it has come
	failure    error  // first error of a read, io.EOF apart
}

func newLimitedBody(w http.ResponseWriter, r *http.Request, maxBytes int64) *limitedBody {
	controller := http.NewResponseController(w)
	// The deadline is for the body only: left on the connection, it would end long streams.
	_ = controller.SetReadDeadline(time.Now().Add(bodyTimeout))
	ctx := r.Context()
	cut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(cut)
		// Only then: the context of every request ends, and the next one may be on this connection.
		if apierror.IsDraining(ctx) {
			_ = controller.SetReadDeadline(time.Now())
		}
	})
	answered := func() {}
	return &limitedBody{
		received: sync.OnceFunc(func() {
			if takesInterim(r) {
				answered = halfclose.Answering(ctx)
			}
		}),
		// With HTTP/2 a deadline cannot be set after the handler: the call would panic.
		ended: func() {
			answered()
			if !stop() {
				<-cut
			}
		},
		limited:    http.MaxBytesReader(w, r.Body, maxBytes),
		raw:        r.Body,
		controller: controller,
	}
}

func (b *limitedBody) Read(p []byte) (int, error) {
	n, err := b.limited.Read(p)
	switch {
	case errors.Is(err, io.EOF):
		_ = b.controller.SetReadDeadline(time.Time{})
		b.received()
	case err != nil && b.failure == nil:
		b.failure = err
	}
	return n, err
}

func (b *limitedBody) Close() error {
	return b.limited.Close()
}

// problem is the answer to a body that could not be read; nil if it could.
func (b *limitedBody) problem() (apierror.Error, bool) {
	var limit *http.MaxBytesError
	switch {
	case b.failure == nil:
		return apierror.Error{}, false
	case errors.As(b.failure, &limit):
		_, _ = io.CopyN(io.Discard, b.raw, drainBytes)
		message := fmt.Sprintf("The request body is larger than %d bytes.", limit.Limit)
		return apierror.New(http.StatusRequestEntityTooLarge, "request_too_large", message), true
	case errors.Is(b.failure, os.ErrDeadlineExceeded):
		message := fmt.Sprintf("The request body did not arrive within %s.", bodyTimeout)
		return apierror.New(http.StatusRequestTimeout, "request_timeout", message), true
	default:
		message := "The request body could not be read."
		return apierror.New(http.StatusBadRequest, "unreadable_body", message), true
	}
}
