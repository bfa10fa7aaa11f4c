"""Staging pages, through which the pages of a pool on a device are transferred.

Peers read and write this area; copies between the area and the pool
(`weft.engine.transfer.mover`) carry the pages further. The area has two parts:

    landing    destinations of fills. A page belongs to a fill from before its filler is asked until
               its content is accepted, or until it is certain that no write to it can arrive.
               States as in a pool: free, used or quarantined.
    sending    sources of shipped or put pages: free, or used while a peer may read them.

Peers never read landing pages and never write sending pages. The parts share no pages, so that
neither direction waits for room of the other.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable

from weft.contract.fills import StagingCounts
from weft.contract.pages import StagingPages


class StagingArea:
    """Allocates staging pages. Thread-safe: the shipping thread takes and frees pages as well.

    Args:
        pages: uint8 `[num_pages, page_bytes]`, contiguous, in memory that outlives the area.
        num_landing: Pages of the landing part, at least 1 and less than `num_pages`.

    Raises:
        ValueError: One part would be empty.
    """

    def __init__(self, pages: StagingPages, num_landing: int) -> None:
        if not 1 <= num_landing < len(pages):
            raise ValueError(f"{num_landing} landing pages of {len(pages)}")
        self.pages = pages
        self.num_landing = num_landing
        self.num_sending = len(pages) - num_landing
        self._landing = _FreePages(range(num_landing))
        self._sending = _FreePages(range(num_landing, len(pages)))
        self._quarantined: set[int] = set()
        self._lock = threading.Lock()

    @property
    def max_chunk_pages(self) -> int:
        """Most pages of one chunk, so that the next can be copied while one is in transit."""
        return max(1, self.num_sending // 4)

    def take_landing(self, count: int) -> list[int] | None:
        """Allocates destinations for a fill, as contiguous as possible; None: too few are free."""
        with self._lock:
            return self._landing.take(count)

    def free_landing(self, pages: Iterable[int]) -> None:
        """Frees pages that no write can reach any more."""
        with self._lock:
            self._landing.give(pages)

    def quarantine(self, pages: Iterable[int]) -> None:
        """Quarantines landing pages in use, since a write to them may still arrive."""
        with self._lock:
            for page in pages:
                assert page < self.num_landing, f"page {page} is no landing page"
                assert page not in self._quarantined
                assert not self._landing.has(page), f"staging page {page} is free"
                self._quarantined.add(page)

    def end_quarantine(self, pages: Iterable[int]) -> None:
        """Frees quarantined pages. The caller has proof that no write can arrive."""
        pages = list(pages)
        with self._lock:
            for page in pages:
                self._quarantined.remove(page)
            self._landing.give(pages)

    def take_sending(self, count: int, *, keep: int = 0) -> list[int] | None:
        """Allocates pages for sending; None: fewer than `count + keep` pages are free."""
        with self._lock:
            return self._sending.take(count) if len(self._sending) >= count + keep else None

    def free_sending(self, pages: Iterable[int]) -> None:
        """Frees pages that no peer reads any more."""
        with self._lock:
            self._sending.give(pages)

    def counts(self) -> StagingCounts:
        with self._lock:
            free, quarantined = len(self._landing) + len(self._sending), len(self._quarantined)
        total = len(self.pages)
        return StagingCounts(free, total - free - quarantined, quarantined, total)


class _FreePages:
    """Lowest page numbers first, so that pages taken together tend to be contiguous."""

    def __init__(self, pages: range) -> None:
        self._range = pages
        self._heap = list(pages)
        self._set = set(pages)

    def __len__(self) -> int:
        return len(self._heap)

    def has(self, page: int) -> bool:
        return page in self._set

    def take(self, count: int) -> list[int] | None:
        if count > len(self._heap):
            return None
        taken = [heapq.heappop(self._heap) for _ in range(count)]
        self._set.difference_update(taken)
        return taken

    def give(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert page in self._range, f"staging page {page} is of the other part"
            assert page not in self._set, f"staging page {page} is freed twice"
            self._set.add(page)
            heapq.heappush(self._heap, page)
