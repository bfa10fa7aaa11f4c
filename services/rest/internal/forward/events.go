package forward

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"time"
)

// A comment, which clients of server-sent events ignore.
const waiting = ": waiting\n\n"

// Limits are times of answers.
type Limits struct {
	// WriteStall: a client that reads nothing for this long loses its connection.
	WriteStall time.Duration
	// CommentAfter: a stream of events without an event for this long gets a comment, so that no proxy
	// takes it for dead; 0: never.
	CommentAfter time.Duration
}

type limitsKey struct{}

// WithLimits puts limits into the context of a request.
func WithLimits(ctx context.Context, limits Limits) context.Context {
	return context.WithValue(ctx, limitsKey{}, limits)
}

func limitsOf(ctx context.Context) Limits {
	limits, _ := ctx.Value(limitsKey{}).(Limits)
	return limits
}

// send writes data now, through a writer that calls LimitWrite; it is false when the client has gone.
func send(w http.ResponseWriter, data []byte) bool {
	if _, err := w.Write(data); err != nil {
		return false
	}
	controller := http.NewResponseController(w)
	flushed := controller.Flush() == nil
	// A deadline that is left would end an HTTP/2 stream in a pause of that length.
	_ = controller.SetWriteDeadline(time.Time{})
	return flushed
}

// LimitWrite bounds the next writes of an answer. The deadline stays behind the last one, since
// buffered data is sent after the handler has ended; then the server clears it.
func (l Limits) LimitWrite(w http.ResponseWriter) {
	if l.WriteStall > 0 {
		// Writers without deadlines (recorders in tests) are fine.
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(l.WriteStall))
	}
}

// eventStream writes the events of one answer, and comments from a timer. The header is sent with
// the first of either; until then another answer can be sent instead.
type eventStream struct {
	w      http.ResponseWriter
	limits Limits

	mutex   sync.Mutex // held while anything is written
	timer   *time.Timer
	kind    string
	isOpen  bool
	isEnded bool
	isGone  bool
}

func newEventStream(w http.ResponseWriter, limits Limits) *eventStream {
	return &eventStream{w: w, limits: limits}
}

// begin notes that events will come, and their content type.
func (e *eventStream) begin(kind string) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	if e.kind != "" {
		return
	}
	e.kind = kind
	if e.limits.CommentAfter > 0 && strings.HasPrefix(kind, eventStreamType) {
		e.timer = time.AfterFunc(e.limits.CommentAfter, e.comment)
	}
}

// send is false when the client has gone; the request's context ends the gRPC stream.
func (e *eventStream) send(data []byte) bool {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	return e.write(data)
}

func (e *eventStream) comment() {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	if !e.isEnded {
		e.write([]byte(waiting))
	}
}

// write needs the mutex.
func (e *eventStream) write(data []byte) bool {
	if e.isGone {
		return false
	}
	if !e.isOpen {
		header := e.w.Header()
		header.Set("Content-Type", e.kind)
		header.Set("Cache-Control", "no-cache")
		header.Set("X-Accel-Buffering", "no") // nginx would hold events back
		e.isOpen = true
	}
	e.isGone = !send(e.w, data)
	if e.timer != nil {
		e.timer.Reset(e.limits.CommentAfter)
	}
	return !e.isGone
}

// end stops the comments, and says whether anything was sent.
func (e *eventStream) end() bool {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	e.isEnded = true
	if e.timer != nil {
		e.timer.Stop()
	}
	return e.isOpen
}
