"""The gauges by which endpoint pickers of other makers judge a server: the model server protocol of
the Gateway API Inference Extension (its proposal 003). The mesh is one server, and the names are
vLLM's, which pickers read by default.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from weft.gateway.adapters.holders import holders
from weft.gateway.catalogue import Catalogue
from weft.gateway.fleet.fleet import Fleet
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.telemetry.load_header import mesh_load

_PREFIX = "vllm:"
_HELP = {
    "num_requests_waiting": "Requests that wait, at this gateway and at decode workers.",
    "num_requests_running": "Requests that run on decode workers.",
    "kv_cache_usage_perc": "Share of decode workers' KV pages that requests hold, 0 to 1.",
}


class PoolCollector(Collector):
    """Load of the mesh, and the adapters on its decode workers."""

    def __init__(self, pipeline: RequestPipeline, fleet: Fleet, models: Catalogue) -> None:
        self._pipeline = pipeline
        self._fleet = fleet
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """The endpoint's thread calls this."""
        load = mesh_load(self._pipeline.reports(), self._pipeline.num_queued)
        for name, text in _HELP.items():
            gauge = GaugeMetricFamily(f"{_PREFIX}{name}", text)
            gauge.add_metric([], getattr(load, name))
            yield gauge
        yield from self._adapters()

    def _adapters(self) -> Iterator[Metric]:
        infos = (worker.info for worker in self._fleet.workers("decode"))
        limits = [
            info.adapters.max_device_adapters
            for info in infos
            if info is not None and info.HasField("adapters")
        ]
        if not limits:
            return
        running, waiting = [], []
        for entry in self._models.adapters.serving():
            found = [one for one in holders(self._fleet, entry) if one.role != "prefill"]
            if any(one.state == "device" for one in found):
                running.append(entry.name)
            elif any(one.num_requests for one in found):
                waiting.append(entry.name)
        gauge = GaugeMetricFamily(
            f"{_PREFIX}lora_requests_info",
            "When this was told; the adapters on a decode worker's device, and those that requests "
            "wait for.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        labels = [str(min(limits)), ",".join(running), ",".join(waiting)]
        gauge.add_metric(labels, time.time())
        yield gauge
