"""The gauges by which endpoint pickers of other makers judge a server: the model server protocol of
the Gateway API Inference Extension (its proposal 003). The mesh is one server, and the names are
vLLM's, which pickers read by default.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.telemetry.load_header import mesh_load

_PREFIX = "vllm:"
_HELP = {
    "num_requests_waiting": "Requests that wait, at this gateway and at decode workers.",
    "num_requests_running": "Requests that run on decode workers.",
    "kv_cache_usage_perc": "Share of decode workers' KV pages that requests hold, 0 to 1.",
}


class PoolCollector(Collector):
    """Load of the mesh."""

    def __init__(self, pipeline: RequestPipeline) -> None:
        self._pipeline = pipeline

    def collect(self) -> Iterator[Metric]:
        """The endpoint's thread calls this."""
        load = mesh_load(self._pipeline.reports(), self._pipeline.num_queued)
        for name, text in _HELP.items():
            gauge = GaugeMetricFamily(f"{_PREFIX}{name}", text)
            gauge.add_metric([], getattr(load, name))
            yield gauge
