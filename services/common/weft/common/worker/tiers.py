"""Conversion of tier reports for the wire."""

from __future__ import annotations

from weft.contract.reports import TierReport
from weft.v1 import kv_pb2


def tier_to_proto(tier: TierReport) -> kv_pb2.TierState:
    """A tier's state for the wire."""
    return kv_pb2.TierState(
        name=tier.name,
        total_pages=tier.total_pages,
        free_pages=tier.free_pages,
        cached_pages=tier.cached_pages,
        used_pages=tier.used_pages,
        load_bytes_per_second=tier.load_bytes_per_s,
        counters=tier.counters,
    )
