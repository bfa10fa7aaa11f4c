"""Whose pages are taken when there are none left, or somebody more urgent needs them."""

from __future__ import annotations

from collections.abc import Iterable

from weft.engine.memory.kv_memory import KvMemory
from weft.engine.scheduler.state import Request


class Victims:
    """Orders running requests by what their pre-emption costs.

    The least urgent goes first, where priorities count; of equal ones the one that loses the least
    work, that is, has the fewest tokens whose KV nobody else uses. So the request with the most
    work always goes on, and somebody always ends.

    Args:
        memory: the page owner.
        page_size: token positions a page.
        by_priority: priorities count.
    """

    def __init__(self, memory: KvMemory, page_size: int, *, by_priority: bool) -> None:
        self._memory = memory
        self._page_size = page_size
        self._by_priority = by_priority

    def first(self, running: Iterable[Request]) -> Request:
        """Who goes first."""
        return min(running, key=self._key)

    def order(self, running: Iterable[Request]) -> list[Request]:
        """All of them, who goes first at the front."""
        return sorted(running, key=self._key)

    def num_own_pages(self, request: Request) -> int:
        """Pages that nobody else uses: what a pre-emption brings."""
        return len(request.pages) - self._memory.num_shared_pages(request.pages)

    def _key(self, request: Request) -> tuple[int, int, int]:
        num_shared = self._memory.num_shared_pages(request.pages) * self._page_size
        lost = max(0, request.num_computed - num_shared)
        return (-request.priority if self._by_priority else 0, lost, -request.arrival)
