"""The store's pages: their keys and digests, and what is being read or written.

Pure bookkeeping over a pool, for one thread (the event loop). A page of the arena is in one state:

    free         has no content
    cached       held under its key, evictable
    pinned       reserved for a put (not yet held), or held and being read by a fill
    quarantined  a read that was to write it has not ended
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from weft.contract.store import Offer
from weft.pages.memory.eviction import EvictionPolicy, lru
from weft.pages.memory.page_memory import PageCounts, PageMemory
from weft.pages.memory.prefix_cache import PageKeyCache

GROUP_BYTES = 8
"""Leading bytes of a namespace that name the group in which its pages are counted."""


@dataclass(eq=False, slots=True)
class Incoming:
    """The pages of a put: reserved pages for new content, and pins on pages already held."""

    offers: list[Offer]
    """Pages to store."""
    pages: list[int]
    """Reserved page numbers, one per offer."""
    held: list[int]
    """The reserved and the pinned pages, in the order of the put."""
    num_present: int
    num_refused: int
    """Number of offers for which there was no room."""
    group: bytes = b""


def group_of(namespace: bytes) -> bytes:
    """Group by which a namespace's pages are counted."""
    return namespace[:GROUP_BYTES]


class PageStore:
    """Pages by key over one pool, uint8 `[num_pages, page_bytes]`, whose page 0 is not used.
    `namespace_quota` is the share of the pages that one namespace may have; 1: all.
    """

    def __init__(
        self,
        pool: NDArray[np.uint8],
        policy: EvictionPolicy = lru,
        namespace_quota: float = 1.0,
    ) -> None:
        self.pool = pool
        self._cache = PageKeyCache(policy, has_groups=True)
        self._max_group_pages: int | None = None
        if namespace_quota < 1:
            self._max_group_pages = max(1, int((len(pool) - 1) * namespace_quota))
        self._num_incoming: Counter[bytes] = Counter()
        self.memory = PageMemory(len(pool), self._cache)
        """Owner of the page numbers."""
        self._digests = np.zeros(len(pool), np.uint64)
        self._incoming: set[bytes] = set()
        self.num_quota_evictions = 0
        """Pages evicted for others of their namespace, which was at its quota."""
        self.on_published: Callable[[Sequence[Offer], bytes], None] | None = None
        """Called with newly published pages and their group."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return int(self.pool.shape[1])

    def num_held(self, keys: Sequence[bytes]) -> int:
        """Number of leading keys that are held. Changes nothing, not even the order of eviction."""
        return len(self._cache.match(keys))

    def held_of(self, keys: Sequence[bytes]) -> set[bytes]:
        """The keys among these that are held. Changes nothing."""
        return {key for key in keys if self._cache.get(key) is not None}

    def pin(self, keys: Sequence[bytes]) -> list[int]:
        """Pins the pages of the leading keys that are held, until `unpin`."""
        pages = self._cache.match(keys)
        self.memory.retain(pages)
        self._cache.touch(pages)
        return pages

    def page_of(self, key: bytes) -> int | None:
        """The page of a key; None: it is not held."""
        entry = self._cache.get(key)
        return None if entry is None else entry.page

    def hold(self, page: int) -> None:
        """Like `pin`, for a copy to another tier: does not count as a use of the page."""
        was_used = not self.memory.is_unreferenced(page)
        self.memory.retain([page])
        if not was_used:
            self._cache.keep_age(page)

    def unpin(self, pages: Sequence[int]) -> None:
        """Unpins pages of one chain, first page first."""
        self.memory.release(pages)

    def digests_of(self, pages: Sequence[int]) -> list[int]:
        """Digests that the pages had when they arrived."""
        found: list[int] = self._digests[np.asarray(pages, np.int64)].tolist()
        return found

    # -- puts ------------------------------------------------------------------------------------

    def begin(self, offers: Sequence[Offer], group: bytes = b"") -> Incoming:
        """Reserves pages for offers neither held nor being received, evicting as needed.

        If there is no room for all, the first ones are taken. Pages that are already held are
        pinned, so that their successors do not evict them. A namespace at its quota evicts pages of
        its own.

        Args:
            offers: Pages with different keys.
            group: Group of their namespace (`group_of`).
        """
        present: dict[bytes, int] = {}
        wanted: list[Offer] = []
        num_on_their_way = 0
        for offer in offers:
            if offer.key in self._incoming:
                num_on_their_way += 1
            elif pages := self.pin([offer.key]):
                present[offer.key] = pages[0]
            else:
                wanted.append(offer)
        room = self._make_room(group, len(wanted))
        taken = wanted[: min(room, self.memory.num_available_pages)]
        pages = self.memory.allocate(len(taken))
        self._incoming.update(offer.key for offer in taken)
        self._num_incoming[group] += len(taken)
        place = present | {offer.key: page for offer, page in zip(taken, pages, strict=True)}
        return Incoming(
            offers=taken,
            pages=pages,
            held=[place[offer.key] for offer in offers if offer.key in place],
            num_present=len(present) + num_on_their_way,
            num_refused=len(wanted) - len(taken),
            group=group,
        )

    def _make_room(self, group: bytes, num_wanted: int) -> int:
        """Evicts pages of a namespace that would exceed its quota; returns how many pages it may
        add.
        """
        limit = self._max_group_pages
        if limit is None:
            return num_wanted
        num_held = self._cache.num_pages_of(group) + self._num_incoming[group]
        while num_held + num_wanted > limit:
            evicted = self._cache.evict_of(group)
            if evicted is None:
                break
            self.memory.forget(evicted.page)
            self.num_quota_evictions += 1
            num_held -= 1
        return max(0, limit - num_held)

    def publish(self, incoming: Incoming, digests: Sequence[int]) -> list[tuple[Offer, int]]:
        """Ends a put whose bytes are in their pages, and publishes the pages with the right digest.
        `digests` are those of the bytes in `incoming.pages`. Returns the offers whose pages have a
        wrong digest, with that digest; their pages are free again.
        """
        bad: list[tuple[Offer, int]] = []
        for offer, page, digest in zip(incoming.offers, incoming.pages, digests, strict=True):
            if digest != offer.digest:
                bad.append((offer, digest))
                continue
            self._digests[page] = digest
            is_new = self._cache.insert(offer.key, page, parent=offer.parent, group=incoming.group)
            assert is_new, "two puts of one key"
        self._end(incoming)
        if self.on_published is not None:
            self.on_published(incoming.offers, incoming.group)
        return bad

    def abandon(self, incoming: Incoming) -> None:
        """Ends a failed put whose pages can no longer be written to."""
        self._end(incoming)

    def quarantine(self, incoming: Incoming) -> None:
        """Ends a put whose pages may still be written to; `end_quarantine` must follow."""
        reserved = set(incoming.pages)
        self.memory.quarantine(incoming.pages)
        incoming.held = [page for page in incoming.held if page not in reserved]
        self._end(incoming)

    def end_quarantine(self, incoming: Incoming) -> None:
        """Ends the quarantine, once the pages can no longer be written to."""
        self.memory.end_quarantine(incoming.pages)

    def _end(self, incoming: Incoming) -> None:
        self._incoming.difference_update(offer.key for offer in incoming.offers)
        self._num_incoming[incoming.group] -= len(incoming.offers)
        if not self._num_incoming[incoming.group]:
            del self._num_incoming[incoming.group]
        self.memory.release(incoming.held)

    # -- the rest --------------------------------------------------------------------------------

    def drop(self, key: bytes, page: int) -> None:
        """Drops a pinned page, unless its key refers to another page by now."""
        if self._cache.match([key]) == [page]:
            self._cache.drop(page)

    def flush(self) -> int:
        """Drops every page that is not being read; returns how many."""
        return self.memory.flush_cache()

    def counts(self) -> PageCounts:
        """Pages by state; `used` are the pinned ones."""
        return self.memory.counts()
