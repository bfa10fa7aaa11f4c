package main

import (
	"context"
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"weft.dev/weft/services/rest/internal/edge"
	"weft.dev/weft/services/rest/internal/identity"
	"weft.dev/weft/services/rest/internal/picker"
)

// startPicker is silent when there is no address. The picker is not ready once ctx ends; the function
// that is returned ends it, and lets streams end for as long as requests have.
func startPicker(
	ctx context.Context,
	settings settings,
	gateway grpc.ClientConnInterface,
	registry *prometheus.Registry,
	logger *slog.Logger,
) (string, func(), error) {
	if settings.pickerListen == "" {
		return "", func() {}, nil
	}
	endpoints, err := settings.pickerEndpoints()
	if err != nil {
		return "", nil, err
	}
	config := picker.Config{
		Gateway:      gateway,
		Contract:     edge.NewContract(),
		Endpoints:    endpoints,
		OverTLS:      settings.https.Cert != "",
		MaxBodyBytes: settings.maxBodyBytes,
		MaxHeldBytes: settings.maxHeldBytes,
		Metrics:      picker.NewMetrics(registry),
		Logger:       logger,
	}
	if files := settings.pickerFiles(); files.Cert != "" {
		own, err := identity.Load(files, logger)
		if err != nil {
			return "", nil, err
		}
		config.Credentials = credentials.NewTLS(own.Server())
	}
	listener, err := net.Listen("tcp", settings.pickerListen)
	if err != nil {
		return "", nil, err
	}
	made := picker.New(config)
	go made.Follow(ctx)
	go func() {
		if err := made.Server().Serve(listener); err != nil {
			logger.Error("the picker ended", "cause", err.Error())
		}
	}()
	logger.Info("picking endpoints", "address", listener.Addr().String(), "endpoints", endpoints)
	return listener.Addr().String(), func() {
		ended := time.AfterFunc(settings.drainTimeout, made.Server().Stop)
		defer ended.Stop()
		made.Server().GracefulStop()
	}, nil
}
