package edge

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/services/rest/internal/apierror"
	"weft.dev/weft/services/rest/internal/clientconn"
)

const (
	// A body must have arrived within this time.
	bodyTimeout = 60 * time.Second
	// Default of Config.BodyPause.
	bodyPause = 10 * time.Second
	// This much of a body that is too large is read and discarded, so that a client that sends first
	// and reads later gets the answer instead of a reset connection.
	drainBytes = 64 << 20
	// Room for bodies that are still arriving, where Config.MaxHeldBytes is not given.
	leastHeldBytes = 128 << 20
	// A body whose header says that it is too large is read and discarded for this long.
	drainTime = 2 * time.Second
)

// errNoRoom is the failure of a body for which there was no room.
var errNoRoom = errors.New("too many bodies at once")

// Room bounds the bytes of all bodies that have not been passed on yet.
type Room struct {
	limit int64
	held  atomic.Int64
}

// NewRoom makes room for maxHeldBytes, and for one body at least. 0: for four bodies, and no less than
// leastHeldBytes.
func NewRoom(maxHeldBytes, maxBodyBytes int64) *Room {
	if maxHeldBytes == 0 {
		return &Room{limit: max(leastHeldBytes, 4*maxBodyBytes)}
	}
	return &Room{limit: max(maxHeldBytes, maxBodyBytes)}
}

// Take is false, and takes nothing, if there is not as much.
func (r *Room) Take(count int64) bool {
	if r.held.Add(count) <= r.limit {
		return true
	}
	r.held.Add(-count)
	return false
}

// Give gives room back that was taken.
func (r *Room) Give(count int64) {
	r.held.Add(-count)
}

// limitedBody is a request body that is not read past its limit, nor for longer than bodyTimeout,
// and that takes room until `release`.
type limitedBody struct {
	ctx        context.Context // of the request
	room       *Room
	taken      atomic.Int64
	announced  int64 // its length as the client says; -1: unknown
	limit      int64
	until      time.Time // when all of it must have come
	pause      time.Duration
	limited    io.ReadCloser
	raw        io.ReadCloser
	controller *http.ResponseController
	ended      func() // to be called when the handler returns
	received   func() // to be called when all of it has come
	failure    error  // first error of a read, io.EOF apart
}

func newLimitedBody(
	w http.ResponseWriter, r *http.Request, config Config, room *Room,
) *limitedBody {
	controller := http.NewResponseController(w)
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
				answered = clientconn.Answering(ctx)
			}
		}),
		ctx:   ctx,
		room:  room,
		pause: config.BodyPause,
		limit: config.MaxBodyBytes,

		announced: r.ContentLength,
		until:     time.Now().Add(bodyTimeout),
		// With HTTP/2 a deadline cannot be set after the handler: the call would panic.
		ended: func() {
			answered()
			if !stop() {
				<-cut
			}
		},
		limited:    http.MaxBytesReader(w, r.Body, config.MaxBodyBytes),
		raw:        r.Body,
		controller: controller,
	}
}

func (b *limitedBody) Read(p []byte) (int, error) {
	if b.announced > b.limit {
		// What the client sends all the same is read for a moment; drainBytes says why.
		_ = b.controller.SetReadDeadline(time.Now().Add(drainTime))
		b.failure = &http.MaxBytesError{Limit: b.limit}
		return 0, b.failure
	}
	// The deadline is for the body only: left on the connection, it would end long streams.
	if b.failure == nil {
		_ = b.controller.SetReadDeadline(earlier(b.until, time.Now().Add(b.pause)))
	}
	// Looked at afterwards, or the end of the edge might set its deadline just before.
	if apierror.IsDraining(b.ctx) {
		_ = b.controller.SetReadDeadline(time.Now())
	}
	n, err := b.limited.Read(p)
	if n > 0 && b.failure == nil {
		if b.room.Take(int64(n)) {
			b.taken.Add(int64(n))
		} else {
			b.failure = errNoRoom
			return 0, errNoRoom
		}
	}
	switch {
	case errors.Is(err, io.EOF):
		_ = b.controller.SetReadDeadline(time.Time{})
		b.received()
	case err != nil && b.failure == nil:
		b.failure = err
	}
	return n, err
}

// release gives the room back once the body has been passed on.
func (b *limitedBody) release() {
	b.room.Give(b.taken.Swap(0))
}

func earlier(first, second time.Time) time.Time {
	if second.Before(first) {
		return second
	}
	return first
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
	case errors.Is(b.failure, errNoRoom):
		_, _ = io.CopyN(io.Discard, b.raw, drainBytes)
		message := "The server is receiving too many request bodies; send the request again shortly."
		failure := apierror.New(http.StatusServiceUnavailable, "overloaded", message)
		failure.RetryAfter = time.Second
		return failure, true
	case errors.Is(b.failure, os.ErrDeadlineExceeded):
		message := fmt.Sprintf("The request body did not arrive within %s, or paused for %s.",
			bodyTimeout, b.pause)
		return apierror.New(http.StatusRequestTimeout, "request_timeout", message), true
	default:
		message := "The request body could not be read."
		return apierror.New(http.StatusBadRequest, "unreadable_body", message), true
	}
}
