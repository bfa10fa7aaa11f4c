// Package otlp sends spans to an OpenTelemetry collector.
package otlp

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
)

const (
	serviceName = "rest"
	// Every batch fails while the collector is unreachable, so failures are logged this rarely.
	repeatLog = time.Minute
)

// Endpoint is the address of the collector: the setting, else that of the standard variables;
// empty: none.
func Endpoint(setting string, getenv func(string) string) string {
	return firstOf(setting,
		getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), getenv("OTEL_EXPORTER_OTLP_ENDPOINT"))
}

// NewProvider makes spans and exports them in batches from a bounded queue. When the queue is full,
// new spans are lost, so that nothing waits for the collector. Shutdown sends the remaining spans.
//
// If setting is empty, the standard variables name the collector. sampleRatio is the share of the
// traces begun here that are exported.
func NewProvider(
	ctx context.Context,
	setting string,
	sampleRatio float64,
	getenv func(string) string,
	logger *slog.Logger,
) (*sdktrace.TracerProvider, error) {
	if err := check(Endpoint(setting, getenv)); err != nil {
		return nil, err
	}
	about, err := describe(ctx)
	if err != nil {
		return nil, err
	}
	exporter, err := newExporter(ctx, setting, getenv)
	if err != nil {
		return nil, err
	}
	otel.SetLogger(logr.FromSlogHandler(logger.Handler()))
	otel.SetErrorHandler(&rareLog{logger: logger})
	return sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(exporter),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(sampleRatio))),
		sdktrace.WithResource(about),
	), nil
}

// check refuses what the SDK would silently replace by its default.
func check(endpoint string) error {
	parsed, err := url.Parse(endpoint)
	if err != nil || parsed.Host == "" || (parsed.Scheme != "http" && parsed.Scheme != "https") {
		return errors.New("give the collector as http://HOST:4317, or https")
	}
	return nil
}

// newExporter speaks the protocol of `OTEL_EXPORTER_OTLP_PROTOCOL`, gRPC by default. It connects
// later.
func newExporter(
	ctx context.Context, setting string, getenv func(string) string,
) (*otlptrace.Exporter, error) {
	protocol := firstOf(getenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
		getenv("OTEL_EXPORTER_OTLP_PROTOCOL"), "grpc")
	switch protocol {
	case "grpc":
		var options []otlptracegrpc.Option
		if setting != "" {
			options = append(options, otlptracegrpc.WithEndpointURL(setting))
		}
		return otlptracegrpc.New(ctx, options...)
	case "http/protobuf":
		var options []otlptracehttp.Option
		if setting != "" {
			options = append(options, otlptracehttp.WithEndpointURL(setting))
		}
		return otlptracehttp.New(ctx, options...)
	default:
		return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL = %q: give grpc or http/protobuf", protocol)
	}
}

// describe names the source of the spans. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take
// precedence.
func describe(ctx context.Context) (*resource.Resource, error) {
	var random [4]byte
	_, _ = rand.Read(random[:]) // never fails: crypto/rand ends the program instead
	return resource.New(ctx,
		resource.WithTelemetrySDK(),
		resource.WithAttributes(
			semconv.ServiceNamespace("weft"),
			semconv.ServiceName(serviceName),
			semconv.ServiceInstanceID(serviceName+"-"+hex.EncodeToString(random[:])),
		),
		resource.WithFromEnv(),
	)
}

// rareLog logs some of the export's failures.
type rareLog struct {
	logger *slog.Logger
	mutex  sync.Mutex
	nextAt time.Time
}

// Handle implements otel.ErrorHandler.
func (l *rareLog) Handle(err error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if now := time.Now(); now.After(l.nextAt) {
		l.nextAt = now.Add(repeatLog)
		l.logger.Warn("spans are not exported", "cause", err.Error())
	}
}

func firstOf(values ...string) string {
	for _, value := range values {
		if value != "" {
			return value
		}
	}
	return ""
}
