"""Metrics of a gateway's workers, read when scraped."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from weft.common.rpc.breaker import BreakerState
from weft.gateway.catalogue import Catalogue
from weft.gateway.fleet.fleet import Fleet


class FleetCollector(Collector):
    """Health and breaker of each worker, as this gateway sees them, and health of each model."""

    def __init__(self, fleet: Fleet, models: Catalogue) -> None:
        self._fleet = fleet
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """The endpoint's thread calls this."""
        labels = ["worker_id", "role"]
        healthy = GaugeMetricFamily(
            "weft_worker_healthy", "1 if the worker gets requests, else 0.", labels=labels
        )
        breaker = GaugeMetricFamily(
            "weft_worker_breaker_state",
            "1 for the state in which the worker's circuit breaker is, else 0.",
            labels=[*labels, "state"],
        )
        requests = GaugeMetricFamily(
            "weft_worker_requests", "Requests of this gateway on the worker.", labels=labels
        )
        now = time.monotonic()
        for worker in self._fleet.workers():
            worker_id = worker.endpoint.address if worker.info is None else worker.info.worker_id
            names = [worker_id, worker.role]
            healthy.add_metric(names, int(not worker.problem(now)))
            requests.add_metric(names, worker.own_requests)
            state = worker.breaker.state(now)
            for each in BreakerState:
                breaker.add_metric([*names, each.value], int(each is state))
        yield from (healthy, breaker, requests, self._ready(now))

    def _ready(self, now: float) -> Metric:
        ready = GaugeMetricFamily(
            "weft_model_ready", "1 if a decode worker of the model is healthy.", labels=["model"]
        )
        for served in self._models:
            workers = served.fleet.workers("decode")
            is_ready = any(not worker.problem(now) for worker in workers)
            ready.add_metric([served.model.name], int(is_ready))
        return ready
