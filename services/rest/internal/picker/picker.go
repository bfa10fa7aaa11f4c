// Package picker answers Envoy's external processing protocol as an endpoint picker of the Gateway
// API Inference Extension (its proposal 004): it says to which REST edge a request goes, or refuses
// it for load before its body is sent on. Which workers serve a request is the gateways' choice, made
// when it arrives there.
package picker

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"weft.dev/weft/services/rest/gen/weft/extproc"
	weftv1 "weft.dev/weft/services/rest/gen/weft/v1"
	"weft.dev/weft/services/rest/internal/apierror"
	"weft.dev/weft/services/rest/internal/edge"
)

const (
	// Names of the health service, by the protocol.
	liveness  = "liveness"
	readiness = "readiness"
	// A gateway that has not said by then whether it admits a request counts as unreachable.
	admissionTimeout = 4 * time.Second
	// Room for headers and for the message around a body.
	messageOverheadBytes = 256 << 10
	// Requests of one connection at the same time; Envoy opens more connections.
	maxStreams = 10_000
)

// Config is what a picker needs.
type Config struct {
	// Gateway is the connection to the gateways, which are asked whether they admit a request.
	Gateway grpc.ClientConnInterface
	// Contract tells which requests are asked about.
	Contract *edge.Contract
	// Endpoints are host:port of the REST edges; a host with several addresses is as many edges.
	Endpoints []string
	// OverTLS: the edges serve HTTPS.
	OverTLS bool
	// MaxBodyBytes bounds what is kept of one body, MaxHeldBytes what is kept of all together.
	MaxBodyBytes, MaxHeldBytes int64
	// Credentials of the port; nil: none.
	Credentials credentials.TransportCredentials
	Metrics     *Metrics
	Logger      *slog.Logger

	bodyTimeout time.Duration // 0: bodyTimeout
}

// Picker serves the protocol.
type Picker struct {
	extproc.UnimplementedExternalProcessorServer
	config    Config
	endpoints *endpoints
	room      *edge.Room
	health    *health.Server
	server    *grpc.Server
}

// New makes a picker; `Follow` and `Server` start it.
func New(config Config) *Picker {
	if config.bodyTimeout == 0 {
		config.bodyTimeout = bodyTimeout
	}
	p := &Picker{
		config:    config,
		endpoints: newEndpoints(config.Endpoints, config.OverTLS, config.Logger),
		room:      edge.NewRoom(config.MaxHeldBytes, config.MaxBodyBytes),
		health:    health.NewServer(),
	}
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(int(config.MaxBodyBytes) + messageOverheadBytes),
		grpc.MaxConcurrentStreams(maxStreams),
		// Keepalive finds a proxy whose host went silent.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime: 5 * time.Second, PermitWithoutStream: true,
		}),
	}
	if config.Credentials != nil {
		options = append(options, grpc.Creds(config.Credentials))
	}
	p.server = grpc.NewServer(options...)
	extproc.RegisterExternalProcessorServer(p.server, p)
	healthv1.RegisterHealthServer(p.server, p.health)
	p.health.SetServingStatus(liveness, healthv1.HealthCheckResponse_SERVING)
	p.setReady(healthv1.HealthCheckResponse_NOT_SERVING)
	config.Metrics.follow(p.endpoints)
	return p
}

// Server is the gRPC server of the port.
func (p *Picker) Server() *grpc.Server {
	return p.server
}

// Follow finds endpoints until ctx ends; from their first probes on until then the picker is ready.
func (p *Picker) Follow(ctx context.Context) {
	go p.endpoints.follow(ctx)
	select {
	case <-p.endpoints.synced:
		p.setReady(healthv1.HealthCheckResponse_SERVING)
		<-ctx.Done()
	case <-ctx.Done():
	}
	p.setReady(healthv1.HealthCheckResponse_NOT_SERVING)
}

func (p *Picker) setReady(status healthv1.HealthCheckResponse_ServingStatus) {
	for _, service := range []string{
		"", readiness, extproc.ExternalProcessor_ServiceDesc.ServiceName,
	} {
		p.health.SetServingStatus(service, status)
	}
}

// refusal asks a gateway whether it admits a request, and returns the failure if it does not for load,
// or because nobody is ready. All other answers are the endpoint's to give.
func (p *Picker) refusal(ctx context.Context, r *http.Request, model string) *apierror.Error {
	called, err := p.config.Contract.Context(
		ctx, r, weftv1.EdgeService_CheckAdmission_FullMethodName)
	if err != nil {
		return nil // a header that the endpoint refuses
	}
	bounded, cancel := context.WithTimeout(called, admissionTimeout)
	defer cancel()
	_, err = weftv1.NewEdgeServiceClient(p.config.Gateway).CheckAdmission(
		bounded, &weftv1.CheckAdmissionRequest{Model: model})
	if status.Code(err) == codes.DeadlineExceeded && called.Err() == nil && bounded.Err() != nil {
		err = status.Error(codes.Unavailable, "no gateway answered in time")
	}
	if err == nil {
		return nil
	}
	failure := apierror.From(err)
	if outcomes[failure.Status] == "" {
		return nil
	}
	return &failure
}

// none is the failure where no endpoint may be picked.
func none() apierror.Error {
	failure := apierror.New(http.StatusServiceUnavailable, "unavailable",
		"No server of this pool is ready; send the request again shortly.")
	failure.RetryAfter = time.Second
	return failure
}

// tooLarge is the failure of a body of which the model was not found within its bound.
func (p *Picker) tooLarge() apierror.Error {
	return apierror.New(http.StatusRequestEntityTooLarge, "request_too_large",
		"The request body is larger than "+strconv.FormatInt(p.config.MaxBodyBytes, 10)+" bytes.")
}

// noRoom is the failure of a body that must wait for others.
func noRoom() apierror.Error {
	failure := apierror.New(http.StatusServiceUnavailable, "overloaded",
		"The server is receiving too many request bodies; send the request again shortly.")
	failure.RetryAfter = time.Second
	return failure
}

// late is the failure of a body that does not arrive.
func (p *Picker) late() apierror.Error {
	return apierror.New(http.StatusRequestTimeout, "request_timeout",
		"The request body did not arrive within "+p.config.bodyTimeout.String()+".")
}

// immediate is a failure as the answer to the request, in the shape of its API.
func immediate(failure apierror.Error) *extproc.ProcessingResponse {
	headers := []*extproc.HeaderValueOption{setHeader("content-type", "application/json")}
	if failure.RetryAfter > 0 {
		seconds := strconv.Itoa(int(math.Ceil(failure.RetryAfter.Seconds())))
		headers = append(headers, setHeader("retry-after", seconds))
	}
	return &extproc.ProcessingResponse{
		Response: &extproc.ProcessingResponse_ImmediateResponse{
			ImmediateResponse: &extproc.ImmediateResponse{
				Status:  &extproc.HttpStatus{Code: int32(failure.Status)},
				Headers: &extproc.HeaderMutation{SetHeaders: headers},
				Body:    failure.JSON(),
				Details: failure.Code,
			},
		},
	}
}

func setHeader(key, value string) *extproc.HeaderValueOption {
	return &extproc.HeaderValueOption{
		Header: &extproc.HeaderValue{Key: key, RawValue: []byte(value)},
		// A client's own header must not choose an endpoint.
		AppendAction: extproc.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}
}

// errOutOfOrder ends a stream whose messages are in no order that the protocol has.
var errOutOfOrder = status.Error(codes.InvalidArgument, "the messages are out of order")

// isEnd says whether a stream ended because the proxy has no more to say.
func isEnd(err error) bool {
	return errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled
}
