"""The owner of page ids: free list, reference counts, cache membership, quarantine.

Every usable page is in exactly one of four states:

    free         reference count 0, not indexed; its content is not needed
    used         reference count >= 1 (requests, reservations of fills, shipping)
    cached       reference count 0, indexed; evictable unless a page that follows it is used
    quarantined  a write to it may still arrive; leaves only by `end_quarantine`

Page 0 is the null page: it is never allocated and takes the writes of padding rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from weft.pages.memory.prefix_cache import Evicted, PageIndex

NULL_PAGE = 0


def step_reserve(max_step_tokens: int, page_size: int) -> int:
    """Pages of the prompt tokens of two steps, one of which is planned while the other runs."""
    return -(-2 * max_step_tokens // page_size)


class OutOfPages(Exception):
    """Fewer pages are available than requested. The scheduler handles this error."""


class PageCounts(NamedTuple):
    """Pages by state; free + cached + used + quarantined = total."""

    free: int
    cached: int
    used: int
    quarantined: int
    total: int


class PageMemory:
    """Reference-counted pages over one pool.

    Args:
        num_pages: Pages of the pool, the null page included.
        index: Index of published pages; None: no prefix caching.
        tracks_freed: Whether freed pages are remembered for `take_freed`, which the caller must
            then call.
    """

    def __init__(
        self, num_pages: int, index: PageIndex | None, *, tracks_freed: bool = False
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages = {num_pages}: the pool needs at least 2 pages")
        self._num_pages = num_pages
        self._index = index
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._num_refs = [0] * num_pages
        self._quarantined: set[int] = set()
        self._promised = 0
        self._num_used = 0
        self._freed: list[int] | None = [] if tracks_freed else None
        self._namespaces: list[bytes | None] = [None] * num_pages
        self._wipes: list[int] = []
        self.num_evictions = 0
        self.on_published: list[Callable[[int, bytes, bytes], None]] = []
        """Called with every page that was indexed, its key, and the key of the page before it."""
        self.on_evicted: list[Callable[[bytes], None]] = []
        """Called with the key of every page that left the index."""
        self.on_reclaimed: Callable[[Evicted], None] | None = None
        """Called with every page that left the index to make room. Its content stays until a write,
        which may come with the next step.
        """

    @property
    def num_usable_pages(self) -> int:
        """Number of the pool's pages without the null page."""
        return self._num_pages - 1

    @property
    def num_promised_pages(self) -> int:
        """Pages reserved for admitted requests that have not taken them yet."""
        return self._promised

    @property
    def num_free_pages(self) -> int:
        """Pages without references and without useful content."""
        return len(self._free)

    @property
    def num_available_pages(self) -> int:
        """Pages that `allocate` can return beyond the reserved ones."""
        evictable = self._index.num_evictable_pages if self._index else 0
        return len(self._free) + evictable - self._promised

    def promise(self, num_pages: int) -> None:
        """Reserves pages for an admitted request, which takes them with `promised=True`.

        Raises:
            OutOfPages: Not that many are available.
        """
        if num_pages > self.num_available_pages:
            raise OutOfPages(f"{num_pages} pages wanted, {self.num_available_pages} available")
        self._promised += num_pages

    def unpromise(self, num_pages: int) -> None:
        """Releases the rest of a reservation."""
        assert 0 <= num_pages <= self._promised, "promise given back twice"
        self._promised -= num_pages

    def allocate(
        self, num_pages: int, namespace: bytes = b"", *, promised: bool = False
    ) -> list[int]:
        """Allocates pages with one reference each, evicting cached ones as needed.

        Args:
            namespace: Namespace of the KV that the pages will hold. Pages that held KV of another
                namespace must be wiped before their next use (`take_wipes`).
            promised: Whether the pages come out of an earlier `promise`.

        Raises:
            OutOfPages: Not that many are available; nothing changed.
        """
        if promised:
            self.unpromise(num_pages)
        elif num_pages > self.num_available_pages:
            raise OutOfPages(f"{num_pages} pages wanted, {self.num_available_pages} available")
        while len(self._free) < num_pages:
            evicted = self._evict()
            assert evicted is not None, "promised more pages than exist"
            self.num_evictions += 1
            if self.on_reclaimed is not None:
                self.on_reclaimed(evicted)
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._num_refs[page] = 1
            if self._namespaces[page] != namespace:
                if self._namespaces[page] is not None:
                    self._wipes.append(page)
                self._namespaces[page] = namespace
        self._num_used += num_pages
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds one reference to each page, which must be used or cached.

        This may take cached pages that were promised to others. If `num_available_pages` is
        negative afterwards, the caller must release the pages again.
        """
        refs, unused = self._num_refs, []
        for page in pages:
            if not refs[page]:
                unused.append(page)
            refs[page] += 1
        if unused:
            assert self._index is not None, f"pages {unused} are nobody's"
            self._index.mark_used(unused)
            self._num_used += len(unused)

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference of each page; without references it becomes cached or free.

        The pages of a prompt are released from the last to the first, so that the last one is
        evicted first: earlier pages are useful without later ones, but not the other way round.
        """
        refs, index, cached, num_ended = self._num_refs, self._index, [], 0
        for page in reversed(pages):
            left = refs[page] - 1
            assert left >= 0, f"page {page} released twice"
            refs[page] = left
            if left:
                continue
            num_ended += 1
            if index is not None and index.has_page(page):
                cached.append(page)
            else:
                self._set_free(page)
        self._num_used -= num_ended
        if cached:
            assert index is not None
            index.mark_unused(cached)

    def reclaim(self) -> Evicted | None:
        """Evicts the least valuable cached page and returns it with one reference.

        The page still has its cached content. None: there is no such page.
        """
        evicted = self._index.evict() if self._index is not None else None
        if evicted is not None:
            self._num_refs[evicted.page] = 1
            self._num_used += 1
            self._tell_evicted(evicted)
        return evicted

    def forget(self, page: int) -> None:
        """Frees an unreferenced page that the index has already dropped."""
        assert self.is_unreferenced(page)
        assert self._index is None or not self._index.has_page(page)
        self._set_free(page)

    def is_unreferenced(self, page: int) -> bool:
        return self._num_refs[page] == 0

    def num_shared_pages(self, pages: Iterable[int]) -> int:
        """Number of leading pages that other users reference as well."""
        return sum(1 for _ in takewhile(lambda page: self._num_refs[page] > 1, pages))

    def published(self, page: int, key: bytes, parent: bytes) -> None:
        """Notes that a page in use was indexed, so that its content must not change from now on."""
        for listener in self.on_published:
            listener(page, key, parent)

    def is_published(self, page: int) -> bool:
        """Whether the page is indexed, so that its content must not change."""
        return self._index is not None and self._index.has_page(page)

    def quarantine(self, pages: Iterable[int]) -> None:
        """Quarantines pages with exactly one reference that were never published."""
        for page in pages:
            assert self._num_refs[page] == 1, f"page {page} is shared"
            assert self._index is None or not self._index.has_page(page)
            self._num_refs[page] = 0
            self._num_used -= 1
            self._quarantined.add(page)

    def end_quarantine(self, pages: Iterable[int]) -> None:
        """Frees quarantined pages. The caller has proof that no write can arrive any more."""
        for page in pages:
            self._quarantined.remove(page)
            self._set_free(page)

    def take_freed(self) -> list[int]:
        """Pages that became free since the last call and are still free, for poisoning."""
        if not self._freed:
            return []
        freed, self._freed = self._freed, []
        return sorted(set(freed).intersection(self._free))

    def take_wipes(self) -> list[int]:
        """Pages that changed namespace since the last call. They must be zeroed before any other
        use.
        """
        wipes, self._wipes = self._wipes, []
        return wipes

    def flush_cache(self) -> int:
        """Evicts every unused page and returns their number."""
        count = 0
        while self._evict() is not None:
            count += 1
        return count

    def counts(self) -> PageCounts:
        cached = self._index.num_unused_pages if self._index else 0
        free, quarantined = len(self._free), len(self._quarantined)
        return PageCounts(free, cached, self._num_used, quarantined, self.num_usable_pages)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is in exactly one state."""
        counts = self.counts()
        assert counts.free + counts.cached + counts.used + counts.quarantined == counts.total, (
            counts
        )
        assert counts.used == sum(1 for refs in self._num_refs if refs), "used pages miscounted"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self._quarantined
        for page in free | self._quarantined:
            assert self._num_refs[page] == 0
            assert self._index is None or not self._index.has_page(page)
        assert NULL_PAGE not in free

    def _evict(self) -> Evicted | None:
        evicted = self._index.evict() if self._index is not None else None
        if evicted is None:
            return None
        self._set_free(evicted.page)
        self._tell_evicted(evicted)
        return evicted

    def _tell_evicted(self, evicted: Evicted) -> None:
        for listener in self.on_evicted:
            listener(evicted.key)

    def _set_free(self, page: int) -> None:
        self._free.append(page)
        if self._freed is not None:
            self._freed.append(page)
