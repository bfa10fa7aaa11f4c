"""The load of the whole mesh in the header of an answer, in the form of ORCA (Open Request Cost
Aggregation): load balancers ask for it with a request, by `endpoint-load-metrics-format`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from weft.gateway.request import LoadFormat
from weft.v1 import worker_pb2

_HEADER = "endpoint-load-metrics"


class MeshLoad(NamedTuple):
    """Load of all decode workers together, under the names of vLLM's metrics."""

    kv_cache_usage_perc: float
    """Share of KV pages that requests hold, from 0 to 1."""
    num_requests_waiting: int
    num_requests_running: int


def mesh_load(reports: Iterable[worker_pb2.WatchLoadResponse], num_queued: int) -> MeshLoad:
    """The load by decode workers' newest reports; `num_queued` requests wait that no worker has."""
    total = held = running = 0
    waiting = num_queued
    for report in reports:
        total += report.total_pages
        held += report.total_pages - report.free_pages - report.cached_pages
        waiting += report.waiting_requests
        running += report.running_requests
    return MeshLoad(round(held / total, 4) if total else 0.0, waiting, running)


def load_header(
    form: LoadFormat, reports: Iterable[worker_pb2.WatchLoadResponse], num_queued: int
) -> tuple[str, str]:
    """The header with the part of the load that load balancers know by name."""
    load = mesh_load(reports, num_queued)
    metrics = {
        "kv_cache_usage_perc": load.kv_cache_usage_perc,
        "num_requests_waiting": load.num_requests_waiting,
    }
    if form == "JSON":
        return _HEADER, f"JSON {json.dumps({'named_metrics': metrics})}"
    return _HEADER, "TEXT " + ", ".join(
        f"named_metrics.{name}={value}" for name, value in metrics.items()
    )
