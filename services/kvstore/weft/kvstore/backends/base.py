"""What an arena's pages are kept in besides, where they outlive it: one small interface.

memory   the arena alone, or with local disk below it (`disk.py`)
valkey   a Valkey or Redis server or cluster, which any number of stores share (`valkey.py`)
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from weft.engine.messages import TierReport
from weft.kvstore.pages import PageStore


class Backend(Protocol):
    """Copies of an arena's pages. Belongs to the event loop.

    It takes pages by `PageStore.on_published`. Whatever breaks in it is a miss or a page that is
    not kept: nothing here raises for that.
    """

    async def look_up(self, keys: Sequence[bytes]) -> int:
        """Leading keys that are in the arena or kept; what is kept alone begins to come back."""
        ...

    async def fetch(self, keys: Sequence[bytes]) -> None:
        """Brings leading keys to the arena, as far as that is done in time."""
        ...

    async def flush(self) -> int:
        """Forgets every page that nobody reads; returns how many."""
        ...

    def report(self) -> TierReport:
        """State and counters."""
        ...

    def sizes(self) -> dict[str, int]:
        """What there is now of servers and the like, by name; empty: nothing to tell."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Ends tasks and threads; what is not kept by then is lost.

        Args:
            timeout_s: For pages on their way.
        """
        ...


class BackendSource(Protocol):
    """Where a back end comes from, and all there is of it until the size of a page is known."""

    async def page_bytes_of(self, key: bytes) -> int:
        """Size of a page that an earlier store, or another one, has left; 0: it is not there."""
        ...

    def open(
        self, pages: PageStore, namespace_quota: float, threads: ThreadPoolExecutor
    ) -> Backend | None:
        """A back end for pages of one size; None, in words: it cannot be had.

        Args:
            pages: What the arena holds.
            namespace_quota: Share of the back end that one namespace may have, where it can tell.
            threads: Where bytes move.
        """
        ...

    async def flush(self) -> int:
        """Forgets what was left, before there is a back end; returns how many pages."""
        ...

    def describe(self) -> str:
        """State, for people; empty: there is nothing to tell."""
        ...

    async def close(self) -> None:
        """Lets go of everything; the back end was closed before."""
        ...
