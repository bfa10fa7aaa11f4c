// Package relay takes the events of many answers from one stream of each gateway, which costs both
// sides less than a stream for each. An answer whose gateway has no relay of this edge comes on its
// own stream, and has the edge open one.
package relay

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	weftv1 "weft.dev/weft/services/rest/gen/weft/v1"
	"weft.dev/weft/services/rest/internal/forward"
)

const (
	// Key of the metadata with which a request names its stream, and an answer its relay.
	Key = "weft-relay"
	// A relay of this age is followed by another; a gateway takes no answers on one that is older
	// than 45 s.
	renewAfter = 20 * time.Second
	// After a failure no relay is opened for this long.
	retryAfter = 5 * time.Second
	// The gateway is told what a client has taken once it is so much, half of what it lets be unread;
	// the same message tells it of the others that have taken half of that.
	tellAfter = 32 << 10
	// Calls go to gateways in turn, until one reaches the gateway that is meant.
	maxTries = 16
	// Fewer pieces of a message are not worth another goroutine.
	leastAlone = 32
)

// Relays are those of one edge.
type Relays struct {
	client weftv1.EdgeServiceClient
	edge   string

	mutex   sync.Mutex
	number  uint64 // the last one given to a relay or a stream
	relays  map[uint64]*relay
	newest  map[string]*relay    // by address
	opening map[string]time.Time // by address: no other one is opened before
	streams map[uint64]*Stream
}

// New prepares relays over a connection to gateways.
func New(connection grpc.ClientConnInterface) *Relays {
	var random [16]byte
	_, _ = rand.Read(random[:]) // never fails: crypto/rand ends the program instead
	return &Relays{
		client:  weftv1.NewEdgeServiceClient(connection),
		edge:    hex.EncodeToString(random[:]),
		relays:  map[uint64]*relay{},
		newest:  map[string]*relay{},
		opening: map[string]time.Time{},
		streams: map[uint64]*Stream{},
	}
}

// relay is one stream from a gateway.
type relay struct {
	number  uint64
	address string // of the gateway; empty while it is not known
	call    weftv1.EdgeService_RelayClient
	broken  chan struct{} // closed when nothing more comes

	mutex sync.Mutex
	taken map[uint64]uint64 // bytes by stream of which the gateway was not told
}

// tell notes that a client has taken bytes of a stream, and tells the gateway of all when that is
// due. A failure shows where the relay is read.
func (r *relay) tell(stream uint64, count int) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.taken[stream] += uint64(count)
	if r.taken[stream] < tellAfter {
		return
	}
	told := &weftv1.RelayRequest{}
	for stream, count := range r.taken {
		told.Streams = append(told.Streams, stream)
		told.Bytes = append(told.Bytes, count)
	}
	clear(r.taken)
	_ = r.call.Send(told)
}

// forget drops what a stream that has ended has taken.
func (r *relay) forget(stream uint64) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	delete(r.taken, stream)
}

// want has a relay to the gateway at an address opened if there is no new one.
func (r *Relays) want(address string) {
	now := time.Now()
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if now.Before(r.opening[address]) {
		return
	}
	r.opening[address] = now.Add(renewAfter)
	go func() {
		if r.open(address) != nil {
			r.mutex.Lock()
			defer r.mutex.Unlock()
			r.opening[address] = time.Now().Add(retryAfter)
		}
	}()
}

// open opens relays to gateways in turn until there is one to the gateway at an address. The others
// are kept as well, since answers may have begun on them.
func (r *Relays) open(address string) error {
	for range maxTries {
		opened, err := r.dial()
		if err != nil {
			return err
		}
		if opened.address == address {
			return nil
		}
	}
	return fmt.Errorf("no call reached the gateway at %s", address)
}

// dial opens a relay to any gateway.
func (r *Relays) dial() (*relay, error) {
	ctx, cancel := context.WithCancel(context.Background())
	call, err := r.client.Relay(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	r.mutex.Lock()
	r.number++
	opened := &relay{
		number: r.number, call: call, broken: make(chan struct{}), taken: map[uint64]uint64{},
	}
	// An answer may use it before its first message is read here.
	r.relays[opened.number] = opened
	r.mutex.Unlock()
	err = call.Send(&weftv1.RelayRequest{Edge: r.edge, Relay: opened.number})
	if err == nil {
		_, err = call.Recv()
	}
	if err != nil {
		r.remove(opened)
		cancel()
		return nil, err
	}
	if gateway, ok := peer.FromContext(call.Context()); ok && gateway.Addr != nil {
		opened.address = gateway.Addr.String()
	}
	r.mutex.Lock()
	r.newest[opened.address] = opened
	r.opening[opened.address] = time.Now().Add(renewAfter)
	r.mutex.Unlock()
	go func() {
		defer cancel()
		r.read(opened)
	}()
	return opened, nil
}

func (r *Relays) remove(gone *relay) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	delete(r.relays, gone.number)
	if r.newest[gone.address] == gone {
		delete(r.newest, gone.address)
		delete(r.opening, gone.address)
	}
	close(gone.broken)
}

// read hands out what a relay brings until it ends.
func (r *Relays) read(from *relay) {
	defer r.remove(from)
	var streams []*Stream
	for {
		message, err := from.call.Recv()
		if err != nil {
			return
		}
		numbers, data := message.GetStreams(), message.GetData()
		numbers = numbers[:min(len(numbers), len(data))]
		streams = streams[:0]
		r.mutex.Lock()
		for _, number := range numbers {
			streams = append(streams, r.streams[number])
		}
		r.mutex.Unlock()
		deliver(numbers, streams, data)
		clear(streams) // which may have ended
	}
}

// deliver hands out a message. A large one is shared among cores by the numbers of streams, so that
// the pieces of one stream stay in order. nil stands for a stream that has ended.
func deliver(numbers []uint64, streams []*Stream, data [][]byte) {
	parts := max(1, min(runtime.GOMAXPROCS(0), len(numbers)/leastAlone))
	push := func(part int) {
		for i, stream := range streams {
			if stream != nil && numbers[i]%uint64(parts) == uint64(part) {
				stream.push(data[i])
			}
		}
	}
	var others sync.WaitGroup
	for part := 1; part < parts; part++ {
		others.Go(func() { push(part) })
	}
	push(0)
	others.Wait()
}

// Stream is the place of one answer's events. Its methods but push belong to the answer's handler.
type Stream struct {
	relays *Relays
	number uint64
	relay  *relay // nil: the answer comes on its own stream

	mutex   sync.Mutex
	taken   int // bytes of which the relay was not told
	handed  int // bytes that the handler was given last
	pending [][]byte
	isEnded bool
	try     func([]byte) bool // sends a piece at once; nil: the handler takes all pieces
	ready   chan struct{}
}

// With gives a request a place for events; end takes it back.
func (r *Relays) With(ctx context.Context) (with context.Context, end func()) {
	stream := &Stream{relays: r, ready: make(chan struct{}, 1)}
	return forward.WithPlace(ctx, stream), stream.end
}

// From is the place of a request; nil: it has none.
func From(ctx context.Context) *Stream {
	stream, _ := forward.PlaceOf(ctx).(*Stream)
	return stream
}

// Name puts the stream into the metadata of its call.
func (s *Stream) Name(ctx context.Context) context.Context {
	r := s.relays
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if s.number == 0 {
		r.number++
		s.number = r.number
		r.streams[s.number] = s
	}
	return metadata.AppendToOutgoingContext(ctx, Key, r.edge+"/"+strconv.FormatUint(s.number, 10))
}

func (s *Stream) end() {
	if s.relay != nil {
		s.relay.forget(s.number)
	}
	s.relays.mutex.Lock()
	defer s.relays.mutex.Unlock()
	delete(s.relays.streams, s.number)
}

// Answered takes the header of the answer, and the call's context, which knows the gateway.
func (s *Stream) Answered(ctx context.Context, header metadata.MD) {
	if gateway, ok := peer.FromContext(ctx); ok && gateway.Addr != nil {
		s.relays.want(gateway.Addr.String())
	}
	number, err := strconv.ParseUint(strings.Join(header.Get(Key), ""), 10, 64)
	if err != nil {
		return
	}
	s.relays.mutex.Lock()
	defer s.relays.mutex.Unlock()
	s.relay = s.relays.relays[number]
	if s.relay == nil { // it has broken: the call fails
		s.relay = &relay{broken: make(chan struct{})}
		close(s.relay.broken)
	}
}

// IsRelayed says whether the answer's events come on a relay.
func (s *Stream) IsRelayed() bool {
	return s.relay != nil
}

func (s *Stream) push(data []byte) {
	s.mutex.Lock()
	switch {
	case len(data) == 0:
		s.isEnded = true
	case s.try != nil && len(s.pending) == 0 && s.try(data):
		s.take(len(data))
		s.mutex.Unlock()
		return
	default:
		s.pending = append(s.pending, data)
	}
	s.mutex.Unlock()
	select {
	case s.ready <- struct{}{}:
	default:
	}
}

// take notes what the client was sent; it needs the mutex. Telling may wait until the gateway reads,
// also in the goroutine that reads the relay: the gateway writes to it in a task of its own.
func (s *Stream) take(count int) {
	if s.taken += count; s.taken >= tellAfter/2 {
		s.relay.tell(s.number, s.taken)
		s.taken = 0
	}
}

// Next waits for events and takes all that have come; nil: what follows is on the call's own stream,
// or the request is done. While it waits, events are sent by `try` if it can.
func (s *Stream) Next(done <-chan struct{}, try func([]byte) bool) []byte {
	for isBroken := false; ; {
		data, isEnded := s.pop(try)
		if data != nil || isEnded || isBroken {
			return data
		}
		select {
		case <-s.ready:
		case <-s.relay.broken:
			isBroken, try = true, nil // what came before is taken first
		case <-done:
			_, _ = s.pop(nil)
			return nil
		}
	}
}

// pop takes what has come, or has the next events sent by `try` if there is nothing and more may come.
func (s *Stream) pop(try func([]byte) bool) (data []byte, isEnded bool) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.take(s.handed)
	pending := s.pending
	s.handed, s.pending, s.try = 0, nil, nil
	switch len(pending) {
	case 0:
		if !s.isEnded {
			s.try = try
		}
		return nil, s.isEnded
	case 1:
		data = pending[0]
	default:
		data = concat(pending)
	}
	s.handed = len(data)
	return data, s.isEnded
}

func concat(parts [][]byte) []byte {
	size := 0
	for _, part := range parts {
		size += len(part)
	}
	whole := make([]byte, 0, size)
	for _, part := range parts {
		whole = append(whole, part...)
	}
	return whole
}
