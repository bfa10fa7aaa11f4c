package picker

import (
	"github.com/prometheus/client_golang/prometheus"
)

// Metrics counts what a picker does.
type Metrics struct {
	registry *prometheus.Registry
	picks    *prometheus.CounterVec
	streams  prometheus.Gauge
}

// NewMetrics registers them.
func NewMetrics(registry *prometheus.Registry) *Metrics {
	m := &Metrics{
		registry: registry,
		picks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weft_rest_picks_total",
			Help: "Requests of proxies for an endpoint, by outcome: picked, shed, not_ready, " +
				"too_large, no_room or late.",
		}, []string{"outcome"}),
		streams: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "weft_rest_picker_streams",
			Help: "Open streams of proxies, of one HTTP request each.",
		}),
	}
	registry.MustRegister(m.picks, m.streams)
	return m
}

// follow also tells how many endpoints are ready.
func (m *Metrics) follow(endpoints *endpoints) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "weft_rest_picker_endpoints",
		Help: "Endpoints that are ready.",
	}, func() float64 { return float64(endpoints.numReady()) }))
}
