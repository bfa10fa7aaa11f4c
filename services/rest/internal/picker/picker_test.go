package picker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"

	"weft.dev/weft/services/rest/gen/weft/extproc"
	weftv1 "weft.dev/weft/services/rest/gen/weft/v1"
	"weft.dev/weft/services/rest/internal/edge"
)

const (
	first, second, third = "10.0.0.1:8000", "10.0.0.2:8000", "[fd00::3]:8000"
	maxBody              = 4096
	limit                = 10 * time.Second
)

// gateway answers CheckAdmission as a test says.
type gateway struct {
	mutex    sync.Mutex
	answer   func(model string) error
	hangs    bool
	models   []string
	metadata metadata.MD
	deadline time.Time
}

func (g *gateway) Invoke(
	ctx context.Context, method string, request, _ any, _ ...grpc.CallOption,
) error {
	model := request.(*weftv1.CheckAdmissionRequest).GetModel()
	g.mutex.Lock()
	g.models = append(g.models, model)
	g.metadata, _ = metadata.FromOutgoingContext(ctx)
	g.deadline, _ = ctx.Deadline()
	g.mutex.Unlock()
	if method != weftv1.EdgeService_CheckAdmission_FullMethodName {
		return status.Error(codes.Unimplemented, method)
	}
	if g.hangs {
		<-ctx.Done()
		return status.FromContextError(ctx.Err()).Err()
	}
	if g.answer == nil {
		return nil
	}
	return g.answer(model)
}

func (g *gateway) NewStream(
	context.Context, *grpc.StreamDesc, string, ...grpc.CallOption,
) (grpc.ClientStream, error) {
	return nil, errors.New("not needed")
}

// pool is what names resolve to and which of that is ready.
type pool struct {
	mutex sync.Mutex
	found map[string][]string // by name
	ready map[string]bool
}

func (p *pool) lookup(_ context.Context, host string) ([]string, error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if addresses, ok := p.found[host]; ok {
		return addresses, nil
	}
	return nil, &net.DNSError{Err: "no such host", IsNotFound: true}
}

func (p *pool) probe(_ context.Context, address string) error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.ready[address] {
		return nil
	}
	return errors.New("503 Service Unavailable")
}

func (p *pool) set(address string, ready bool) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.ready[address] = ready
}

type bench struct {
	t       *testing.T
	picker  *Picker
	gateway *gateway
	pool    *pool
	client  extproc.ExternalProcessorClient
	health  healthv1.HealthClient
	end     context.CancelFunc // of readiness
}

func newBench(t *testing.T, change func(*Config)) *bench {
	t.Helper()
	b := &bench{t: t, gateway: &gateway{}, pool: &pool{
		found: map[string][]string{"edges": {"10.0.0.1", "10.0.0.2"}, "more": {"fd00::3"}},
		ready: map[string]bool{first: true, second: true, third: true},
	}}
	config := Config{
		Gateway:      b.gateway,
		Contract:     edge.NewContract(),
		Endpoints:    []string{"edges:8000", "more:8000", "nobody:8000"},
		MaxBodyBytes: maxBody,
		MaxHeldBytes: 4 * maxBody,
		Metrics:      NewMetrics(prometheus.NewRegistry()),
		Logger:       slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&config)
	}
	b.picker = New(config)
	b.picker.endpoints.lookup, b.picker.endpoints.probe = b.pool.lookup, b.pool.probe
	b.picker.endpoints.every = 5 * time.Millisecond
	listener := bufconn.Listen(1 << 20)
	go func() { _ = b.picker.Server().Serve(listener) }()
	t.Cleanup(b.picker.Server().Stop)
	connection, err := grpc.NewClient("passthrough:///picker",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return listener.DialContext(ctx)
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	b.client = extproc.NewExternalProcessorClient(connection)
	b.health = healthv1.NewHealthClient(connection)
	ctx, end := context.WithCancel(context.Background())
	b.end = end
	t.Cleanup(end)
	go b.picker.Follow(ctx)
	b.wait(func() bool { return b.status(readiness) == healthv1.HealthCheckResponse_SERVING })
	return b
}

func (b *bench) wait(condition func() bool) {
	b.t.Helper()
	for until := time.Now().Add(limit); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			b.t.Fatal("what is waited for does not come")
		}
	}
}

func (b *bench) status(service string) healthv1.HealthCheckResponse_ServingStatus {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	answer, err := b.health.Check(ctx, &healthv1.HealthCheckRequest{Service: service})
	if err != nil {
		b.t.Fatal(err)
	}
	return answer.GetStatus()
}

// talk is one stream of a proxy.
type talk struct {
	*bench
	stream extproc.ExternalProcessor_ProcessClient
	cancel context.CancelFunc
}

func (b *bench) talk() *talk {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	b.t.Cleanup(cancel)
	stream, err := b.client.Process(ctx)
	if err != nil {
		b.t.Fatal(err)
	}
	return &talk{b, stream, cancel}
}

func (c *talk) send(message *extproc.ProcessingRequest) {
	c.t.Helper()
	// io.EOF: the stream has ended, and `receive` tells why.
	if err := c.stream.Send(message); err != nil && !errors.Is(err, io.EOF) {
		c.t.Fatal(err)
	}
}

func (c *talk) receive() *extproc.ProcessingResponse {
	c.t.Helper()
	message, err := c.stream.Recv()
	if err != nil {
		c.t.Fatal(err)
	}
	return message
}

func headers(path string, more map[string]string) *extproc.ProcessingRequest {
	all := map[string]string{
		":method": "POST", ":path": path, ":authority": "weft", "content-type": "application/json",
		destination: "6.6.6.6:1",
	}
	maps.Copy(all, more)
	var list []*extproc.HeaderValue
	for key, value := range all {
		list = append(list, &extproc.HeaderValue{Key: key, RawValue: []byte(value)})
	}
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestHeaders{
		RequestHeaders: &extproc.HttpHeaders{
			Headers: &extproc.HeaderMap{Headers: list}, EndOfStream: all[":method"] == "GET",
		},
	}}
}

func in(message *extproc.ProcessingRequest, request, response extproc.BodySendMode) *extproc.ProcessingRequest {
	message.ProtocolConfig = &extproc.ProtocolConfiguration{
		RequestBodyMode: request, ResponseBodyMode: response,
	}
	return message
}

func among(message *extproc.ProcessingRequest, addresses ...any) *extproc.ProcessingRequest {
	list, err := structpb.NewList(addresses)
	if err != nil {
		panic(err)
	}
	message.MetadataContext = &extproc.Metadata{FilterMetadata: map[string]*structpb.Struct{
		subsetSpace: {Fields: map[string]*structpb.Value{subset: structpb.NewListValue(list)}},
	}}
	return message
}

func body(data string, end bool) *extproc.ProcessingRequest {
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{
		RequestBody: &extproc.HttpBody{Body: []byte(data), EndOfStream: end},
	}}
}

// picked checks that header and metadata agree, and returns the endpoints.
func picked(t *testing.T, common *extproc.CommonResponse, told *structpb.Struct) []string {
	t.Helper()
	set := common.GetHeaderMutation().GetSetHeaders()
	if len(set) != 1 || set[0].GetHeader().GetKey() != "x-gateway-destination-endpoint" ||
		set[0].GetAppendAction() != extproc.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD {
		t.Fatalf("%v", common)
	}
	value := string(set[0].GetHeader().GetRawValue())
	inner := told.AsMap()["envoy.lb"].(map[string]any)
	if inner["x-gateway-destination-endpoint"] != value || len(inner) != 1 {
		t.Fatalf("%v is not %s", told, value)
	}
	return strings.Split(value, ",")
}

func (c *talk) pickedAtHeaders() []string {
	c.t.Helper()
	answer := c.receive()
	if answer.GetRequestHeaders() == nil {
		c.t.Fatalf("%v", answer)
	}
	return picked(c.t, answer.GetRequestHeaders().GetResponse(), answer.GetDynamicMetadata())
}

// refused checks the answer that ends the stream.
func (c *talk) refused(code int) *extproc.ImmediateResponse {
	c.t.Helper()
	answer := c.receive().GetImmediateResponse()
	if answer == nil || int(answer.GetStatus().GetCode()) != code {
		c.t.Fatalf("not %d: %v", code, answer)
	}
	if _, err := c.stream.Recv(); !errors.Is(err, io.EOF) {
		c.t.Fatal(err)
	}
	return answer
}

// passed collects the pieces of the request's body that go on.
func (c *talk) passed(size int) (data []byte, end bool) {
	c.t.Helper()
	for len(data) < size || !end {
		piece := c.receive().GetRequestBody().GetResponse().GetBodyMutation().GetStreamedResponse()
		if piece == nil || len(piece.GetBody()) > maxPieceBytes {
			c.t.Fatalf("%v", piece)
		}
		data, end = append(data, piece.GetBody()...), piece.GetEndOfStream()
	}
	return data, end
}

func refusal(code codes.Code, reason string, httpStatus int, wait time.Duration) error {
	failed, err := status.New(code, "the text for clients").WithDetails(
		&errdetails.ErrorInfo{Reason: reason, Metadata: map[string]string{
			"http_status": strconv.Itoa(httpStatus),
		}},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(wait)})
	if err != nil {
		panic(err)
	}
	return failed.Err()
}

func TestAFullDuplexBodyGoesOnUnchangedOnceItsModelIsKnown(t *testing.T) {
	b := newBench(t, nil)
	random := rand.New(rand.NewPCG(rand.Uint64(), 1))
	for range 20 {
		content := strings.Repeat("ab{\\\"", random.IntN(400))
		whole := `{"messages":[{"content":"` + content + `"}],"model":"m` + strconv.Itoa(random.IntN(99)) +
			`","more":"` + strings.Repeat("x", random.IntN(8000)) + `"}`
		c := b.talk()
		c.send(headers("/v1/chat/completions", map[string]string{"authorization": "Bearer k"}))
		for rest := whole; rest != ""; {
			count := 1 + random.IntN(len(rest))
			c.send(body(rest[:count], count == len(rest)))
			rest = rest[count:]
		}
		if endpoints := c.pickedAtHeaders(); len(endpoints) != 3 {
			t.Fatal(endpoints)
		}
		if data, _ := c.passed(len(whole)); string(data) != whole {
			t.Fatal("the body has changed")
		}
		b.gateway.mutex.Lock()
		asked, with := b.gateway.models[len(b.gateway.models)-1], b.gateway.metadata
		b.gateway.mutex.Unlock()
		if asked != reference([]byte(whole)) || !slices.Equal(with["authorization"], []string{"Bearer k"}) {
			t.Fatal(asked, with)
		}
		c.cancel()
	}
	b.wait(func() bool { return b.picker.room.Take(4 * maxBody) }) // all room is given back
}

func TestTheAnswerPassesInBothForms(t *testing.T) {
	b := newBench(t, nil)
	for _, mode := range []extproc.BodySendMode{
		extproc.BodySendMode_FULL_DUPLEX_STREAMED, extproc.BodySendMode_STREAMED,
	} {
		c := b.talk()
		c.send(in(headers("/v1/models", map[string]string{":method": "GET"}), mode, mode))
		c.pickedAtHeaders()
		c.send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseHeaders{
			ResponseHeaders: &extproc.HttpHeaders{},
		}})
		if answer := c.receive(); answer.GetResponseHeaders() == nil {
			t.Fatalf("%v", answer)
		}
		text := bytes.Repeat([]byte("data: x\n\n"), 15_000)
		c.send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseBody{
			ResponseBody: &extproc.HttpBody{Body: text[:100_000]},
		}})
		var got []byte
		for mode == extproc.BodySendMode_FULL_DUPLEX_STREAMED && len(got) < 100_000 {
			piece := c.receive().GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse()
			got = append(got, piece.GetBody()...)
		}
		if mode == extproc.BodySendMode_STREAMED {
			if answer := c.receive(); answer.GetResponseBody() == nil ||
				answer.GetResponseBody().GetResponse().GetBodyMutation() != nil {
				t.Fatalf("%v", answer)
			}
		} else if !bytes.Equal(got, text[:100_000]) {
			t.Fatal("the answer has changed")
		}
		c.send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseTrailers{
			ResponseTrailers: &extproc.HttpTrailers{},
		}})
		if answer := c.receive(); answer.GetResponseTrailers() == nil {
			t.Fatalf("%v", answer)
		}
	}
	if len(b.gateway.models) != 0 {
		t.Fatal("what no worker answers is not asked about")
	}
}

func TestABufferedBodyDecidesWithItsOwnAnswer(t *testing.T) {
	b := newBench(t, nil)
	buffered := extproc.BodySendMode_BUFFERED
	c := b.talk()
	c.send(in(headers("/v1/completions", nil), buffered, extproc.BodySendMode_NONE))
	if answer := c.receive(); answer.GetRequestHeaders() == nil || answer.GetDynamicMetadata() != nil ||
		answer.GetRequestHeaders().GetResponse().GetHeaderMutation() != nil {
		t.Fatalf("%v", answer)
	}
	c.send(body(`{"model":"m","prompt":"x"}`, true))
	answer := c.receive()
	picked(t, answer.GetRequestBody().GetResponse(), answer.GetDynamicMetadata())
	if answer.GetRequestBody().GetResponse().GetBodyMutation() != nil ||
		!slices.Equal(b.gateway.models, []string{"m"}) {
		t.Fatal(answer, b.gateway.models)
	}
	// A body that is too large, and one whose request ends with trailers alone.
	c = b.talk()
	c.send(in(headers("/v1/completions", nil), buffered, extproc.BodySendMode_NONE))
	c.receive()
	c.send(body(strings.Repeat("x", maxBody+1), true))
	c.refused(413)
	c = b.talk()
	c.send(in(headers("/v1/completions", nil), buffered, extproc.BodySendMode_NONE))
	c.receive()
	c.send(trailers())
	if answer := c.receive(); answer.GetRequestTrailers() == nil || answer.GetDynamicMetadata() == nil {
		t.Fatalf("%v", answer)
	}
}

func trailers() *extproc.ProcessingRequest {
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestTrailers{
		RequestTrailers: &extproc.HttpTrailers{},
	}}
}

func TestOtherModesDecideByTheHeaders(t *testing.T) {
	b := newBench(t, nil)
	for _, mode := range []extproc.BodySendMode{
		extproc.BodySendMode_NONE, extproc.BodySendMode_STREAMED, extproc.BodySendMode_GRPC,
	} {
		c := b.talk()
		c.send(in(headers("/v1/completions", nil), mode, extproc.BodySendMode_NONE))
		c.pickedAtHeaders()
		if mode == extproc.BodySendMode_STREAMED {
			c.send(body(`{"model":"m"}`, true))
			if answer := c.receive(); answer.GetRequestBody() == nil ||
				answer.GetRequestBody().GetResponse().GetHeaderMutation() != nil {
				t.Fatalf("%v", answer)
			}
		}
	}
	// The body is no JSON, so that its model is not looked for.
	c := b.talk()
	c.send(headers("/v1/audio/transcriptions", map[string]string{"content-type": "multipart/form-data"}))
	c.pickedAtHeaders()
	if !slices.Equal(b.gateway.models, []string{"", "", "", ""}) {
		t.Fatalf("%q", b.gateway.models)
	}
}

func TestTrailersEndABody(t *testing.T) {
	b := newBench(t, nil)
	c := b.talk()
	c.send(headers("/v1/completions", nil))
	c.send(body(`{"prompt":`, false))
	c.send(body(`"x"`, false))
	c.send(trailers())
	c.pickedAtHeaders()
	for _, want := range []string{`{"prompt":`, `"x"`} {
		piece := c.receive().GetRequestBody().GetResponse().GetBodyMutation().GetStreamedResponse()
		if string(piece.GetBody()) != want || piece.GetEndOfStream() {
			t.Fatalf("%v", piece)
		}
	}
	if answer := c.receive(); answer.GetRequestTrailers() == nil {
		t.Fatalf("%v", answer)
	}
}

func TestRefusalsAreThoseForLoadInTheShapeOfTheAPI(t *testing.T) {
	b := newBench(t, nil)
	answers := map[string]error{
		"shed": refusal(codes.ResourceExhausted, "OVERLOADED", 429, 3200*time.Millisecond),
		"none": refusal(codes.Unavailable, "PEER_UNAVAILABLE", 503, 5*time.Second),
		"late": refusal(codes.DeadlineExceeded, "DEADLINE_EXCEEDED", 504, 0),
		"gone": status.Error(codes.Unavailable, "connection refused: 10.9.9.9"),
	}
	b.gateway.answer = func(model string) error { return answers[model] }
	for model, want := range map[string]struct {
		code  int
		retry string
		text  string
	}{
		"shed": {429, "4", "the text for clients"}, "none": {503, "5", "the text for clients"},
		"late": {504, "", "the text for clients"}, "gone": {503, "1", "not reachable"},
	} {
		for path, kind := range map[string]string{"/v1/chat/completions": "openai", "/v1/messages/": "anthropic"} {
			c := b.talk()
			c.send(headers(path, map[string]string{"x-request-id": "mine"}))
			c.send(body(`{"model":"`+model+`","messages":[]}`, true))
			answer := c.refused(want.code)
			told := map[string]string{}
			for _, one := range answer.GetHeaders().GetSetHeaders() {
				told[one.GetHeader().GetKey()] = string(one.GetHeader().GetRawValue())
			}
			var shape map[string]any
			if err := json.Unmarshal(answer.GetBody(), &shape); err != nil {
				t.Fatal(err)
			}
			isAnthropic := shape["type"] == "error" && shape["request_id"] == "mine"
			if told["retry-after"] != want.retry || told["content-type"] != "application/json" ||
				isAnthropic != (kind == "anthropic") || !strings.Contains(string(answer.GetBody()), want.text) ||
				strings.Contains(string(answer.GetBody()), "10.9.9.9") {
				t.Fatalf("%s %s: %v %s", model, path, told, answer.GetBody())
			}
		}
	}
	// All else is the endpoint's to say: unknown models, keys, fields, older gateways.
	for _, code := range []codes.Code{
		codes.NotFound, codes.Unauthenticated, codes.InvalidArgument, codes.PermissionDenied,
		codes.Unimplemented, codes.Internal,
	} {
		answers["other"] = status.Error(code, "no")
		c := b.talk()
		c.send(headers("/v1/chat/completions", nil))
		c.send(body(`{"model":"other"}`, true))
		c.pickedAtHeaders()
	}
}

func TestTheDeadlineOfTheRequestCounts(t *testing.T) {
	b := newBench(t, nil)
	b.gateway.hangs = true
	c := b.talk()
	c.send(headers("/v1/completions", map[string]string{"grpc-timeout": "20m"}))
	c.send(body(`{"model":"m"}`, true))
	c.refused(504)
	// Without one the picker's own bound is the deadline.
	c = b.talk()
	begin := time.Now()
	c.send(headers("/v1/completions", nil))
	c.send(body(`{"model":"m"}`, true))
	b.wait(func() bool {
		b.gateway.mutex.Lock()
		defer b.gateway.mutex.Unlock()
		return len(b.gateway.models) == 2
	})
	if left := b.gateway.deadline.Sub(begin); left > 2*admissionTimeout {
		t.Fatal(left)
	}
	c.cancel()
}

func TestBodiesAreBounded(t *testing.T) {
	b := newBench(t, func(config *Config) { config.MaxHeldBytes = maxBody + 1000 })
	piece := `{"messages":"` + strings.Repeat("x", 1000)
	c := b.talk()
	c.send(headers("/v1/chat/completions", nil))
	c.send(body(piece, false))
	for range 6 {
		c.send(body(strings.Repeat("x", 1000), false))
	}
	c.refused(413)
	// Streams that hold all room; others are refused, and served once that is given back.
	var holding []*talk
	for range 3 {
		one := b.talk()
		one.send(headers("/v1/chat/completions", nil))
		one.send(body(piece+strings.Repeat("x", 400), false))
		holding = append(holding, one)
	}
	b.wait(func() bool { return !b.picker.room.Take(maxBody-3000) || give(b) })
	c = b.talk()
	c.send(headers("/v1/chat/completions", nil))
	c.send(body(piece, false))
	c.refused(503)
	for _, one := range holding {
		one.cancel()
	}
	b.wait(func() bool { return b.picker.room.Take(maxBody + 1000) })
}

// give gives back what a look at the room has taken.
func give(b *bench) bool {
	b.picker.room.Give(maxBody - 3000)
	return false
}

func TestABodyThatDoesNotComeIsGivenUp(t *testing.T) {
	b := newBench(t, func(config *Config) { config.bodyTimeout = 50 * time.Millisecond })
	c := b.talk()
	c.send(headers("/v1/chat/completions", nil))
	c.send(body(`{"messages":`, false))
	c.refused(408)
	// One that has begun to go on is not.
	c = b.talk()
	c.send(headers("/v1/chat/completions", nil))
	c.send(body(`{"model":"m",`, false))
	c.pickedAtHeaders()
	c.receive()
	time.Sleep(100 * time.Millisecond)
	c.send(body(`"messages":[]}`, true))
	if data, _ := c.passed(len(`"messages":[]}`)); string(data) != `"messages":[]}` {
		t.Fatalf("%s", data)
	}
}

func TestStreamsThatMakeNoSenseEnd(t *testing.T) {
	b := newBench(t, nil)
	for _, messages := range [][]*extproc.ProcessingRequest{
		{body("{}", true)},
		{trailers()},
		{{}},
		{headers("/v1/models", nil), headers("/v1/models", nil)},
	} {
		c := b.talk()
		for _, one := range messages {
			c.send(one)
		}
		var err error
		for err == nil {
			_, err = c.stream.Recv()
		}
		if status.Code(err) != codes.InvalidArgument {
			t.Fatal(err)
		}
	}
	// Headers without a method or a path, and values that are no text.
	c := b.talk()
	c.send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestHeaders{
		RequestHeaders: &extproc.HttpHeaders{Headers: &extproc.HeaderMap{Headers: []*extproc.HeaderValue{
			{Key: "x\n", RawValue: []byte("\xff\r\n")}, {}, {Key: "x-request-id", Value: "a b"},
		}}},
	}})
	c.pickedAtHeaders()
}

func TestWhatIsOnlyObservedIsNotAnswered(t *testing.T) {
	b := newBench(t, nil)
	c := b.talk()
	observed := headers("/v1/completions", nil)
	observed.ObservabilityMode = true
	c.send(observed)
	if err := c.stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.stream.Recv(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
}

func TestTheEndpointWithTheFewestRequestsIsPicked(t *testing.T) {
	b := newBench(t, nil)
	get := map[string]string{":method": "GET"}
	counts := map[string]int{}
	var open []*talk
	for range 9 {
		c := b.talk()
		c.send(headers("/v1/models", get))
		counts[c.pickedAtHeaders()[0]]++
		open = append(open, c)
	}
	if !maps.Equal(counts, map[string]int{first: 3, second: 3, third: 3}) {
		t.Fatal(counts)
	}
	// Those of one endpoint end; it then gets as many.
	freed := 0
	for i, c := range open {
		if i%3 == 0 {
			c.cancel()
			freed++
		}
	}
	b.wait(func() bool {
		b.picker.endpoints.mutex.Lock()
		defer b.picker.endpoints.mutex.Unlock()
		total := 0
		for _, one := range b.picker.endpoints.all {
			total += one.open
		}
		return total == len(open)-freed
	})
	again := map[string]int{}
	for range freed {
		c := b.talk()
		c.send(headers("/v1/models", get))
		again[c.pickedAtHeaders()[0]]++
	}
	if len(again) != 1 {
		t.Fatal(again)
	}
}

func TestOnlyReadyEndpointsOfTheSubsetArePicked(t *testing.T) {
	b := newBench(t, nil)
	get := map[string]string{":method": "GET"}
	ask := func(message *extproc.ProcessingRequest) *talk {
		c := b.talk()
		c.send(message)
		return c
	}
	for _, one := range []struct {
		subset []any
		want   []string
	}{
		{[]any{second}, []string{second}},
		{[]any{second, third, "10.9.9.9:1"}, []string{second, third}},
		{[]any{second + ", " + third}, []string{second, third}},
		{[]any{"10.0.0.2"}, []string{second}},
		{[]any{"[FD00:0::3]:8000"}, []string{third}},
	} {
		got := ask(among(headers("/v1/models", get), one.subset...)).pickedAtHeaders()
		slices.Sort(got)
		if !slices.Equal(got, one.want) {
			t.Fatal(one, got)
		}
	}
	for _, none := range [][]any{{}, {"10.9.9.9:8000"}, {"10.0.0.1:8001"}, {5.0, nil}, {"evil\r\n"}} {
		ask(among(headers("/v1/models", get), none...)).refused(503)
	}
	text := headers("/v1/models", get)
	text.MetadataContext = &extproc.Metadata{FilterMetadata: map[string]*structpb.Struct{
		subsetSpace: {Fields: map[string]*structpb.Value{subset: structpb.NewStringValue(first)}},
	}}
	if got := ask(text).pickedAtHeaders(); !slices.Equal(got, []string{first}) {
		t.Fatal(got)
	}
	b.pool.set(first, false)
	b.wait(func() bool { return b.picker.endpoints.numReady() == 2 })
	ask(among(headers("/v1/models", get), first)).refused(503)
	if got := ask(headers("/v1/models", get)).pickedAtHeaders(); slices.Contains(got, first) {
		t.Fatal(got)
	}
	b.pool.set(second, false)
	b.pool.set(third, false)
	b.wait(func() bool { return b.picker.endpoints.numReady() == 0 })
	ask(headers("/v1/models", get)).refused(503)
	b.pool.set(third, true)
	b.wait(func() bool { return b.picker.endpoints.numReady() == 1 })
	if got := ask(headers("/v1/models", get)).pickedAtHeaders(); !slices.Equal(got, []string{third}) {
		t.Fatal(got)
	}
}

func TestEndpointsFollowTheirNames(t *testing.T) {
	b := newBench(t, nil)
	look := func(found map[string][]string) int {
		b.pool.mutex.Lock()
		b.pool.found = found
		b.pool.mutex.Unlock()
		b.picker.endpoints.resolve(context.Background(), nil)
		b.picker.endpoints.mutex.Lock()
		defer b.picker.endpoints.mutex.Unlock()
		return len(b.picker.endpoints.all)
	}
	if count := look(map[string][]string{"edges": {"10.0.0.2", "10.0.0.4"}}); count != 2 {
		t.Fatal(count)
	}
	b.picker.endpoints.lookup = func(context.Context, string) ([]string, error) {
		return nil, &net.DNSError{Err: "timeout", IsTimeout: true}
	}
	if count := look(nil); count != 2 {
		t.Fatal("endpoints that were found stay while DNS is silent", count)
	}
}

func TestHealthTellsLifeAndReadiness(t *testing.T) {
	b := newBench(t, nil)
	serving, not := healthv1.HealthCheckResponse_SERVING, healthv1.HealthCheckResponse_NOT_SERVING
	ready := []string{"", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"}
	for _, service := range append(ready, "liveness") {
		if b.status(service) != serving {
			t.Fatal(service)
		}
	}
	b.end()
	b.wait(func() bool { return b.status("readiness") == not })
	for _, service := range ready {
		b.wait(func() bool { return b.status(service) == not })
	}
	if b.status("liveness") != serving {
		t.Fatal("a picker that leaves lives")
	}
}
