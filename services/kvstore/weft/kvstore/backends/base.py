"""The interface of back ends, which keep an arena's pages beyond the arena's life.

memory   the arena alone, or with local disk below it (`disk.py`)
valkey   a Valkey or Redis server or cluster, which any number of stores share (`valkey.py`)
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from weft.contract.reports import TierReport
from weft.kvstore.pages import PageStore


class Backend(Protocol):
    """Copies of an arena's pages. Used by the event loop.

    It receives pages through `PageStore.on_published`. A failure in it causes a miss or a page that
    is not kept, and is never raised.
    """

    async def look_up(self, keys: Sequence[bytes]) -> int:
        """Number of leading keys in the arena or the back end."""
        ...

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Starts fetching those of the keys, which `look_up` found, that are not in the arena."""
        ...

    async def held_of(self, keys: Sequence[bytes]) -> set[bytes]:
        """The keys among these that the back end holds."""
        ...

    async def fetch(self, keys: Sequence[bytes]) -> None:
        """Fetches leading keys to the arena, as far as time allows."""
        ...

    async def flush(self) -> int:
        """Drops every page that is not being read; returns how many."""
        ...

    def report(self) -> TierReport:
        """Current state and counters."""
        ...

    def sizes(self) -> dict[str, int]:
        """Numbers of servers and the like, by name; empty: nothing to report."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Stops tasks and threads. Pages not saved within `timeout_s` are lost."""
        ...


class BackendSource(Protocol):
    """A factory of a back end, for the time until the size of a page is known."""

    async def page_bytes_of(self, key: bytes) -> int:
        """Bytes of a page that an earlier or another store left; 0: none."""
        ...

    def open(
        self, pages: PageStore, namespace_quota: float, threads: ThreadPoolExecutor
    ) -> Backend | None:
        """Creates a back end for pages of one size; None: not possible, as logged.
        `namespace_quota` is the share of the back end that one namespace may have; a back end
        without namespaces ignores it.
        """
        ...

    async def flush(self) -> int:
        """Drops the pages of an earlier store, before a back end is open; returns how many."""
        ...

    def describe(self) -> str:
        """Describes its state, for people; empty: nothing to report."""
        ...

    async def close(self) -> None:
        """Releases everything, after the back end was closed."""
        ...
