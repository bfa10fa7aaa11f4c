package backend

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/api/httpbody"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	weftv1 "weft.dev/weft/services/rest/gen/weft/v1"
)

const (
	service = "weft.v1.OpenAIService"
	longest = 60 * time.Second

	// Calls with these texts pause for longer than they would wait for a gateway.
	slow    = "slow"    // before their header
	halting = "halting" // behind it
)

// fakeGateway answers with its name, or fails as it is told.
type fakeGateway struct {
	weftv1.UnimplementedOpenAIServiceServer
	name    string
	address string
	server  *grpc.Server
	health  *health.Server
	calls   atomic.Int64
	fail    func() error // nil: it does not
}

func (g *fakeGateway) ChatCompletions(
	request *httpbody.HttpBody, stream grpc.ServerStreamingServer[httpbody.HttpBody],
) error {
	g.calls.Add(1)
	if g.fail != nil {
		return g.fail()
	}
	text := string(request.GetData())
	if text == slow {
		time.Sleep(patience + time.Second)
	}
	if err := stream.SendHeader(metadata.Pairs("x-weft-request-id", g.name)); err != nil {
		return err
	}
	if text == halting {
		time.Sleep(patience + time.Second)
	}
	return stream.Send(&httpbody.HttpBody{Data: []byte(g.name + " " + text)})
}

func (g *fakeGateway) Models(context.Context, *emptypb.Empty) (*httpbody.HttpBody, error) {
	g.calls.Add(1)
	if g.fail != nil {
		return nil, g.fail()
	}
	return &httpbody.HttpBody{Data: []byte(g.name)}, nil
}

func (g *fakeGateway) CancelRequestById(
	_ context.Context, request *weftv1.CancelRequestByIdRequest,
) (*httpbody.HttpBody, error) {
	g.calls.Add(1)
	if request.GetRequestId() == g.name {
		return &httpbody.HttpBody{Data: []byte(g.name)}, nil
	}
	missing, err := status.New(codes.NotFound, "not here").
		WithDetails(&errdetails.ErrorInfo{Reason: notFound})
	if err != nil {
		return nil, err
	}
	return nil, missing.Err()
}

func startGateway(t *testing.T, name, address string) *fakeGateway {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	g := &fakeGateway{
		name: name, address: listener.Addr().String(), server: grpc.NewServer(), health: health.NewServer(),
	}
	weftv1.RegisterOpenAIServiceServer(g.server, g)
	grpc_health_v1.RegisterHealthServer(g.server, g.health)
	g.health.SetServingStatus(service, grpc_health_v1.HealthCheckResponse_SERVING)
	go func() { _ = g.server.Serve(listener) }()
	t.Cleanup(g.server.Stop)
	return g
}

// unused is an address where nobody listens.
func unused(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	return listener.Addr().String()
}

// refuse fails every call with a reason that the gateway gives.
func (g *fakeGateway) refuse(t *testing.T, reason string) {
	t.Helper()
	refused, err := status.New(codes.Unavailable, "refused by "+g.name).
		WithDetails(&errdetails.ErrorInfo{Reason: reason})
	if err != nil {
		t.Fatal(err)
	}
	g.fail = refused.Err
}

func connect(t *testing.T, addresses ...string) weftv1.OpenAIServiceClient {
	t.Helper()
	connection, err := Dial(strings.Join(addresses, ","), insecure.NewCredentials())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return weftv1.NewOpenAIServiceClient(connection)
}

// chat gives the answer and the header that came with it.
func chat(client weftv1.OpenAIServiceClient, text string) (string, metadata.MD, error) {
	ctx, cancel := context.WithTimeout(context.Background(), longest)
	defer cancel()
	call, err := client.ChatCompletions(ctx, &httpbody.HttpBody{Data: []byte(text)})
	if err != nil {
		return "", nil, err
	}
	header, err := call.Header()
	if err != nil {
		return "", nil, err
	}
	body, err := call.Recv()
	if err != nil {
		return "", header, err
	}
	if _, err := call.Recv(); !errors.Is(err, io.EOF) {
		return "", header, errors.New("more than one message")
	}
	return string(body.GetData()), header, nil
}

func chatLater(t *testing.T, client weftv1.OpenAIServiceClient, text string) <-chan string {
	t.Helper()
	answers := make(chan string, 1)
	go func() {
		answer, _, err := chat(client, text)
		if err != nil {
			t.Error(err)
		}
		answers <- answer
	}()
	return answers
}

func mustChat(t *testing.T, client weftv1.OpenAIServiceClient) string {
	t.Helper()
	answer, header, err := chat(client, "hello")
	if err != nil {
		t.Fatal(err)
	}
	name, text, _ := strings.Cut(answer, " ")
	if ids := header.Get("x-weft-request-id"); text != "hello" || len(ids) != 1 || ids[0] != name {
		t.Fatalf("%q %v", answer, header)
	}
	return name
}

// until repeats a step until it says so.
func until(t *testing.T, what string, step func() bool) {
	t.Helper()
	for deadline := time.Now().Add(longest); !step(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(what)
		}
	}
}

func seesBoth(t *testing.T, client weftv1.OpenAIServiceClient) {
	t.Helper()
	seen := map[string]bool{}
	until(t, "one gateway gets no calls", func() bool {
		seen[mustChat(t, client)] = true
		return len(seen) == 2
	})
}

func TestAGatewayThatDrainsGetsNoCalls(t *testing.T) {
	a, b := startGateway(t, "a", "127.0.0.1:0"), startGateway(t, "b", "127.0.0.1:0")
	client := connect(t, a.address, b.address)
	seesBoth(t, client)
	a.health.SetServingStatus(service, grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	inARow := 0
	until(t, "calls go to a gateway that drains", func() bool {
		inARow++
		if mustChat(t, client) == "a" {
			inARow = 0
		}
		return inARow == 50
	})
	a.health.SetServingStatus(service, grpc_health_v1.HealthCheckResponse_SERVING)
	seesBoth(t, client)
}

func TestARefusalByAGatewayThatDrainsIsAskedElsewhere(t *testing.T) {
	a, b := startGateway(t, "a", "127.0.0.1:0"), startGateway(t, "b", "127.0.0.1:0")
	client := connect(t, a.address, b.address)
	seesBoth(t, client)
	a.refuse(t, "DRAINING") // before anybody hears of it
	before := a.calls.Load()
	until(t, "the gateway that drains was not asked", func() bool {
		if name := mustChat(t, client); name != "b" {
			t.Fatalf("answered by %q", name)
		}
		models, err := client.Models(context.Background(), &emptypb.Empty{})
		if err != nil || string(models.GetData()) != "b" {
			t.Fatalf("%v %v", models, err)
		}
		return a.calls.Load() > before+10
	})

	b.refuse(t, "DRAINING")
	_, _, err := chat(client, "hello")
	if !isDraining(err) {
		t.Fatalf("got %v", err)
	}
}

func TestACancellationFindsTheGatewayOfItsRequest(t *testing.T) {
	a, b := startGateway(t, "a", "127.0.0.1:0"), startGateway(t, "b", "127.0.0.1:0")
	client := connect(t, a.address, b.address)
	seesBoth(t, client)
	for range 5 {
		for _, id := range []string{"a", "b"} {
			request := &weftv1.CancelRequestByIdRequest{RequestId: id}
			if answer, err := client.CancelRequestById(context.Background(), request); err != nil ||
				string(answer.GetData()) != id {
				t.Fatalf("%s: %v %v", id, answer, err)
			}
		}
	}
	before := a.calls.Load() + b.calls.Load()
	request := &weftv1.CancelRequestByIdRequest{RequestId: "nobody's"}
	if _, err := client.CancelRequestById(context.Background(), request); status.Code(err) != codes.NotFound {
		t.Fatalf("got %v", err)
	}
	if asked := a.calls.Load() + b.calls.Load() - before; asked > 2*(visits+1) {
		t.Fatalf("asked %d times", asked)
	}
}

func TestOtherFailuresAreNotRepeated(t *testing.T) {
	taken := startGateway(t, "a", "127.0.0.1:0")
	client := connect(t, taken.address)
	mustChat(t, client)
	calls := taken.calls.Load()
	taken.refuse(t, "NO_WORKER")
	if _, _, err := chat(client, "hello"); status.Code(err) != codes.Unavailable {
		t.Fatalf("got %v", err)
	}
	if got := taken.calls.Load(); got != calls+1 {
		t.Fatalf("asked %d times", got-calls)
	}
	// A gateway that dies had taken the call, whether or not an answer had begun.
	release := make(chan struct{})
	taken.fail = func() error {
		go func() { taken.server.Stop(); close(release) }()
		<-release
		return nil
	}
	other := startGateway(t, "b", "127.0.0.1:0")
	client = connect(t, taken.address)
	if _, _, err := chat(client, "hello"); status.Code(err) != codes.Unavailable {
		t.Fatalf("got %v", err)
	}
	if other.calls.Load() != 0 || taken.calls.Load() != calls+2 {
		t.Fatal("a call that was taken was made again")
	}
}

func TestAStreamWaitsForAGateway(t *testing.T) {
	address := unused(t)
	client := connect(t, address)
	answer := chatLater(t, client, "hello")
	startGateway(t, "again", address)
	if got := <-answer; got != "again hello" {
		t.Fatalf("got %q", got)
	}
}

func TestWithoutAGatewayACallFails(t *testing.T) {
	t.Parallel()
	client := connect(t, unused(t))
	if _, _, err := chat(client, "hello"); !isUnreached(err) {
		t.Fatalf("got %v", err)
	}
	if _, err := client.Models(context.Background(), &emptypb.Empty{}); !isUnreached(err) {
		t.Fatalf("got %v", err)
	}
}

// registry resolves every name to what it holds at the moment.
type registry struct {
	addresses atomic.Pointer[[]string]
	parent    resolver.ClientConn
}

func (r *registry) Scheme() string { return "registry" }

func (r *registry) Build(
	_ resolver.Target, parent resolver.ClientConn, _ resolver.BuildOptions,
) (resolver.Resolver, error) {
	r.parent = parent
	r.ResolveNow(resolver.ResolveNowOptions{})
	return r, nil
}

func (r *registry) ResolveNow(resolver.ResolveNowOptions) {
	var state resolver.State
	for _, address := range *r.addresses.Load() {
		state.Endpoints = append(state.Endpoints,
			resolver.Endpoint{Addresses: []resolver.Address{{Addr: address}}})
	}
	_ = r.parent.UpdateState(state)
}

func (r *registry) Close() {}

func TestGatewaysThatJoinGetCalls(t *testing.T) {
	a, b := startGateway(t, "a", "127.0.0.1:0"), startGateway(t, "b", "127.0.0.1:0")
	names := &registry{}
	names.addresses.Store(&[]string{a.address})
	connection, err := dial(
		&builder{[]string{"gateway:50051"}, names, 10 * time.Millisecond}, insecure.NewCredentials())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = connection.Close() }()
	client := weftv1.NewOpenAIServiceClient(connection)
	mustChat(t, client)
	names.addresses.Store(&[]string{a.address, b.address})
	seesBoth(t, client) // though no connection has ended
	names.addresses.Store(&[]string{})
	names.addresses.Store(&[]string{b.address})
	inARow := 0
	until(t, "a gateway that left gets calls", func() bool {
		inARow++
		if mustChat(t, client) == "a" {
			inARow = 0
		}
		return inARow == 20
	})
}

func TestAddressesAreChecked(t *testing.T) {
	for _, addresses := range []string{"", "gateway", ":50051", "a:1,", "a:1,b", "a:"} {
		if _, err := Dial(addresses, insecure.NewCredentials()); err == nil {
			t.Fatalf("%q was accepted", addresses)
		}
	}
}
