"""The memory of an engine that peers access, and the transfer between it and the pool.

The location of the pool determines the exchange at start:

    DirectExchange    the pool is host memory: peers access the pool itself, without copies
    LandingExchange   the pool is host memory, and fillers of this host map landing pages before it
    StagedExchange    the pool is a device's memory: a staging area is the exchange
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from weft.contract.pages import StagingPages
from weft.engine.transfer.mover import PageMover
from weft.engine.transfer.staged import StagedPort, StagedSource
from weft.engine.transfer.staging import StagingArea
from weft.engine.transfer.staging_memory import StagingMemory
from weft.pages.transfer.digester import DigestThread
from weft.pages.transfer.nixl_wire import PoolRegion
from weft.pages.transfer.shared_memory import MemoryFile
from weft.pages.transfer.source import PageSource


class DirectExchange:
    """A pool in host memory, which NIXL registers, and which the `data` transport reads and writes.

    Args:
        pool: uint8 `[num_pages, page_bytes]`, contiguous.
    """

    staging = None
    """None: the exchange is the pool itself."""

    memory = None
    """What processes of this host map to write pages there; None: they cannot."""

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self.pages: StagingPages = pool
        self._pool = pool

    def region(self) -> PoolRegion:
        return PoolRegion.of_array(self._pool)

    def source(self, *, has_digests: bool) -> PageSource:
        return PageSource(self._pool, has_digests=has_digests)

    def port(self, wake: Callable[[], None], *, has_digests: bool) -> DigestThread:
        """The engine's port to the exchange, with a separate thread."""
        return DigestThread(self._pool, wake)

    def describe(self) -> str:
        """Describes the memory that the exchange takes, for people; empty: it takes none."""
        return ""

    def close(self) -> None:
        """Does nothing: the exchange does not own the pool."""


class LandingExchange:
    """A pool in host memory, before which lie landing pages that fillers of this host map. Pages
    leave from the pool itself.

    The pool is not mapped by others, since shared memory has no huge pages on most systems: its
    first use costs ten times as much, and reading it in steps some more.

    Args:
        pool: uint8 `[num_pages, page_bytes]`, contiguous.
        area: Its pages lie in `memory`, from its beginning on.
    """

    def __init__(self, pool: NDArray[np.uint8], area: StagingArea, memory: MemoryFile) -> None:
        self.staging = area
        self.memory = memory
        self.pages: StagingPages = area.pages
        self._pool = pool

    def region(self) -> PoolRegion:
        """The memory that pages leave from."""
        return PoolRegion.of_array(self._pool)

    def source(self, *, has_digests: bool) -> PageSource:
        return PageSource(self._pool, has_digests=has_digests)

    def port(self, wake: Callable[[], None], *, has_digests: bool) -> DigestThread:
        """The engine's port to the exchange, with a separate thread."""
        return DigestThread(self._pool, wake, self.memory.array.reshape(self.pages.shape))

    def describe(self) -> str:
        num_pages, page_bytes = self.pages.shape
        return f"{num_pages:,} landing pages, {num_pages * page_bytes / 2**30:.2f} GiB at most"

    def close(self) -> None:
        """Does nothing: the memory is released with the last reference."""


class StagedExchange:
    """A staging area for a pool that peers cannot reach."""

    def __init__(self, area: StagingArea, memory: StagingMemory, mover: PageMover) -> None:
        self.staging = area
        self.pages = area.pages
        self.region = memory.region
        self.memory = memory.shared
        self._kind = memory.describe()
        self._mover = mover

    def source(self, *, has_digests: bool) -> StagedSource:
        return StagedSource(self.staging, self._mover, has_digests=has_digests)

    def port(self, wake: Callable[[], None], *, has_digests: bool) -> StagedPort:
        return StagedPort(self.staging, self._mover, wake, has_digests=has_digests)

    def describe(self) -> str:
        num_pages, page_bytes = self.pages.shape
        return (
            f"staged through {num_pages:,} pages of {self._kind} "
            f"({num_pages * page_bytes / 2**30:.2f} GiB: {self.staging.num_landing:,} to receive, "
            f"{self.staging.num_sending:,} to send)"
        )

    def close(self) -> None:
        """Releases the memory. Source and port must be closed before."""
        self._mover.close()


PageExchange = DirectExchange | LandingExchange | StagedExchange
