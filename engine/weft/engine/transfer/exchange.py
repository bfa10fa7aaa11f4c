"""The memory of an engine that peers access, and the transfer between it and the pool.

The location of the pool determines the exchange at start:

    DirectExchange    the pool is host memory: peers access the pool itself, without copies
    StagedExchange    the pool is a device's memory: a staging area is the exchange
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from weft.engine.base.pages import StagingPages
from weft.engine.transfer.digester import Digested, DigestThread
from weft.engine.transfer.nixl_wire import PoolRegion
from weft.engine.transfer.page_port import PagePort
from weft.engine.transfer.source import DirectSource, PageSource
from weft.engine.transfer.staged import StagedPort, StagedSource, StagingMover
from weft.engine.transfer.staging import StagingArea
from weft.engine.transfer.staging_memory import StagingMemory


class ExchangePort(PagePort, Protocol):
    """A `PagePort` with the methods for the code that created it."""

    before_digest: Callable[[StagingPages, Sequence[int]], None] | None
    """Test hook, called with the exchange and the landed pages before they are read."""

    @property
    def is_moving(self) -> bool:
        """Whether `has_moved` is to be asked: nobody wakes the engine."""
        ...

    def has_moved(self) -> bool:
        """Whether `take` has something of which nobody has woken the engine. Takes microseconds."""
        ...

    def take(self) -> list[Digested]:
        """Results since the last call."""
        ...

    def sizes(self) -> dict[str, int]:
        """Sizes of its queues."""
        ...

    def close(self) -> None:
        """Stops the thread."""
        ...


class PageExchange(Protocol):
    """The memory that NIXL registers, and that the `data` transport reads and writes."""

    @property
    def pages(self) -> StagingPages:
        """The exchange's bytes, uint8 `[num_pages, page_bytes]`."""
        ...

    def region(self) -> PoolRegion:
        """The exchange's memory as described to NIXL."""
        ...

    @property
    def staging(self) -> StagingArea | None:
        """The staging area; None: the exchange is the pool."""
        ...

    def source(self, *, has_digests: bool) -> PageSource:
        """The page source for the shipping thread."""
        ...

    def port(self, wake: Callable[[], None], *, has_digests: bool) -> ExchangePort:
        """The engine's port to the exchange, with a thread of its own."""
        ...

    def describe(self) -> str:
        """Describes the memory that the exchange takes, for people; empty: none."""
        ...

    def close(self) -> None:
        """Releases the memory, once source and port are closed."""
        ...


class DirectExchange:
    """Implements `PageExchange` over a pool in host memory.

    Args:
        pool: uint8 `[num_pages, page_bytes]`, contiguous.
    """

    staging = None

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self.pages: StagingPages = pool
        self._pool = pool

    def region(self) -> PoolRegion:
        """See `PageExchange.region`."""
        return PoolRegion.of_array(self._pool)

    def source(self, *, has_digests: bool) -> DirectSource:
        """See `PageExchange.source`."""
        return DirectSource(self._pool, has_digests=has_digests)

    def port(self, wake: Callable[[], None], *, has_digests: bool) -> DigestThread:
        """See `PageExchange.port`."""
        return DigestThread(self._pool, wake)

    def describe(self) -> str:
        """See `PageExchange.describe`."""
        return ""

    def close(self) -> None:
        """Does nothing: the pool is owned elsewhere."""


class StagedExchange:
    """Implements `PageExchange` over a pool that peers cannot reach.

    Args:
        area: The staging pages that peers reach instead.
        memory: Memory of the area.
        mover: Copies between pool and area.
    """

    def __init__(self, area: StagingArea, memory: StagingMemory, mover: StagingMover) -> None:
        self.staging = area
        self.pages = area.pages
        self.region = memory.region
        self._kind = memory.describe()
        self._mover = mover

    def source(self, *, has_digests: bool) -> StagedSource:
        """See `PageExchange.source`."""
        return StagedSource(self.staging, self._mover, has_digests=has_digests)

    def port(self, wake: Callable[[], None], *, has_digests: bool) -> StagedPort:
        """See `PageExchange.port`."""
        return StagedPort(self.staging, self._mover, wake, has_digests=has_digests)

    def describe(self) -> str:
        """See `PageExchange.describe`."""
        num_pages, page_bytes = self.pages.shape
        return (
            f"staged through {num_pages:,} pages of {self._kind} "
            f"({num_pages * page_bytes / 2**30:.2f} GiB: {self.staging.num_landing:,} to receive, "
            f"{self.staging.num_sending:,} to send)"
        )

    def close(self) -> None:
        """See `PageExchange.close`."""
        self._mover.close()
