"""Admits the most urgent request first; urgency grows with waiting."""

from __future__ import annotations

from weft.contract.request import MAX_PRIORITY
from weft.engine.requests.request import Request
from weft.engine.scheduler.policies.base import Key, SortedQueue


class PriorityQueue(SortedQueue):
    """Admits by `priority`, lower numbers first; equal ones in the order of submission.

    Each `ageing_s` of waiting counts as one level: a request of priority p that has waited for w
    seconds ranks as p - w / ageing_s. All age alike, so the order between two requests never
    changes, and the queue stays sorted. A request that comes more than MAX_PRIORITY levels' worth
    of seconds later can no longer overtake.

    Args:
        ageing_s: Seconds of waiting that make up for one level.
    """

    def __init__(self, ageing_s: float) -> None:
        super().__init__()
        self._ageing_s = ageing_s

    def key(self, request: Request) -> Key:
        priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, request.priority))
        return (priority * self._ageing_s + request.timeline.submitted_at, request.arrival)

    def rank(self, request: Request) -> float:
        return request.priority
