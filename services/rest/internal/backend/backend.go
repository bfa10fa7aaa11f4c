// Package backend is the edge's connection to the gateways. It finds them, spreads calls over the
// healthy ones, and repeats a call at another one if a draining gateway refuses it.
package backend

import (
	"fmt"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	_ "google.golang.org/grpc/health" // round_robin passes over gateways that are NOT_SERVING
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver/dns"
)

// Gateways say NOT_SERVING under this name as soon as they drain. There is no retryPolicy, since it
// would also repeat calls that a gateway has accepted, if the connection breaks before the first
// byte.
const serviceConfig = `{
	"loadBalancingConfig": [{"round_robin": {}}],
	"healthCheckConfig": {"serviceName": "weft.v1.OpenAIService"}
}`

const (
	// Bytes of one answer that a gateway may send before the edge has taken some.
	streamWindow = 1 << 20
	// The same for all answers of a connection.
	connectionWindow = 4 << 20
	// Bytes of requests that one call of the kernel takes. The default of 32 KiB makes dozens of calls
	// of a picture, each of which may wake the gateway.
	writeBuffer = 1 << 20
)

// Dial connects to gateways; it returns before any of them is reached.
//
// addresses is a list of host:port with commas between; a host with several addresses is as many
// gateways.
func Dial(
	addresses string, gateway credentials.TransportCredentials, options ...grpc.DialOption,
) (*grpc.ClientConn, error) {
	targets, err := Split(addresses)
	if err != nil {
		return nil, err
	}
	return dial(&builder{targets, dns.NewBuilder(), refreshInterval}, gateway, options...)
}

func dial(
	finder *builder, gateway credentials.TransportCredentials, options ...grpc.DialOption,
) (*grpc.ClientConn, error) {
	reconnect := grpc.ConnectParams{
		Backoff: backoff.Config{
			BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second,
		},
		MinConnectTimeout: 2 * time.Second,
	}
	return grpc.NewClient(scheme+":///gateways", append([]grpc.DialOption{
		grpc.WithResolvers(finder),
		grpc.WithTransportCredentials(gateway),
		grpc.WithConnectParams(reconnect),
		// Keepalive finds a gateway whose host went silent while calls wait for it.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		// Windows that adapt cost a ping, its answer and updates for each message of a relay.
		grpc.WithStaticStreamWindowSize(streamWindow),
		grpc.WithStaticConnWindowSize(connectionWindow),
		grpc.WithWriteBufferSize(writeBuffer),
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(), // DNS has none
		grpc.WithDefaultServiceConfig(serviceConfig),
		grpc.WithUnaryInterceptor(askUnary),
		grpc.WithStreamInterceptor(askStream),
		grpc.WithStatsHandler(waits{}),
	}, options...)...)
}

// Split checks a list of addresses.
func Split(addresses string) ([]string, error) {
	targets := strings.Split(addresses, ",")
	for i, target := range targets {
		targets[i] = strings.TrimSpace(target)
		if host, port, err := net.SplitHostPort(targets[i]); err != nil || host == "" || port == "" {
			return nil, fmt.Errorf("%q is not host:port", targets[i])
		}
	}
	return targets, nil
}
