// Command weft-rest serves the gateway's OpenAI face as REST.
package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"weft.dev/weft/services/rest/internal/apierror"
	"weft.dev/weft/services/rest/internal/backend"
	"weft.dev/weft/services/rest/internal/clientconn"
	"weft.dev/weft/services/rest/internal/edge"
	"weft.dev/weft/services/rest/internal/forward"
	"weft.dev/weft/services/rest/internal/identity"
	"weft.dev/weft/services/rest/internal/otlp"
)

const (
	// Room for the HttpBody message around a body.
	messageOverheadBytes = 64 << 10
	// An answer with many samples and log-probabilities is large, but not larger than this.
	maxAnswerBytes = 256 << 20
	// A client that reads nothing for this long loses its connection.
	writeStall = 60 * time.Second
	// The edge warns of a certificate that expires within this time.
	renewBefore = 7 * 24 * time.Hour
	renewLook   = time.Hour
	// Spans that are not exported by then, after the last request, are lost.
	flushTimeout = 1500 * time.Millisecond
	// Requests that are given up at the end have this long to send their clients an error.
	lastWords = time.Second
	// A signal within this time of the first counts as the same one: a service manager may send it to
	// all processes, and the supervisor among them passes it on.
	secondSignalAfter = time.Second
)

func main() {
	settings, err := parseSettings(os.Args[1:], os.Environ(), os.Stderr)
	if err != nil {
		os.Exit(2) // flag has said why
	}
	logger := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	// From then on a signal ends the process at once.
	context.AfterFunc(ctx, func() { time.AfterFunc(secondSignalAfter, stop) })
	if err := run(ctx, settings, logger); err != nil {
		logger.Error("weft-rest failed", "error", err.Error())
		os.Exit(1)
	}
}

func run(ctx context.Context, settings settings, logger *slog.Logger) error {
	gateway, err := gatewayCredentials(ctx, settings, logger)
	if err != nil {
		return fmt.Errorf("--tls-cert: %w", err)
	}
	connection, err := backend.Dial(settings.backend, gateway, grpc.WithDefaultCallOptions(
		grpc.MaxCallRecvMsgSize(maxAnswerBytes),
		grpc.MaxCallSendMsgSize(int(settings.maxBodyBytes)+messageOverheadBytes),
	))
	if err != nil {
		return fmt.Errorf("--backend %s: %w", settings.backend, err)
	}
	defer func() { _ = connection.Close() }()

	tracing, flush, err := startTracing(ctx, settings, logger)
	if err != nil {
		return fmt.Errorf("--otlp-endpoint %s: %w", settings.otlpEndpoint, err)
	}
	defer flush()

	registry := prometheus.NewRegistry()
	draining, drainNow := context.WithCancel(context.Background())
	defer drainNow()
	handler, err := edge.New(draining, edge.Config{
		Backend:      connection,
		MaxBodyBytes: settings.maxBodyBytes,
		MaxHeldBytes: settings.maxHeldBytes,
		Logger:       logger,
		Metrics:      edge.NewMetrics(registry),
		Streams:      forward.Limits{WriteStall: writeStall, CommentAfter: settings.commentAfter},
		Tracing:      tracing,

		AllowedOrigins: settings.allowedOrigins(),
		Leaving:        ctx,
	})
	if err != nil {
		return err
	}
	metricsAddress, closeMetrics, err := serveMetrics(settings.metricsListen, registry)
	if err != nil {
		return fmt.Errorf("--metrics-listen %s: %w", settings.metricsListen, err)
	}
	defer closeMetrics()

	listener, err := listen(ctx, settings, logger)
	if err != nil {
		return err
	}
	address := listener.Addr().String()
	pickerAddress, stopPicker, err := startPicker(ctx, settings, connection, registry, logger)
	if err != nil {
		return errors.Join(fmt.Errorf("--picker-listen %s: %w", settings.pickerListen, err),
			listener.Close())
	}
	stopped := make(chan struct{})
	context.AfterFunc(draining, func() {
		defer close(stopped)
		stopPicker()
	})
	defer func() {
		drainNow()
		<-stopped
	}()
	addresses := map[string]string{
		"address": address, "metrics_address": metricsAddress, "picker_address": pickerAddress,
	}
	if err := writeReadyFile(settings.readyFile, addresses); err != nil {
		return fmt.Errorf("--ready-file %s: %w", settings.readyFile, err)
	}
	logger.Info("serving REST", "address", address, "backend", settings.backend)
	context.AfterFunc(ctx, func() {
		logger.Info("not ready", "ready_grace_s", settings.readyGrace.Seconds())
		time.AfterFunc(settings.readyGrace, drainNow)
	})
	return serve(draining, newServer(handler, logger), listener, settings.drainTimeout, logger)
}

// startTracing exports spans if an endpoint is set; the function it returns sends the remaining
// ones. If only the environment asks for an export that is not possible, the edge serves without
// it.
func startTracing(
	ctx context.Context, settings settings, logger *slog.Logger,
) (*edge.Tracing, func(), error) {
	endpoint := otlp.Endpoint(settings.otlpEndpoint, os.Getenv)
	if endpoint == "" || !settings.tracing {
		return nil, func() {}, nil
	}
	provider, err := otlp.NewProvider(
		ctx, settings.otlpEndpoint, settings.sampleRatio, os.Getenv, logger)
	if err != nil && settings.otlpEndpoint != "" {
		return nil, nil, err
	}
	if err != nil {
		logger.Warn("spans are not exported", "endpoint", endpoint, "cause", err.Error())
		return nil, func() {}, nil
	}
	logger.Info("spans are exported", "endpoint", endpoint)
	flush := func() {
		bounded, cancel := context.WithTimeout(context.Background(), flushTimeout)
		defer cancel()
		if err := provider.Shutdown(bounded); err != nil {
			logger.Warn("the last spans are lost", "cause", err.Error())
		}
	}
	return edge.NewTracing(provider), flush, nil
}

func newServer(handler http.Handler, logger *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           handler,
		ConnContext:       clientconn.WithConn,
		ConnState:         clientconn.Follow,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		WriteTimeout:      0, // streams last as long as they last; single writes have a limit
		ErrorLog:          slog.NewLogLogger(logger.Handler(), slog.LevelWarn),
	}
}

// serve runs until ctx ends, then drains.
func serve(
	ctx context.Context,
	server *http.Server,
	listener net.Listener,
	drainTimeout time.Duration,
	logger *slog.Logger,
) error {
	requests, giveUp := context.WithCancelCause(context.Background())
	defer giveUp(nil)
	server.BaseContext = func(net.Listener) context.Context { return requests }
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	logger.Info("draining")
	return drain(server, giveUp, drainTimeout, logger)
}

// drain lets running requests finish until shortly before drainTimeout ends. The others are then
// given up: their handlers send the clients an error, since closing would just cut them off.
func drain(
	server *http.Server,
	giveUp context.CancelCauseFunc,
	drainTimeout time.Duration,
	logger *slog.Logger,
) error {
	err := shutdown(server, drainTimeout-min(lastWords, drainTimeout/4))
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	logger.Warn("ending requests that did not finish in time")
	giveUp(apierror.ErrDraining)
	err = shutdown(server, lastWords)
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	logger.Warn("closing connections whose clients could not be told in time")
	return server.Close()
}

// shutdown accepts no more requests and waits for the running ones.
func shutdown(server *http.Server, timeout time.Duration) error {
	bounded, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return server.Shutdown(bounded)
}

// listen binds the REST port, with HTTPS if there is a certificate.
func listen(ctx context.Context, settings settings, logger *slog.Logger) (net.Listener, error) {
	listener, err := net.Listen("tcp", settings.listen)
	if err != nil {
		return nil, fmt.Errorf("--listen %s: %w", settings.listen, err)
	}
	if settings.https.Cert == "" {
		if settings.isExposed() {
			logger.Warn("insecure: REST is plain HTTP and open to other machines")
		}
		return clientconn.Listener{Listener: listener, WriteStall: writeStall}, nil
	}
	own, err := identity.Load(settings.https, logger)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("--https-cert: %w", err), listener.Close())
	}
	go own.Warn(ctx, renewBefore, renewLook)
	config := own.Server()
	config.NextProtos = []string{"h2", "http/1.1"}
	return tls.NewListener(listener, config), nil
}

// gatewayCredentials are mutual TLS if there is a certificate.
func gatewayCredentials(
	ctx context.Context, settings settings, logger *slog.Logger,
) (credentials.TransportCredentials, error) {
	if settings.tls.Cert == "" {
		return insecure.NewCredentials(), nil
	}
	own, err := identity.Load(settings.tls, logger)
	if err != nil {
		return nil, err
	}
	go own.Warn(ctx, renewBefore, renewLook)
	return credentials.NewTLS(own.Client("gateway")), nil
}

// serveMetrics is silent when address is empty.
func serveMetrics(address string, registry *prometheus.Registry) (string, func(), error) {
	if address == "" {
		return "", func() {}, nil
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return "", nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = server.Serve(listener) }()
	return listener.Addr().String(), func() { _ = server.Close() }, nil
}

// writeReadyFile atomically writes the addresses that this process listens on, for a supervisor.
func writeReadyFile(path string, addresses map[string]string) error {
	if path == "" {
		return nil
	}
	told := map[string]any{"pid": os.Getpid()}
	for name, address := range addresses {
		told[name] = address
	}
	content, err := json.Marshal(told)
	if err != nil {
		return err
	}
	temporary, err := os.CreateTemp(filepath.Dir(path), ".ready-*")
	if err != nil {
		return err
	}
	_, err = temporary.Write(content)
	if err = errors.Join(err, temporary.Close()); err == nil {
		err = os.Rename(temporary.Name(), path)
	}
	if err != nil {
		_ = os.Remove(temporary.Name())
	}
	return err
}
