"""Prometheus metrics of the gateway, under the field's usual names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from weft.contract.codec.pairs import FILL_SOURCES, TRANSPORTS
from weft.v1 import common_pb2

_TTFT_BUCKETS_S = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
DURATION_BUCKETS_S = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 600.0),
)
_TOKEN_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_TARGET_OUTCOMES = ("met", "late_first_token", "slow_tokens", "refused", "failed", "cancelled")


class LoopCounter(Collector):
    """A counter for one writer thread, without a lock."""

    def __init__(self, name: str, documentation: str) -> None:
        self._name = name
        self._documentation = documentation
        self.value = 0

    def collect(self) -> Iterator[Metric]:
        """Collects the value; called by the metrics endpoint's thread."""
        yield CounterMetricFamily(self._name, self._documentation, value=self.value)


class LoopHistogram(Collector):
    """A histogram for one writer thread, without a lock or label lookup per observation."""

    def __init__(self, name: str, documentation: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Counts a value, in the unit of the buckets, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper bounds of its buckets but the last, which has none."""
        return self._bounds

    @property
    def counts(self) -> tuple[int, ...]:
        """Values observed so far, by bucket."""
        return tuple(self._counts)

    def collect(self) -> Iterator[Metric]:
        """Collects the values; called by the metrics endpoint's thread."""
        family = HistogramMetricFamily(self._name, self._documentation)
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), tuple(self._counts), strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
        family.add_metric([], buckets, self._sum)
        yield family


class _NoHistogram(LoopHistogram):
    def observe(self, value: float, count: int = 1) -> None: ...


class _Gauges(Collector):
    def __init__(self, sources: dict[str, tuple[str, Callable[[], float]]]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        for name, (documentation, read) in self._sources.items():
            yield GaugeMetricFamily(name, documentation, value=read())


class GatewayMetrics:
    def __init__(self, is_on: bool = True) -> None:
        """With `is_on` False nobody reads metrics, and histograms observe nothing."""
        self._histogram_class = LoopHistogram if is_on else _NoHistogram
        self.registry = CollectorRegistry()
        self._add_latencies()
        self._add_sizes()
        self._add_fills()
        self._add_outcomes()
        self._add_losses()

    def _add_latencies(self) -> None:
        self.time_to_first_token = self.histogram(
            "weft_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            _TTFT_BUCKETS_S,
        )
        self.inter_token_latency = self.histogram(
            "weft_inter_token_latency_seconds",
            "Between consecutive tokens of a sample; tokens that come together share the time.",
            _ITL_BUCKETS_S,
        )
        self.request_duration = self.histogram(
            "weft_request_duration_seconds", "Whole request.", DURATION_BUCKETS_S
        )
        self.time_per_output_token = self.histogram(
            "weft_time_per_output_token_seconds",
            "Mean time between the tokens of a request, after its first.",
            _ITL_BUCKETS_S,
        )
        self.queue_time = self.histogram(
            "weft_request_queue_time_seconds",
            "Of a prompt on its decode worker, before anything was done for it.",
            _TTFT_BUCKETS_S,
        )
        self.prefill_time = self.histogram(
            "weft_request_prefill_time_seconds",
            "Of a prompt on its decode worker: from its admission to its first token, fills "
            "included.",
            _TTFT_BUCKETS_S,
        )
        self.decode_time = self.histogram(
            "weft_request_decode_time_seconds",
            "Of a prompt on its decode worker: from its first token to its end.",
            DURATION_BUCKETS_S,
        )

    def _add_sizes(self) -> None:
        self.request_prompt_tokens = self.histogram(
            "weft_request_prompt_tokens", "Tokens of a prompt.", _TOKEN_BUCKETS
        )
        self.request_generation_tokens = self.histogram(
            "weft_request_generation_tokens",
            "Tokens generated for a prompt, over its samples.",
            _TOKEN_BUCKETS,
        )
        self.prompt_tokens = self._counter("weft_prompt_tokens", "Prompt tokens accepted.")
        self.cached_prompt_tokens = self._counter(
            "weft_cached_prompt_tokens", "Prompt tokens whose KV came from the owner's cache."
        )
        self.generation_tokens = LoopCounter("weft_generation_tokens", "Tokens generated.")
        self.registry.register(self.generation_tokens)

    def _add_fills(self) -> None:
        self.fills = Counter(
            "weft_fills",
            "Fills and loads of prompts that have ended, by source (prefill, kvstore, host, disk) "
            "and outcome.",
            ["source", "outcome"],
            registry=self.registry,
        )
        self.fill_bytes = Counter(
            "weft_fill_bytes",
            "Bytes of pages that those fills brought, by source and transport.",
            ["source", "transport"],
            registry=self.registry,
        )
        self.kv_changes = self._counter(
            "weft_kv_changes", "Changes of workers' prefix caches that were followed."
        )
        self.kv_snapshots = self._counter(
            "weft_kv_snapshots", "Snapshots of workers' prefix caches that were taken."
        )
        self.kv_gaps = self._counter(
            "weft_kv_gaps", "Changes that were missing: a snapshot was asked for."
        )

    def _add_outcomes(self) -> None:
        self.requests = Counter(
            "weft_requests",
            "Requests ended, by outcome: ok, or the failure's reason in lower case.",
            ["outcome"],
            registry=self.registry,
        )
        self.rate_limited = Counter(
            "weft_rate_limited",
            "Requests refused by a limit, by scope (global, tenant) and kind (requests, tokens).",
            ["scope", "kind"],
            registry=self.registry,
        )
        self.num_with_target = self.num_within_target = 0
        """Numbers of finished requests with a target, and of those that met it."""
        self.model_requests = Counter(
            "weft_model_requests",
            "Requests for a model that there is ended, by model and outcome.",
            ["model", "outcome"],
            registry=self.registry,
        )
        self.slo_requests = Counter(
            "weft_slo_requests",
            "Requests with a latency target ended, by outcome: met, late_first_token, slow_tokens, "
            "refused, failed, cancelled.",
            ["outcome"],
            registry=self.registry,
        )
        # All outcomes start at 0: a rate over a series that begins with its first event would miss
        # that event.
        for outcome in _TARGET_OUTCOMES:
            self.slo_requests.labels(outcome)
        for scope, kind in product(("global", "tenant"), ("requests", "tokens")):
            self.rate_limited.labels(scope, kind)

    def _add_losses(self) -> None:
        self.retries = self._counter(
            "weft_request_retries", "Submissions repeated on another decode worker."
        )
        self.resumptions = self._counter(
            "weft_request_resumptions", "Streams that had begun and lost their decode worker."
        )
        self.resume_pause = self.histogram(
            "weft_resume_pause_seconds",
            "From the loss of a decode worker to the next token from another one.",
            DURATION_BUCKETS_S,
        )
        self.session_losses = self._counter(
            "weft_session_losses", "Sessions with decode workers that broke."
        )

    def observe_prompt(
        self, timeline: common_pb2.Timeline, num_prompt_tokens: int, num_generated: int
    ) -> None:
        """Counts a prompt that has ended. `timeline` is the owner's report, empty if there was
        none; `num_generated` is over all samples.
        """
        self.request_prompt_tokens.observe(num_prompt_tokens)
        self.request_generation_tokens.observe(num_generated)
        for fill in timeline.fills:
            source = FILL_SOURCES[fill.source] or "unknown"
            self.fills.labels(source, "failed" if fill.failure else "ok").inc()
            if fill.bytes:
                transport = TRANSPORTS[fill.transport] or "unknown"
                self.fill_bytes.labels(source, transport).inc(fill.bytes)
        if not timeline.HasField("finish_time"):
            return
        finish_s = timeline.finish_time.ToNanoseconds() / 1e9
        # A prompt without `queued_time` waited in the queue until its end.
        has_left = timeline.HasField("queued_time")
        queued_s = timeline.queued_time.ToNanoseconds() / 1e9 if has_left else finish_s
        self.queue_time.observe(queued_s)
        if not timeline.HasField("first_token_time"):
            return
        first_s = timeline.first_token_time.ToNanoseconds() / 1e9
        self.prefill_time.observe(max(0.0, first_s - queued_s))
        self.decode_time.observe(max(0.0, finish_s - first_s))

    def observe_targets(self, outcome: str) -> None:
        """Counts an ended request with a target. `outcome` is that of `Answer.target_outcome`."""
        self.slo_requests.labels(outcome).inc()
        self.num_with_target += 1
        self.num_within_target += outcome == "met"

    def add_gauges(self, sources: dict[str, tuple[str, Callable[[], float]]]) -> None:
        """Adds values read on demand: name -> (documentation, function)."""
        self.registry.register(_Gauges(sources))

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> LoopHistogram:
        histogram = self._histogram_class(name, text, buckets)
        self.registry.register(histogram)
        return histogram

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)
