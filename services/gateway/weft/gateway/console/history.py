"""The last minutes of a gateway: rates and latencies in equal spans of time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import Counter
from weft.contract.codec.walk import duration
from weft.gateway.fleet.fleet import Fleet
from weft.gateway.telemetry.metrics import GatewayMetrics, LoopHistogram
from weft.v1 import gateway_pb2, mesh_pb2

SPAN_S = 2.0
"""Time between two points."""
MAX_POINTS = 300
"""Points that are kept: ten minutes."""
_QUANTILES = (0.5, 0.9, 0.99)
_NOT_FAILED = ("ok", "cancelled")


class _Totals(NamedTuple):
    time_s: float
    requests: float
    failures: float
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    with_target: int
    within_target: int
    first_token: tuple[int, ...]
    between_tokens: tuple[int, ...]


class MeshHistory:
    """Makes points out of what the metrics have gained since the point before."""

    def __init__(
        self, metrics: GatewayMetrics, fleet: Fleet, load: Callable[[], gateway_pb2.GatewayLoad]
    ) -> None:
        self._metrics = metrics
        self._fleet = fleet
        self._load = load
        self._points: deque[mesh_pb2.MeshPoint] = deque(maxlen=MAX_POINTS)
        self._last = self._totals()
        self.num_points = 0
        """Points made since the start."""

    def tick(self) -> None:
        last, now = self._last, self._totals()
        span_s = now.time_s - last.time_s
        if span_s <= 0:
            return
        self._last = now
        point = mesh_pb2.MeshPoint(
            span=duration(span_s),
            requests_per_second=(now.requests - last.requests) / span_s,
            failures_per_second=(now.failures - last.failures) / span_s,
            prompt_tokens_per_second=(now.prompt_tokens - last.prompt_tokens) / span_s,
            output_tokens_per_second=(now.output_tokens - last.output_tokens) / span_s,
            first_token=_quantiles(
                self._metrics.time_to_first_token, last.first_token, now.first_token
            ),
            between_tokens=_quantiles(
                self._metrics.inter_token_latency, last.between_tokens, now.between_tokens
            ),
            pages=page_counts(self._fleet),
        )
        point.time.FromNanoseconds(time.time_ns())
        if (prompt := now.prompt_tokens - last.prompt_tokens) > 0:
            point.hit_rate = (now.cached_tokens - last.cached_tokens) / prompt
        if (judged := now.with_target - last.with_target) > 0:
            point.goodput = (now.within_target - last.within_target) / judged
        load = self._load()
        point.running, point.queued = load.running_prompts, load.queued_prompts
        point.held = load.held_requests
        for worker in self._fleet.workers():
            if (report := worker.report) is not None:
                point.worker_waiting += report.waiting_requests
                point.worker_queued_tokens += report.queued_tokens
        self._points.append(point)
        self.num_points += 1

    def since(self, number: int) -> list[mesh_pb2.MeshPoint]:
        """The kept points, oldest first, without the first `number` of all that were made."""
        wanted = min(self.num_points - number, len(self._points))
        return [self._points[at] for at in range(len(self._points) - wanted, len(self._points))]

    def _totals(self) -> _Totals:
        metrics = self._metrics
        outcomes = list(_series(metrics.requests))
        return _Totals(
            time_s=time.monotonic(),
            requests=sum(value for _, value in outcomes),
            failures=sum(value for outcome, value in outcomes if outcome not in _NOT_FAILED),
            prompt_tokens=_total(metrics.prompt_tokens),
            cached_tokens=_total(metrics.cached_prompt_tokens),
            output_tokens=metrics.generation_tokens.value,
            with_target=metrics.num_with_target,
            within_target=metrics.num_within_target,
            first_token=metrics.time_to_first_token.counts,
            between_tokens=metrics.inter_token_latency.counts,
        )


def page_counts(fleet: Fleet) -> mesh_pb2.PageCounts:
    """Pages of the pools of all workers."""
    pages = mesh_pb2.PageCounts()
    for worker in fleet.workers():
        if (report := worker.report) is not None:
            pages.total += report.total_pages
            pages.free += report.free_pages
            pages.cached += report.cached_pages
            pages.used += report.used_pages
            pages.quarantined += report.quarantined_pages
    return pages


def _series(counter: Counter) -> Iterator[tuple[str, float]]:
    for metric in counter.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                yield next(iter(sample.labels.values()), ""), sample.value


def _total(counter: Counter) -> float:
    return sum(value for _, value in _series(counter))


def _quantiles(
    histogram: LoopHistogram, before: Sequence[int], after: Sequence[int]
) -> mesh_pb2.LatencyQuantiles | None:
    """None: the histogram gained nothing."""
    gained = [new - old for old, new in zip(before, after, strict=True)]
    if not any(gained):
        return None
    p50, p90, p99 = (quantile(histogram.bounds, gained, share) for share in _QUANTILES)
    return mesh_pb2.LatencyQuantiles(p50_s=p50, p90_s=p90, p99_s=p99)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Estimates a quantile as Prometheus' `histogram_quantile` does: linear within a bucket, and
    the last bound for what lies above it.

    Args:
        bounds: Upper bounds of all buckets but the last, ascending.
        counts: Values in each bucket; not all 0.
        share: 0..1.
    """
    rank = share * sum(counts)
    below = 0
    for at, count in enumerate(counts):
        if count and below + count >= rank:
            if at == len(bounds):
                break
            lower = bounds[at - 1] if at else 0.0
            return lower + (bounds[at] - lower) * max(0.0, rank - below) / count
        below += count
    return bounds[-1]
