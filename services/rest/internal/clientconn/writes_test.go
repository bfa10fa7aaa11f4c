package clientconn_test

import (
	"bytes"
	"crypto/rand"
	"io"
	"net"
	"testing"
	"time"

	"weft.dev/weft/services/rest/internal/clientconn"
)

const stall = 100 * time.Millisecond

// pair is a connection of the package and its client.
func pair(t *testing.T, writeStall time.Duration) (*clientconn.Conn, *net.TCPConn) {
	t.Helper()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = inner.Close() }()
	client := dial(t, inner.Addr().String(), "")
	accepted, err := clientconn.Listener{Listener: inner, WriteStall: writeStall}.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = accepted.Close() })
	conn, ok := accepted.(*clientconn.Conn)
	if !ok {
		t.Fatalf("accepted %T", accepted)
	}
	return conn, client
}

func random(size int) []byte {
	data := make([]byte, size)
	_, _ = rand.Read(data)
	return data
}

// try sends data by TryWrite, once what was sent before is gone.
func try(t *testing.T, conn *clientconn.Conn, data []byte) {
	t.Helper()
	for until := time.Now().Add(longest); !conn.TryWrite(data); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("nothing is unsent, and it does not send")
		}
	}
}

func TestTryWriteWaitsForNoClient(t *testing.T) {
	conn, client := pair(t, longest)
	pieces := [][]byte{random(20), random(32 << 20), random(1 << 20), random(20)}
	try(t, conn, pieces[0])
	try(t, conn, pieces[1]) // the client reads nothing
	if conn.TryWrite(pieces[2]) {
		t.Fatal("the client has not taken everything")
	}
	written := make(chan error, 1)
	go func() {
		_, err := conn.Write(pieces[2])
		written <- err
	}()
	wanted := bytes.Join(pieces[:3], nil)
	got := make([]byte, len(wanted))
	if _, err := io.ReadFull(client, got); err != nil || !bytes.Equal(got, wanted) {
		t.Fatalf("what came is not what was sent, %v", err)
	}
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	try(t, conn, pieces[3])
	last := make([]byte, len(pieces[3]))
	if _, err := io.ReadFull(client, last); err != nil || !bytes.Equal(last, pieces[3]) {
		t.Fatalf("got %v, %v", last, err)
	}
}

func TestAClientThatTakesNothingLosesItsConnection(t *testing.T) {
	for name, write := range map[string]func(*clientconn.Conn, []byte) error{
		"at once": func(conn *clientconn.Conn, data []byte) error {
			_, err := conn.Write(data)
			return err
		},
		"behind": func(conn *clientconn.Conn, data []byte) error {
			try(t, conn, data)
			_, err := conn.Write(data[:1])
			return err
		},
	} {
		conn, _ := pair(t, stall)
		if err := write(conn, random(32<<20)); err == nil {
			t.Errorf("%s: no write failed", name)
		}
	}
}

func TestAPauseBeyondTheStallIsFine(t *testing.T) {
	const stall = time.Second
	conn, client := pair(t, stall)
	sent := random(33 << 20)
	received := make(chan []byte, 1)
	go func() {
		time.Sleep(stall / 10) // the first write waits
		all, _ := io.ReadAll(client)
		received <- all
	}()
	for _, part := range [][]byte{sent[:32<<20], sent[32<<20:]} {
		if _, err := conn.Write(part); err != nil {
			t.Fatal(err)
		}
		time.Sleep(stall + stall/10)
	}
	_ = conn.Close()
	if !bytes.Equal(<-received, sent) {
		t.Error("what came is not what was sent")
	}
}
