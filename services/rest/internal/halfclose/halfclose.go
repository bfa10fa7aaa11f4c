// Package halfclose serves clients that shut down their sending side after a request and wait for
// the answer (RFC 9112, section 9.6). net/http takes the end of a client's input for the client's
// end, and cancels the request.
//
// A client that has gone looks the same until something is sent to it. So this package hides the
// end of input from net/http while a request is answered. If nothing of the answer was sent yet, it
// sends an interim response (100 Continue): a client that is there ignores it, and the host of one
// that has gone resets the connection.
package halfclose

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"
)

const (
	interim = "HTTP/1.1 100 Continue\r\n\r\n"
	// Interval between checks of a connection whose client sends no more.
	lookEvery = 20 * time.Millisecond
	// Interval between interim responses while the answer has not begun.
	askEvery = 5 * time.Second
	// The end of input is hidden for this long while a request arrives, since net/http may read it
	// before the handler has seen the end of the body. A body that ends early is reported after this
	// time.
	arrivalGrace = time.Second
)

type connKey struct{}

// Listener makes connections that know of requests in work; they must not be inside of TLS.
type Listener struct {
	net.Listener
}

// Accept implements net.Listener.
func (l Listener) Accept() (net.Conn, error) {
	inner, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &conn{Conn: inner}, nil
}

// WithConn is http.Server.ConnContext: it lets Answering find the connection.
func WithConn(ctx context.Context, c net.Conn) context.Context {
	if own, ok := c.(*conn); ok {
		return context.WithValue(ctx, connKey{}, own)
	}
	return ctx
}

// Follow is http.Server.ConnState: it tells a connection that a request arrives.
func Follow(c net.Conn, state http.ConnState) {
	if own, ok := c.(*conn); ok && state == http.StateActive {
		own.set(arriving)
	}
}

// Answering notes that an HTTP/1.1 request was received whole. The function that it returns notes
// that the answer is complete.
func Answering(ctx context.Context) (done func()) {
	own, ok := ctx.Value(connKey{}).(*conn)
	if !ok {
		return func() {}
	}
	own.set(answering)
	return func() { own.set(idle) }
}

type phase int

const (
	idle phase = iota
	arriving
	answering
)

type conn struct {
	net.Conn

	mutex      sync.Mutex // held while anything is written
	phase      phase
	hasWritten bool // anything of this answer
	asked      time.Time
}

func (c *conn) set(next phase) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.phase, c.hasWritten = next, false
}

// Write implements net.Conn.
func (c *conn) Write(data []byte) (int, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.hasWritten = true
	return c.Conn.Write(data)
}

// Read implements net.Conn. It returns io.EOF only while no request is in work.
func (c *conn) Read(p []byte) (int, error) {
	for began := time.Now(); ; {
		n, err := c.Conn.Read(p)
		if n > 0 || !errors.Is(err, io.EOF) || c.isReset() || !c.waits(time.Since(began)) {
			return n, err
		}
		time.Sleep(lookEvery)
	}
}

// isReset says whether the client's host has reset the connection. A read does not show this, since
// it returns the end of input first.
func (c *conn) isReset() bool {
	inner, ok := c.Conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := inner.SyscallConn()
	if err != nil {
		return true
	}
	var failure int
	err = raw.Control(func(fd uintptr) {
		failure, _ = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_ERROR)
	})
	return err != nil || failure != 0
}

// waits is false when the input has ended some time ago, so that the client counts as gone.
func (c *conn) waits(ended time.Duration) bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.phase != answering {
		return c.phase == arriving && ended < arrivalGrace
	}
	if c.hasWritten || time.Since(c.asked) < askEvery {
		return true
	}
	c.asked = time.Now()
	_, err := io.WriteString(c.Conn, interim)
	return err == nil
}

// CloseWrite is what net/http calls ahead of closing, so that its last words arrive.
func (c *conn) CloseWrite() error {
	if inner, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return inner.CloseWrite()
	}
	return nil
}
