"""A worker's Prometheus metrics: its engine's newest load report, read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from weft.contract.adapters import AdapterPlace, AdapterState
from weft.contract.fills import StagingCounts
from weft.contract.reports import LoadReport, TierReport

COUNTERS = {
    "fills_started": "Fills asked for, as their owner",
    "fills_done": "Fills that ended with all of their pages, as their owner",
    "fills_declined": "Fills that the filler did not take, as their owner",
    "fills_failed": "Fills that ended early, as their owner",
    "fills_avoided": "Fillers passed over since they had not answered about earlier fills",
    "accepted_pages": "Pages filled by others and accepted",
    "accepted_bytes": "Bytes of pages filled by others and accepted",
    "digest_mismatches": "Chunks that arrived damaged",
    "stale_events": "Events of leases that were closed or stopping",
    "local_decisions": "Prompt remainders that ran here though there was a filler",
    "expired_sessions": "Chat sessions that lost their pins since they were still for too long",
    "released_sessions": "Chat sessions that their clients ended",
    "displaced_sessions": "Chat sessions that lost their pins to others, by quota",
    "leases_accepted": "Fills taken, as their filler",
    "leases_declined": "Fills declined, as their filler",
    "leases_done": "Fills ended with all of their pages, as their filler",
    "leases_stopped": "Fills stopped by their owner, as their filler",
    "computed_tokens": "Prompt tokens computed for others",
    "shipped_pages": "Pages written into other workers' pools",
    "shipped_bytes": "Bytes written into other workers' pools",
    "store_lookups": "Prompts looked up in the KV store",
    "store_lookup_pages": "Pages of those prompts",
    "store_hit_pages": "Pages that the KV store said it holds",
    "store_put_pages": "Pages offered to the KV store",
    "store_stored_pages": "Pages that the KV store took",
    "store_dropped_pages": "Pages not put: no room in the queue, or no answer from the KV store",
    "steps": "Engine steps",
    "prompt_tokens": "Prompt tokens computed here",
    "generated_tokens": "Tokens generated here",
    "surplus_tokens": "Tokens drawn for requests that ended while the step was under way",
    "speculated_steps": "Steps in which drafts were verified",
    "verified_runs": "Requests with drafts in those steps",
    "tree_runs": "Of these, those whose drafts formed a tree",
    "drafted_tokens": "Drafts that were verified",
    "accepted_tokens": "Drafts that were what the model drew",
    "adapter_reads": "LoRA adapters read from disk",
    "adapter_writes": "LoRA adapters written into their rows on the device",
    "adapter_evictions": "LoRA adapters that gave their rows to another one",
    "preemptions": "Running requests that gave their pages back",
    "urgent_preemptions": "Of these, for a more urgent request",
    "prefix_waits": "Requests that waited for pages that another one was computing",
    "prefix_query_tokens": "Prompt tokens looked up in this worker's prefix cache",
    "prefix_hit_tokens": "Prompt tokens found in this worker's prefix cache",
    "partial_page_hits": "Matches that ended inside a page, which was copied",
    "evicted_pages": "Cached pages given up for others",
    "encoded_media": "Images, or their tiles, that the image tower has encoded",
    "encoded_patches": "Their patches",
    "empty_steps": "Steps of other workers in which this one only computed its experts",
    "gathered_rows": "Rows of layers sent to other workers' experts, all to each of them",
    "dispatched_rows": "Rows of layers sent to other workers' experts, each where it has some",
    "reused_media": "Times that a step took rows which an earlier step had encoded",
}
"""Help texts of the engine's counters; counters without one are exported under their bare names."""
TIMES = {
    "busy_us": ("weft_engine_busy_seconds", "Time that the engine spent in steps"),
    "stage_us": (
        "weft_engine_stage_seconds",
        "Time with steps under way in a pipeline, of all its stages together",
    ),
    "expert_wait_us": (
        "weft_engine_expert_wait_seconds",
        "Time in steps spent waiting for workers that share experts",
    ),
    "bubble_us": (
        "weft_engine_bubble_seconds",
        "Of it, time in which stages had nothing to compute",
    ),
}
"""Metrics in seconds, and their help texts, of counters in microseconds."""
TIER_COUNTERS = {
    "queried_pages": "Pages that requests lacked and looked for in a tier",
    "hit_pages": "Of these, found",
    "loaded_pages": "Pages loaded from a tier",
    "loaded_bytes": "Bytes of pages loaded from a tier",
    "load_us": "Time that loads from a tier took",
    "saved_pages": "Pages saved to a tier",
    "saved_bytes": "Bytes of pages saved to a tier",
    "save_us": "Time that saves to a tier took, those within a step not counted",
    "evicted_pages": "Pages of a tier given up for others",
    "dropped_pages": "Pages that a tier did not take, or lost on their way to the next one",
    "corrupt_pages": "Pages loaded that were not what was saved",
    "stalls": "Times that a tier stood still for too long, and was let be until it went on",
    "failed_loads": "Pages of a tier that could not be read",
    "failed_saves": "Pages that could not be written to a tier",
}
QUARANTINE_METRIC = "weft_kv_quarantine_over_limit_seconds"
QUARANTINE_TEXT = "Time for which more than --max-quarantine-fraction has been in quarantine"


class EngineCollector(Collector):
    """Converts load reports to metrics.

    Args:
        load: The newest report, None before the first.
        loop_age_s: Seconds since the engine's last turn.
        adapters: States of the engine's adapters.
    """

    def __init__(
        self,
        load: Callable[[], LoadReport | None],
        loop_age_s: Callable[[], float],
        adapters: Callable[[], Collection[AdapterState]] = tuple,
    ) -> None:
        self._load = load
        self._loop_age_s = loop_age_s
        self._adapters = adapters

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        if load is None:
            return
        yield from _gauges(load, self._loop_age_s())
        yield from tier_metrics(load.tiers)
        yield from _adapter_metrics(self._adapters())
        for name, value in load.counters.items():
            if name == "open_fills":
                yield GaugeMetricFamily("weft_open_fills", "Leases not closed yet", value)
            elif name in TIMES:
                metric, text = TIMES[name]
                yield CounterMetricFamily(metric, text, value / 1e6)
            else:
                yield CounterMetricFamily(f"weft_engine_{name}", COUNTERS.get(name, name), value)


def tier_metrics(tiers: Sequence[TierReport]) -> Iterator[Metric]:
    """Metrics of the tiers below a pool or an arena, if any."""
    if not tiers:
        return
    pages = GaugeMetricFamily(
        "weft_tier_pages", "Pages of a tier below the pool, by state", labels=["tier", "state"]
    )
    speed = GaugeMetricFamily(
        "weft_tier_load_bytes_per_second", "Measured speed of loads from a tier", labels=["tier"]
    )
    for tier in tiers:
        pages.add_metric([tier.name, "free"], tier.free_pages)
        pages.add_metric([tier.name, "cached"], tier.cached_pages)
        pages.add_metric([tier.name, "used"], tier.used_pages)
        speed.add_metric([tier.name], tier.load_bytes_per_s)
    yield pages
    yield speed
    for name, text in TIER_COUNTERS.items():
        is_time = name.endswith("_us")
        shown = f"{name.removesuffix('_us')}_seconds" if is_time else name
        family = CounterMetricFamily(f"weft_tier_{shown}", text, labels=["tier"])
        for tier in tiers:
            value = tier.counters.get(name, 0)
            family.add_metric([tier.name], value / 1e6 if is_time else value)
        yield family


def _adapter_metrics(adapters: Collection[AdapterState]) -> Iterator[Metric]:
    """Leaves out the adapters' names, of which there may be thousands."""
    count = GaugeMetricFamily(
        "weft_adapters",
        "LoRA adapters of this worker, by state: loading, disk, host, device, failed",
        labels=["state"],
    )
    size = GaugeMetricFamily(
        "weft_adapter_bytes", "Bytes of the weights of these adapters", labels=["state"]
    )
    for state in get_args(AdapterPlace):
        found = [one for one in adapters if one.state == state]
        count.add_metric([state], len(found))
        size.add_metric([state], sum(one.num_bytes for one in found))
    yield count
    yield size
    yield GaugeMetricFamily(
        "weft_adapter_requests",
        "Requests here that use an adapter",
        sum(one.num_requests for one in adapters),
    )


def _by(label: str, name: str, text: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _gauges(load: LoadReport, loop_age_s: float) -> Iterator[Metric]:
    requests = {
        "running": load.running_requests,
        "waiting": load.waiting_requests,
        "filling": load.filling_requests,
    }
    yield _by("state", "weft_requests", "Requests by state", requests)
    yield GaugeMetricFamily("weft_sessions", "Chat sessions with pinned pages", load.sessions)
    text = "KV pages that are given up last, for chat sessions; cached or used"
    yield GaugeMetricFamily("weft_session_pinned_pages", text, load.pinned_pages)
    pages = {
        "free": load.free_pages,
        "cached": load.cached_pages,
        "used": load.used_pages,
        "quarantined": load.quarantined_pages,
    }
    yield _by("state", "weft_kv_pages", "KV pages by state", pages)
    text = "Pages of layers whose pages are freed behind a sliding window, by plane and state"
    windows = GaugeMetricFamily("weft_kv_window_pages", text, labels=["plane", "state"])
    for plane, counts_of in load.window_pages.items():
        for state, count in asdict(counts_of).items():
            windows.add_metric([plane, state], count)
    if windows.samples:
        yield windows
    if (blocks := load.state_counts) is not None:
        text = "Blocks of recurrent layers, by state"
        counts = {"free": blocks.free, "cached": blocks.cached, "used": blocks.used}
        yield _by("state", "weft_state_blocks", text, counts)
    text = "Pages of host memory in front of a KV pool on a GPU, by state"
    staged = load.staging or StagingCounts(free=0, used=0, quarantined=0, total=0)
    counts = {"free": staged.free, "used": staged.used, "quarantined": staged.quarantined}
    yield _by("state", "weft_staging_pages", text, counts)
    if load.draft_depths:
        text = "Drafts of a request in a step, as the gate has it, by requests in the step from"
        depths = {str(requests_from): depth for requests_from, depth in load.draft_depths.items()}
        yield _by("requests", "weft_draft_tokens", text, depths)
    in_use = load.used_pages + load.quarantined_pages
    for name, text, value in (
        (
            "weft_kv_usage_ratio",
            "Share of the KV pool that is in use or quarantined, 0 to 1",
            in_use / max(1, load.total_pages),
        ),
        (
            QUARANTINE_METRIC,
            QUARANTINE_TEXT,
            load.quarantine_over_s,
        ),
        (
            "weft_queued_tokens",
            "Prompt tokens not computed yet, nor cached as far as is known",
            load.queued_tokens,
        ),
        ("weft_engine_loop_age_seconds", "Age of the engine's last turn", loop_age_s),
        (
            "weft_engine_stale_after_seconds",
            "Age from which the engine counts as stalled",
            load.stale_after_s,
        ),
        (
            "weft_prefill_tokens_per_second",
            "Measured prefill rate",
            load.prefill_tokens_per_second,
        ),
        (
            "weft_decode_tokens_per_second",
            "Tokens generated a second, over all requests",
            load.decode_tokens_per_second,
        ),
        (
            "weft_decode_step_seconds",
            "Mean time of the latest steps in which requests decoded",
            load.decode_step_s,
        ),
        (
            "weft_new_token_ratio",
            "Share of their max_tokens that requests are expected to generate, for admission",
            load.new_token_ratio,
        ),
    ):
        yield GaugeMetricFamily(name, text, value)
    if (experts := load.experts) is not None:
        yield GaugeMetricFamily(
            "weft_expert_imbalance",
            "Work of the rank with most work for experts over the mean of all; 0: not known",
            experts.imbalance,
        )
        for name, text, number in (
            ("placements", "Layers whose experts got other ranks", experts.num_placements),
            ("moves", "Experts that were copied to another rank", experts.num_moved),
            ("failures", "Layers that kept them, since a copy failed", experts.num_failed),
        ):
            yield CounterMetricFamily(f"weft_expert_{name}", text, number)
    if (weights := load.weights) is not None:
        yield CounterMetricFamily(
            "weft_weight_updates", "Updates of the weights that ended well", weights.num_updates
        )
        states = GaugeMetricFamily(
            "weft_weights_state",
            "1 for the state of the weights, and for the pause by a trainer, if there is one",
            labels=["state"],
        )
        for state in filter(None, (weights.state, weights.pause and f"paused_{weights.pause}")):
            states.add_metric([state], 1)
        yield states
