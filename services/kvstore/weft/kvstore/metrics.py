"""The store's Prometheus metrics, read when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from weft.common.worker.metrics import QUARANTINE_METRIC, QUARANTINE_TEXT, tier_metrics
from weft.kvstore.store import KvStore

GAUGES = {
    "open_puts": "Puts in work",
    "open_fills": "Fills under way",
    "open_holds": "Workers that read pages by themselves",
}
COUNTERS = {
    "lookups": "Prompts looked up",
    "lookup_pages": "Keys asked for",
    "hit_pages": "Leading keys that were held",
    "puts": "Puts taken into work",
    "puts_refused": "Puts refused: too many in work, or pages of another size",
    "puts_failed": "Puts not read in time, or cut off",
    "offered_pages": "Pages of puts",
    "stored_pages": "Pages taken",
    "present_pages": "Pages that were held already",
    "refused_pages": "Pages not taken: damaged, or no room",
    "digest_mismatches": "Pages of puts that arrived damaged",
    "bytes_in": "Bytes of pages taken",
    "bytes_out": "Bytes of pages written to owners",
    "corrupt_reports": "Reports of readers that a page did not have its digest",
    "corrupt_pages": "Pages whose bytes in the arena were wrong",
    "held_pages": "Pages kept still for workers that read them",
    "flushed_pages": "Pages dropped by operators",
    "evicted_pages": "Pages given up for others",
    "quota_evicted_pages": "Pages given up for others of a namespace that has all it may have",
    "fills_accepted": "Fills taken",
    "fills_declined": "Fills declined",
    "fills_done": "Fills ended with all of their pages",
    "fills_stopped": "Fills stopped by their owner",
    "filled_pages": "Pages written to owners",
}
"""Help texts of the store's counters; counters without one are exported under their bare names."""
BACKEND_GAUGES = {
    "backend_nodes": "Valkey nodes that have pages",
    "backend_nodes_resting": "Of these, left alone after failures",
}
BACKEND_COUNTERS = {
    "backend_calls": "Batches of commands, each to one node",
    "backend_failed_calls": "Of these, broken or too late",
    "backend_skipped_commands": "Commands not sent, since their node is left alone",
    "backend_redirections": "Commands that another node has to be asked",
}


class StoreCollector(Collector):
    """Converts the store's state to metrics. The scraping thread reads the store, so only single
    numbers are read.
    """

    def __init__(self, store: KvStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        counts = self._store.counts()
        pages = GaugeMetricFamily("weft_kv_pages", "KV pages by state", labels=["state"])
        pages.add_metric(["free"], counts.free)
        pages.add_metric(["cached"], counts.cached)
        pages.add_metric(["pinned"], counts.used)
        pages.add_metric(["quarantined"], counts.quarantined)
        yield pages
        yield GaugeMetricFamily(QUARANTINE_METRIC, QUARANTINE_TEXT, self._store.quarantine_over_s)
        yield GaugeMetricFamily(
            "weft_kvstore_arena_bytes", "Size of the arena", self._store.arena_bytes
        )
        tiers = self._store.tiers()
        yield from tier_metrics(tiers)
        for name, value in self._store.backend_sizes().items():
            yield GaugeMetricFamily(f"weft_kvstore_{name}", BACKEND_GAUGES[name], value)
        for name, text in BACKEND_COUNTERS.items():
            for tier in tiers:
                if name in tier.counters:
                    yield CounterMetricFamily(f"weft_kvstore_{name}", text, tier.counters[name])
        for name, value in self._store.all_counters().items():
            if name in GAUGES:
                yield GaugeMetricFamily(f"weft_kvstore_{name}", GAUGES[name], value)
            else:
                text = COUNTERS.get(name, name)
                yield CounterMetricFamily(f"weft_kvstore_{name}", text, value)
