"""The load of the whole mesh in the header of an answer, in the form of ORCA (Open Request Cost
Aggregation): load balancers ask for it with a request, by `endpoint-load-metrics-format`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from weft.gateway.request import LoadFormat
from weft.v1 import worker_pb2

_HEADER = "endpoint-load-metrics"


def load_header(
    form: LoadFormat, reports: Iterable[worker_pb2.WatchLoadResponse], num_queued: int
) -> tuple[str, str]:
    """The header, with the names of vLLM's metrics. The values are of all decode workers together,
    by their newest reports: the share of KV pages that requests hold, from 0 to 1, and the number
    of requests that wait, with the `num_queued` that no worker has yet.
    """
    total = held = 0
    waiting = num_queued
    for report in reports:
        total += report.total_pages
        held += report.total_pages - report.free_pages - report.cached_pages
        waiting += report.waiting_requests
    metrics = {
        "kv_cache_usage_perc": round(held / total, 4) if total else 0.0,
        "num_requests_waiting": waiting,
    }
    if form == "JSON":
        return _HEADER, f"JSON {json.dumps({'named_metrics': metrics})}"
    return _HEADER, "TEXT " + ", ".join(
        f"named_metrics.{name}={value}" for name, value in metrics.items()
    )
