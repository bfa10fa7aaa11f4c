package edge

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"weft.dev/weft/services/rest/internal/forward"
	"weft.dev/weft/services/rest/internal/reqinfo"
)

// Metrics counts requests of one edge.
type Metrics struct {
	requests *prometheus.CounterVec
	failures *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	inFlight prometheus.Gauge
}

// NewMetrics registers the edge's metrics and those of the Go process.
func NewMetrics(registry *prometheus.Registry) *Metrics {
	m := &Metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weft_rest_requests_total",
			Help: "HTTP requests answered, by route and status code.",
		}, []string{"route", "code"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weft_rest_stream_failures_total",
			Help: "Streams that failed after their first message, by route and gRPC code.",
		}, []string{"route", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "weft_rest_request_duration_seconds",
			Help:    "Time from the request's header to the end of the answer, by route.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2.5, 15),
		}, []string{"route"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "weft_rest_requests_in_flight",
			Help: "HTTP requests being answered.",
		}),
	}
	registry.MustRegister(m.requests, m.failures, m.seconds, m.inFlight,
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// observe counts a request as begun; the function it returns counts it as ended.
func (m *Metrics) observe(recorder *statusRecorder, info *reqinfo.Info) func() {
	begin := time.Now()
	m.inFlight.Inc()
	return func() {
		m.inFlight.Dec()
		route := info.Route
		if route == "" {
			route = "none"
		}
		m.requests.WithLabelValues(route, strconv.Itoa(recorder.statusCode())).Inc()
		m.seconds.WithLabelValues(route).Observe(time.Since(begin).Seconds())
		if code := info.FailureCode(); code != "" {
			m.failures.WithLabelValues(route, code).Inc()
		}
	}
}

// statusRecorder remembers the status code of a response, bounds how long a client may leave it
// unread, and closes its connection behind it if the edge leaves.
type statusRecorder struct {
	http.ResponseWriter
	limits  forward.Limits
	leaving context.Context // nil: another recorder sees to it
	code    int
}

func (s *statusRecorder) WriteHeader(code int) {
	if s.code == 0 {
		s.code = code
		closeIfLeaving(s.leaving, s.Header())
	}
	s.limits.LimitWrite(s.ResponseWriter)
	s.ResponseWriter.WriteHeader(code)
}

func (s *statusRecorder) Write(data []byte) (int, error) {
	if s.code == 0 {
		s.code = http.StatusOK
		closeIfLeaving(s.leaving, s.Header())
	}
	s.limits.LimitWrite(s.ResponseWriter)
	return s.ResponseWriter.Write(data)
}

// Unwrap lets http.ResponseController reach the connection.
func (s *statusRecorder) Unwrap() http.ResponseWriter {
	return s.ResponseWriter
}

func (s *statusRecorder) statusCode() int {
	if s.code == 0 {
		return http.StatusOK
	}
	return s.code
}
