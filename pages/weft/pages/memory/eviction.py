"""Eviction policies of cached pages: one small key function per policy.

The cache evicts the page with the least key among the pages that no request uses and that no cached
page follows. The pages of a prompt are therefore always evicted from its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

EvictionName = Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]
"""Names of the policies."""


class PageUse(Protocol):
    """Usage record of a cached page. Times are counts of the cache's own events."""

    last_used: int
    created: int
    num_hits: int
    """Number of requests that found it, besides the one that created it."""
    priority: int
    """Lowest priority number of the requests that used it; lower is more urgent."""


Key = tuple[int, ...]
EvictionPolicy = Callable[[PageUse], Key]


def lru(page: PageUse) -> Key:
    """Evicts the least recently used page."""
    return (page.last_used,)


def mru(page: PageUse) -> Key:
    """Evicts the most recently used page: for loops over more than the cache holds."""
    return (-page.last_used,)


def lfu(page: PageUse) -> Key:
    """Evicts the least frequently used page, among equals the least recently used."""
    return (page.num_hits, page.last_used)


def fifo(page: PageUse) -> Key:
    """Evicts the page that was cached first."""
    return (page.created,)


def filo(page: PageUse) -> Key:
    """First in, last out: evicts the page that was cached last."""
    return (-page.created,)


def priority(page: PageUse) -> Key:
    """Evicts pages of the least urgent requests, among equals the least recently used."""
    return (-page.priority, page.last_used)


def slru(page: PageUse) -> Key:
    """Segmented LRU (Karedla, Love and Wherry, 1994), its protected segment unbounded.

    Pages that were never found again go before those that were; in each of the two segments the
    least recently used goes first.
    """
    return (min(page.num_hits, 1), page.last_used)


EVICTION_POLICIES: Mapping[EvictionName, EvictionPolicy] = {
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "mru": mru,
    "filo": filo,
    "priority": priority,
    "slru": slru,
}
