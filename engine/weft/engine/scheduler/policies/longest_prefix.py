"""Admits the longest cached prefix first, so that cached pages are used before they are evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice

from weft.engine.requests.request import Request
from weft.engine.scheduler.policies.base import SortedQueue

WINDOW = 64
"""Number of oldest requests among which one is chosen."""
MAX_LOOK_UPS = 4
"""Most lookups in the prefix cache for each call of `candidates`."""


class LongestPrefixQueue(SortedQueue):
    """Admits, of the `WINDOW` oldest requests, the one with the most cached tokens.

    A lookup costs time. So each call looks up a few prompts, those with an unknown or the oldest
    length first; the others keep the length of their last lookup. A request that has waited for
    `ageing_s` goes before all that have not, in the order of submission.

    Args:
        ageing_s: Seconds of waiting after which the prefix does not count.
        num_cached_tokens: Looks a request's prompt up; changes nothing.
    """

    def __init__(self, ageing_s: float, num_cached_tokens: Callable[[Request], int]) -> None:
        super().__init__()
        self._ageing_s = ageing_s
        self._num_cached_tokens = num_cached_tokens
        self._known: dict[Request, tuple[int, int]] = {}
        """Number of cached tokens, and the turn of the lookup."""
        self._turn = 0

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._known.pop(request, None)

    def candidates(self, now: float) -> Iterator[Request]:
        first = list(islice(self, WINDOW))
        self._look_up(first)
        aged = now - self._ageing_s
        young = [request for request in first if request.timeline.submitted_at > aged]
        # Sorting is stable: equal ones stay in the order of submission.
        young.sort(key=lambda request: -self._known[request][0])
        return chain(first[: len(first) - len(young)], young)

    def _look_up(self, first: list[Request]) -> None:
        self._turn += 1
        known = self._known
        never = (0, -1)
        stalest = sorted(first, key=lambda request: known.get(request, never)[1])
        for request in stalest[:MAX_LOOK_UPS]:
            known[request] = (self._num_cached_tokens(request), self._turn)
        for request in first:
            known.setdefault(request, never)
