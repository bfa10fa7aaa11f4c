"""First come, first served."""

from __future__ import annotations

from weft.engine.scheduler.policies.base import SortedQueue


class FcfsQueue(SortedQueue):
    """Admits in the order of submission: no request can starve."""
