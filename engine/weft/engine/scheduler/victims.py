"""Choice of the requests to preempt when pages run out or a more urgent request needs them."""

from __future__ import annotations

from collections.abc import Iterable

from weft.engine.requests.request import Request
from weft.pages.memory.page_memory import PageMemory


class Victims:
    """Orders running requests by the cost of preempting them.

    Where priorities count, the least urgent request goes first. Among equals, the request with the
    fewest tokens in pages that no other request uses goes first, since it loses the least work. So
    the request with the most work always continues, and some request always ends.
    """

    def __init__(self, memory: PageMemory, page_size: int, *, by_priority: bool) -> None:
        self._memory = memory
        self._page_size = page_size
        self._by_priority = by_priority

    def first(self, running: Iterable[Request]) -> Request:
        return min(running, key=self._key)

    def order(self, running: Iterable[Request]) -> list[Request]:
        return sorted(running, key=self._key)

    def num_own_pages(self, request: Request) -> int:
        """Number of pages that only this request uses, which preemption would free."""
        return len(request.held.pages) - self._memory.num_shared_pages(request.held.pages)

    def _key(self, request: Request) -> tuple[int, int, int]:
        num_shared = self._memory.num_shared_pages(request.held.pages) * self._page_size
        lost = max(0, request.num_computed - num_shared)
        return (-request.priority if self._by_priority else 0, lost, -request.arrival)
