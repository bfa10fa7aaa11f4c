// Package clientconn has the connections of HTTP/1.1 clients, outside of TLS.
//
// It serves clients that shut down their sending side after a request and wait for the answer (RFC
// 9112, section 9.6). net/http takes the end of a client's input for the client's end, and cancels
// the request. A client that has gone looks the same until something is sent to it. So the end of
// input is hidden from net/http while a request is answered. If nothing of the answer was sent yet,
// an interim response is sent (100 Continue): a client that is there ignores it, and the host of one
// that has gone resets the connection.
//
// And by TryWrite one goroutine can send to many clients without waiting for any. Write waits for its
// client, but not while the client takes nothing for WriteStall; no deadline is set where the client
// takes everything at once.
package clientconn

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
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
	// WriteStall: a client that takes nothing for this long loses its connection; 0: it does not.
	WriteStall time.Duration
}

// Accept implements net.Listener.
func (l Listener) Accept() (net.Conn, error) {
	inner, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	own := &Conn{Conn: inner, stall: l.WriteStall}
	if of, ok := inner.(syscall.Conn); ok {
		if own.raw, err = of.SyscallConn(); err != nil {
			return nil, errors.Join(err, inner.Close())
		}
	}
	return own, nil
}

// Of is the connection of a request; nil: it is not one of this package.
func Of(ctx context.Context) *Conn {
	own, _ := ctx.Value(connKey{}).(*Conn)
	return own
}

// WithConn is http.Server.ConnContext: it lets Of and Answering find the connection.
func WithConn(ctx context.Context, c net.Conn) context.Context {
	if own, ok := c.(*Conn); ok {
		return context.WithValue(ctx, connKey{}, own)
	}
	return ctx
}

// Follow is http.Server.ConnState: it tells a connection that a request arrives.
func Follow(c net.Conn, state http.ConnState) {
	if own, ok := c.(*Conn); ok && state == http.StateActive {
		own.set(arriving)
	}
}

// Answering notes that an HTTP/1.1 request was received whole. The function that it returns notes
// that the answer is complete.
func Answering(ctx context.Context) (done func()) {
	own := Of(ctx)
	if own == nil {
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

// Conn is one connection.
type Conn struct {
	net.Conn
	raw   syscall.RawConn // nil: writes always wait
	stall time.Duration

	mutex      sync.Mutex // held while anything is written
	phase      phase
	hasWritten bool // anything of this answer
	asked      time.Time
	unsent     []byte // what TryWrite has left: it goes out first
	failed     error  // of a write, which may have ended anywhere: nothing may follow
}

func (c *Conn) set(next phase) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.phase, c.hasWritten = next, false
}

// TryWrite sends data without waiting for the client: what it does not take at once is sent in the
// background. It is false, and sends nothing, while something is still to be sent, if the client has
// gone, and where writes always wait.
func (c *Conn) TryWrite(data []byte) bool {
	if c.raw == nil || !c.mutex.TryLock() {
		return false
	}
	defer c.mutex.Unlock()
	if c.failed != nil || len(c.unsent) > 0 {
		return false
	}
	c.hasWritten = true
	sent, err := c.try(data)
	if c.failed = err; err != nil {
		return false
	}
	if sent < len(data) {
		c.unsent = bytes.Clone(data[sent:])
		go c.finish()
	}
	return true
}

// finish sends what TryWrite has left. If that fails the connection is closed, which ends the request.
func (c *Conn) finish() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.failed = c.sendRest(); c.failed != nil {
		_ = c.Conn.Close()
	}
}

// Write implements net.Conn.
func (c *Conn) Write(data []byte) (int, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.hasWritten = true
	if c.failed != nil {
		return 0, c.failed
	}
	if c.failed = c.sendRest(); c.failed != nil {
		return 0, c.failed
	}
	sent, err := c.try(data)
	if err == nil && sent < len(data) {
		var more int
		more, err = c.wait(data[sent:])
		sent += more
	}
	c.failed = err
	return sent, err
}

// try writes what the client takes at once, by one system call without the deadline and the poller of
// net.Conn.
func (c *Conn) try(data []byte) (sent int, err error) {
	if c.raw == nil || len(data) == 0 {
		return 0, nil
	}
	failed := c.raw.Write(func(fd uintptr) bool {
		sent, err = syscall.SendmsgN(int(fd), data, nil, nil, syscall.MSG_DONTWAIT|syscall.MSG_NOSIGNAL)
		return true
	})
	if errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EINTR) {
		err = nil
	}
	return sent, errors.Join(failed, err)
}

// wait writes everything, as long as the client takes some of it now and then.
func (c *Conn) wait(data []byte) (sent int, err error) {
	if c.stall == 0 {
		return c.Conn.Write(data)
	}
	defer func() { _ = c.Conn.SetWriteDeadline(time.Time{}) }()
	for more := 1; more > 0 && sent < len(data); sent += more {
		_ = c.Conn.SetWriteDeadline(time.Now().Add(c.stall))
		more, err = c.Conn.Write(data[sent:])
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return sent + more, err
		}
	}
	return sent, err
}

func (c *Conn) sendRest() error {
	if len(c.unsent) == 0 {
		return nil
	}
	sent, err := c.wait(c.unsent)
	c.unsent = c.unsent[sent:]
	return err
}

// Read implements net.Conn. It returns io.EOF only while no request is in work.
func (c *Conn) Read(p []byte) (int, error) {
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
func (c *Conn) isReset() bool {
	if c.raw == nil {
		return false
	}
	var failure int
	err := c.raw.Control(func(fd uintptr) {
		failure, _ = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_ERROR)
	})
	return err != nil || failure != 0
}

// waits is false when the input has ended some time ago, so that the client counts as gone.
func (c *Conn) waits(ended time.Duration) bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.phase != answering {
		return c.phase == arriving && ended < arrivalGrace
	}
	if c.failed != nil {
		return false
	}
	if c.hasWritten || time.Since(c.asked) < askEvery {
		return true
	}
	c.asked = time.Now()
	_, c.failed = io.WriteString(c.Conn, interim)
	return c.failed == nil
}

// CloseWrite is what net/http calls ahead of closing, so that its last words arrive.
func (c *Conn) CloseWrite() error {
	if inner, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return inner.CloseWrite()
	}
	return nil
}
