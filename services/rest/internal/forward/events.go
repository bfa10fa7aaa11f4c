package forward

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"weft.dev/weft/services/rest/internal/clientconn"
)

// A comment, which clients of server-sent events ignore.
const waiting = ": waiting\n\n"

// Limits are times of answers.
type Limits struct {
	// WriteStall: a write that takes longer than this ends the answer; 0: the connection bounds its
	// writes (clientconn.Listener).
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
func (l Limits) send(w http.ResponseWriter, data []byte) bool {
	if _, err := w.Write(data); err != nil {
		return false
	}
	controller := http.NewResponseController(w)
	flushed := controller.Flush() == nil
	if l.WriteStall > 0 {
		// A deadline that is left would end an HTTP/2 stream in a pause of that length.
		_ = controller.SetWriteDeadline(time.Time{})
	}
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
	conn   *clientconn.Conn // whose answer is chunked; nil: it is another
	limits Limits

	mutex   sync.Mutex // held while anything is written
	timer   *time.Timer
	kind    string
	isOpen  bool
	isEnded bool
	isGone  bool
}

func newEventStream(w http.ResponseWriter, r *http.Request) *eventStream {
	events := &eventStream{w: w, limits: limitsOf(r.Context())}
	if r.ProtoAtLeast(1, 1) {
		events.conn = clientconn.Of(r.Context())
	}
	return events
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

// Chunks that are being written.
var chunks = sync.Pool{New: func() any { return new([]byte) }}

// try sends data without waiting for the client, from any goroutine. It is false, and sends nothing,
// if that is not possible. After a flush net/http holds nothing back, so a chunk of its answer (RFC
// 9112, section 7.1) can be written to the connection directly, which saves net/http's part
// (bench/notes/streams.md).
func (e *eventStream) try(data []byte) bool {
	if !e.mutex.TryLock() {
		return false
	}
	defer e.mutex.Unlock()
	if e.conn == nil || !e.isOpen || e.isEnded || e.isGone {
		return false
	}
	chunk, _ := chunks.Get().(*[]byte)
	defer chunks.Put(chunk)
	*chunk = strconv.AppendInt((*chunk)[:0], int64(len(data)), 16)
	*chunk = append(append(append(*chunk, "\r\n"...), data...), "\r\n"...)
	if !e.conn.TryWrite(*chunk) {
		return false
	}
	if e.timer != nil {
		e.timer.Reset(e.limits.CommentAfter)
	}
	return true
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
	e.isGone = !e.limits.send(e.w, data)
	if e.timer != nil {
		e.timer.Reset(e.limits.CommentAfter)
	}
	return !e.isGone
}

// opened says whether anything was sent.
func (e *eventStream) opened() bool {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	return e.isOpen
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
