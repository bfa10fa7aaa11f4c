"""The gauge by which endpoint pickers of other makers know where adapters are: the model server
protocol of the Gateway API Inference Extension (its proposal 003), under vLLM's name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from weft.gateway.adapters.directory import AdapterDirectory
from weft.gateway.adapters.holders import holders
from weft.gateway.fleet.fleet import Fleet


class AdapterPoolCollector(Collector):
    """Adapters on the decode workers of all models; nothing where none can have any."""

    def __init__(self, fleet: Fleet, adapters: AdapterDirectory) -> None:
        self._fleet = fleet
        self._adapters = adapters

    def collect(self) -> Iterator[Metric]:
        """The endpoint's thread calls this."""
        infos = (worker.info for worker in self._fleet.workers("decode"))
        limits = [
            info.adapters.max_device_adapters
            for info in infos
            if info is not None and info.HasField("adapters")
        ]
        if not limits:
            return
        running, waiting = [], []
        for entry in self._adapters.serving():
            found = [one for one in holders(self._fleet, entry) if one.role != "prefill"]
            if any(one.state == "device" for one in found):
                running.append(entry.name)
            elif any(one.num_requests for one in found):
                waiting.append(entry.name)
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "When this was told; the adapters on a decode worker's device, and those that requests "
            "wait for.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        labels = [str(min(limits)), ",".join(running), ",".join(waiting)]
        gauge.add_metric(labels, time.time())
        yield gauge
