"""The interface of page indexes that the page owner uses, and the index by key of lower tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from weft.pages.memory.eviction import EvictionPolicy, Key, lru

_MIN_HEAP = 64
"""Heap size up to which stale entries are not removed."""


class Evicted(NamedTuple):
    """A page that has left its index."""

    page: int
    key: bytes
    parent: bytes
    """Key of the page before it in its prompt; empty: unknown."""


class PageIndex(Protocol):
    """Index of published pages. It holds no references: `PageMemory` reports which are in use."""

    def has_page(self, page: int) -> bool: ...

    def mark_unused(self, pages: Sequence[int]) -> None:
        """Marks used indexed pages, each named once, as unused, so that they may be evicted. Those
        named first count as the least recently used.

        Raises:
            KeyError: A page is not indexed.
        """
        ...

    def mark_used(self, pages: Sequence[int]) -> None:
        """Marks unused indexed pages, each named once, as used, so that they may not be evicted.

        Raises:
            KeyError: A page is not indexed.
        """
        ...

    def evict(self) -> Evicted | None:
        """Removes the least valuable unused page from the index and returns it; None: there is
        none.
        """
        ...

    @property
    def num_unused_pages(self) -> int:
        """Number of unused indexed pages."""
        ...

    @property
    def num_evictable_pages(self) -> int:
        """Number of unused pages that consecutive calls of `evict` could return."""
        ...


@dataclass(slots=True, eq=False)
class PageEntry:
    key: bytes
    page: int
    parent: bytes
    group: bytes
    created: int
    last_used: int
    priority: int
    is_used: bool = True
    is_quiet: bool = False
    """Whether the current use is a copy to another tier, which does not refresh the page."""
    ticket: int = 0
    """Ticket of the page's entry in the heaps; 0: it has none."""
    num_hits: int = 0


_Heap = list[tuple[Key, int, PageEntry]]


class _Queues:
    """Unused pages in the order of eviction: pages that no held page follows come first."""

    __slots__ = ("inner", "leaves")

    def __init__(self) -> None:
        self.leaves: _Heap = []
        self.inner: _Heap = []

    def pop(self) -> PageEntry | None:
        for heap in (self.leaves, self.inner):
            while heap:
                _, ticket, entry = heappop(heap)
                if entry.ticket == ticket:
                    return entry
        return None

    def push(self, item: tuple[Key, int, PageEntry], num_entries: int, *, is_leaf: bool) -> None:
        heap = self.leaves if is_leaf else self.inner
        heappush(heap, item)
        if len(heap) > _MIN_HEAP + 2 * num_entries:
            heap[:] = [item for item in heap if item[2].ticket == item[1]]
            heapify(heap)


class PageKeyCache:
    """Index of pages by key, used by lower tiers and the KV store.

    The index may hold a key without its parent; `match` stops at the first gap. If parents are
    given, a page is evicted after the held pages that follow it, where possible.

    Args:
        policy: Order of eviction. A page's last use is the time when its use ended.
        has_groups: Whether `evict_of` is available.
    """

    def __init__(self, policy: EvictionPolicy = lru, *, has_groups: bool = False) -> None:
        self._policy = policy
        self._by_key: dict[bytes, PageEntry] = {}
        self._by_page: dict[int, PageEntry] = {}
        self._num_children: dict[bytes, int] = {}
        """Number of held pages that follow a key, whether or not the key itself is held."""
        self._queues = _Queues()
        self._groups: dict[bytes, _Queues] | None = {} if has_groups else None
        self._group_pages: dict[bytes, int] = {}
        self._num_unused = 0
        self._num_tickets = 0
        self._time = 0

    # -- finding and adding ----------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest indexed prefix of `keys`. Changes nothing."""
        pages: list[int] = []
        for key in keys:
            entry = self._by_key.get(key)
            if entry is None:
                break
            pages.append(entry.page)
        return pages

    def get(self, key: bytes) -> PageEntry | None:
        """The page indexed under a key; None: there is none. Changes nothing."""
        return self._by_key.get(key)

    def insert(
        self,
        key: bytes,
        page: int,
        *,
        parent: bytes = b"",
        group: bytes = b"",
        priority: int = 0,
    ) -> bool:
        """Indexes `page`, which is in use, under a key of 32 bytes. False: another page already has
        the key. `parent` is the key of the page before it, empty if unknown; `group` is for
        `evict_of`.
        """
        if key in self._by_key:
            return False
        self._time += 1
        entry = PageEntry(key, page, parent, group, self._time, self._time, priority)
        self._by_key[key] = entry
        self._by_page[page] = entry
        if parent:
            self._add_child(parent)
        if self._groups is not None:
            self._group_pages[group] = self._group_pages.get(group, 0) + 1
        return True

    def touch(self, pages: Sequence[int], priority: int = 0) -> None:
        """Notes that a reader found these pages."""
        self._time += 1
        for page in pages:
            entry = self._by_page[page]
            entry.last_used = self._time
            entry.num_hits += 1
            entry.priority = min(priority, entry.priority)
            entry.is_quiet = False

    # -- what is in use --------------------------------------------------------------------------

    def has_page(self, page: int) -> bool:
        return page in self._by_page

    def mark_unused(self, pages: Sequence[int]) -> None:
        for page in pages:
            entry = self._by_page[page]
            entry.is_used = False
            if not entry.is_quiet:
                self._time += 1
                entry.last_used = self._time
            entry.is_quiet = False
            self._num_unused += 1
            self._offer(entry)

    def mark_used(self, pages: Sequence[int]) -> None:
        for page in pages:
            entry = self._by_page[page]
            entry.is_used = True
            entry.ticket = 0
            self._num_unused -= 1

    def keep_age(self, page: int) -> None:
        """Marks the current use as a copy to another tier, which does not refresh the page."""
        self._by_page[page].is_quiet = True

    # -- giving up -------------------------------------------------------------------------------

    def evict(self) -> Evicted | None:
        return self._take_out(self._queues.pop())

    def evict_of(self, group: bytes) -> Evicted | None:
        """Like `evict`, among the pages of one group."""
        assert self._groups is not None
        queues = self._groups.get(group)
        return None if queues is None else self._take_out(queues.pop())

    def num_pages_of(self, group: bytes) -> int:
        return self._group_pages.get(group, 0)

    def drop(self, page: int) -> None:
        """Removes a page, used or unused, whose content cannot be trusted."""
        entry = self._by_page.get(page)
        if entry is not None:
            self._remove(entry)

    def _add_child(self, parent: bytes) -> None:
        self._num_children[parent] = self._num_children.get(parent, 0) + 1
        entry = self._by_key.get(parent)
        if entry is not None and not entry.is_used:
            self._offer(entry)

    def _take_out(self, entry: PageEntry | None) -> Evicted | None:
        if entry is None:
            return None
        self._remove(entry)
        return Evicted(entry.page, entry.key, entry.parent)

    def _remove(self, entry: PageEntry) -> None:
        del self._by_key[entry.key]
        del self._by_page[entry.page]
        entry.ticket = 0
        if not entry.is_used:
            self._num_unused -= 1
        if self._groups is not None:
            self._leave_group(entry.group)
        if not entry.parent:
            return
        left = self._num_children[entry.parent] - 1
        if left:
            self._num_children[entry.parent] = left
            return
        del self._num_children[entry.parent]
        parent = self._by_key.get(entry.parent)
        if parent is not None and not parent.is_used:
            self._offer(parent)

    def _leave_group(self, group: bytes) -> None:
        assert self._groups is not None
        self._group_pages[group] -= 1
        if not self._group_pages[group]:
            del self._group_pages[group]
            self._groups.pop(group, None)

    def _offer(self, entry: PageEntry) -> None:
        self._num_tickets += 1
        entry.ticket = self._num_tickets
        item = (self._policy(entry), entry.ticket, entry)
        is_leaf = entry.key not in self._num_children
        self._queues.push(item, len(self._by_page), is_leaf=is_leaf)
        if self._groups is not None:
            queues = self._groups.setdefault(entry.group, _Queues())
            queues.push(item, self._group_pages[entry.group], is_leaf=is_leaf)

    @property
    def num_unused_pages(self) -> int:
        return self._num_unused

    @property
    def num_evictable_pages(self) -> int:
        return self._num_unused
