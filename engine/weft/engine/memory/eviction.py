"""Which cached page is given up first: one small key function a policy.

The page with the least key goes. Keys are compared among pages that nobody uses and that no other
cached page follows, so a prompt is always given up from its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol


class PageUse(Protocol):
    """What is known of a cached page's use. Times are counts of the cache's own events."""

    last_used: int
    """When somebody used it last."""
    created: int
    """When it was indexed."""
    num_hits: int
    """Requests that found it, its maker not counted."""
    priority: int
    """The least of the requests that used it; less is more urgent."""


Key = tuple[int, ...]
EvictionPolicy = Callable[[PageUse], Key]


def lru(page: PageUse) -> Key:
    """Least recently used."""
    return (page.last_used,)


def mru(page: PageUse) -> Key:
    """Most recently used: for loops over more than the cache holds."""
    return (-page.last_used,)


def lfu(page: PageUse) -> Key:
    """Least frequently used, of those the least recently used."""
    return (page.num_hits, page.last_used)


def fifo(page: PageUse) -> Key:
    """First in, first out."""
    return (page.created,)


def filo(page: PageUse) -> Key:
    """First in, last out: what came first stays."""
    return (-page.created,)


def priority(page: PageUse) -> Key:
    """Pages of the least urgent requests, of those the least recently used."""
    return (-page.priority, page.last_used)


def slru(page: PageUse) -> Key:
    """Segmented LRU (Karedla, Love and Wherry, 1994), its protected segment unbounded.

    Pages that were never found again go before those that were; in each of the two segments the
    least recently used goes first.
    """
    return (min(page.num_hits, 1), page.last_used)


EvictionName = Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]
EVICTION_POLICIES: Mapping[EvictionName, EvictionPolicy] = {
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "mru": mru,
    "filo": filo,
    "priority": priority,
    "slru": slru,
}
