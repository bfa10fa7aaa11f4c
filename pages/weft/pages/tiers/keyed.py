"""Bookkeeping of one tier: the place of each page, pins, and the order of eviction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.pages.memory.eviction import EvictionPolicy
from weft.pages.memory.page_memory import PageCounts, PageMemory
from weft.pages.memory.prefix_cache import Evicted, PageKeyCache


class PageName(NamedTuple):
    key: bytes
    """Page key, 32 bytes."""
    parent: bytes
    """Key of the page before it in its prompt; empty: unknown."""
    group: bytes = b""
    """Group in which the page is counted; tiers evict by group."""


class PagePlace(NamedTuple):
    slot: int
    """Slot number, from 1."""
    name: PageName
    digest: int


class KeyedPages:
    """Slots of one tier by page key. For use by one thread.

    free         holds nothing
    cached       held under its key, may be evicted
    pinned       reserved for an incoming page, or being read
    (a tier's slot is never in quarantine, since only this process writes to it)
    """

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        self.cache = PageKeyCache(policy, has_groups=True)
        self.memory = PageMemory(num_slots + 1, self.cache)
        self.memory.on_reclaimed = self._reclaimed
        self._places: dict[int, PagePlace] = {}
        self._incoming: set[bytes] = set()
        self.on_evicted: Callable[[PagePlace], None] = lambda place: None
        """Called with each page that was evicted to make room."""

    def match(self, keys: Sequence[bytes]) -> int:
        """Number of leading keys that are held. Changes nothing."""
        return len(self.cache.match(keys))

    def has(self, key: bytes) -> bool:
        return self.cache.get(key) is not None

    def knows(self, key: bytes) -> bool:
        """Whether the page is held or being written."""
        return key in self._incoming or self.has(key)

    def pin(self, key: bytes, *, is_reader: bool = True) -> PagePlace | None:
        """Pins a page in its place until `unpin`; None: it is not held. If `is_reader`, a request
        reads the page, which renews the page's age.
        """
        entry = self.cache.get(key)
        if entry is None:
            return None
        was_used = entry.is_used
        self.memory.retain([entry.page])
        if is_reader:
            self.cache.touch([entry.page])
        elif not was_used:
            self.cache.keep_age(entry.page)
        return self._places[entry.page]

    def unpin(self, place: PagePlace) -> None:
        self._release(place.slot)

    def reserve(self, key: bytes) -> int | None:
        """Reserves a slot for an incoming page, evicting as needed; `publish` or `abandon` must
        follow. None: the page is already held or being written, or every slot is pinned.
        """
        if self.knows(key) or self.memory.num_available_pages < 1:
            return None
        (slot,) = self.memory.allocate(1)
        self._incoming.add(key)
        return slot

    def publish(self, place: PagePlace, priority: int = 0) -> None:
        name = place.name
        self._incoming.discard(name.key)
        self._places[place.slot] = place
        self.cache.insert(
            name.key, place.slot, parent=name.parent, group=name.group, priority=priority
        )
        self.memory.release([place.slot])

    def abandon(self, key: bytes, slot: int) -> None:
        self._incoming.discard(key)
        self.memory.release([slot])

    def reclaim(self) -> PagePlace | None:
        """Evicts the least valuable page. Its slot stays reserved until `free`."""
        evicted = self.memory.reclaim()
        return None if evicted is None else self._places.pop(evicted.page)

    def evict_of(self, group: bytes) -> PagePlace | None:
        """Evicts the least valuable page of a group. Its slot is then free."""
        evicted = self.cache.evict_of(group)
        if evicted is None:
            return None
        self.memory.forget(evicted.page)
        return self._places.pop(evicted.page)

    def free(self, slot: int) -> None:
        """Frees the slot that `reclaim` kept reserved."""
        self.memory.release([slot])

    def drop(self, key: bytes) -> PagePlace | None:
        """Drops a page, pinned or not, whose content cannot be trusted or is lost."""
        entry = self.cache.get(key)
        if entry is None:
            return None
        place = self._places[entry.page]
        self.memory.retain([entry.page])
        self.cache.drop(entry.page)
        self._release(entry.page)
        return place

    def flush(self) -> list[PagePlace]:
        """Drops every page that is not being read."""
        places = []
        while (place := self.reclaim()) is not None:
            places.append(place)
            self.free(place.slot)
        return places

    def counts(self) -> PageCounts:
        """Slots by state; `used` counts the pinned ones."""
        return self.memory.counts()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is in exactly one state."""
        self.memory.check_integrity()
        counts = self.counts()
        assert counts.cached <= len(self._places) <= counts.cached + counts.used
        assert len(self._incoming) <= counts.used

    def _release(self, slot: int) -> None:
        self.memory.release([slot])
        if not self.cache.has_page(slot) and self.memory.is_unreferenced(slot):
            self._places.pop(slot, None)

    def _reclaimed(self, evicted: Evicted) -> None:
        self.on_evicted(self._places.pop(evicted.page))
