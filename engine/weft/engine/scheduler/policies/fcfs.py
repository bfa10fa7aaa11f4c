"""First come, first served."""

from __future__ import annotations

from weft.engine.scheduler.policies.base import SortedQueue


class FcfsQueue(SortedQueue):
    """In the order of submission: nothing can starve."""
