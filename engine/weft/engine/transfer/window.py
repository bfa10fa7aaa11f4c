"""The memory of an engine that peers reach, and how pages get from there to the pool and back.

A window is chosen once, by where the pool lies:

    DirectWindow    the pool is host memory: it is the window itself, nothing is copied
    StagedWindow    the pool is a device's memory: a staging area is the window
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from weft.engine.transfer.digester import Digested, DigestThread
from weft.engine.transfer.fill import PagePort
from weft.engine.transfer.nixl_wire import PoolRegion
from weft.engine.transfer.source import DirectSource, PageSource
from weft.engine.transfer.staged import Mover, StagedPort, StagedSource
from weft.engine.transfer.staging import Pages, StagingArea
from weft.engine.transfer.staging_memory import StagingMemory


class WindowPort(PagePort, Protocol):
    """`PagePort` as its owner sees it."""

    before_digest: Callable[[Pages, Sequence[int]], None] | None
    """Test hook, called with the window and the pages that landed before they are looked at."""

    def take(self) -> list[Digested]:
        """Results since the last call."""
        ...

    def sizes(self) -> dict[str, int]:
        """What waits."""
        ...

    def close(self) -> None:
        """Ends the thread."""
        ...


class PoolWindow(Protocol):
    """What is registered with NIXL, and read and written by the `data` transport."""

    @property
    def pages(self) -> Pages:
        """uint8 `[num_pages, page_bytes]`."""
        ...

    def region(self) -> PoolRegion:
        """The same memory, as NIXL is told of it."""
        ...

    @property
    def staging(self) -> StagingArea | None:
        """None: the window is the pool."""
        ...

    def source(self, *, has_digests: bool) -> PageSource:
        """For the shipping thread."""
        ...

    def port(self, wake: Callable[[], None], *, has_digests: bool) -> WindowPort:
        """For the engine; with a thread of its own."""
        ...

    def describe(self) -> str:
        """What it costs, for people; empty: nothing."""
        ...

    def close(self) -> None:
        """Gives the memory back, once source and port are closed."""
        ...


class DirectWindow:
    """Implements `PoolWindow` over a pool in host memory.

    Args:
        pool: uint8 `[num_pages, page_bytes]`, contiguous.
    """

    staging = None

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self.pages: Pages = pool
        self._pool = pool

    def region(self) -> PoolRegion:
        """See `PoolWindow.region`."""
        return PoolRegion.of_array(self._pool)

    def source(self, *, has_digests: bool) -> DirectSource:
        """See `PoolWindow.source`."""
        return DirectSource(self._pool, has_digests=has_digests)

    def port(self, wake: Callable[[], None], *, has_digests: bool) -> DigestThread:
        """See `PoolWindow.port`."""
        return DigestThread(self._pool, wake)

    def describe(self) -> str:
        """See `PoolWindow.describe`."""
        return ""

    def close(self) -> None:
        """The pool is not this object's."""


class StagedWindow:
    """Implements `PoolWindow` over a pool that peers do not reach.

    Args:
        area: What they reach instead.
        memory: Of the area.
        mover: Copies between the two.
    """

    def __init__(self, area: StagingArea, memory: StagingMemory, mover: Mover) -> None:
        self.staging = area
        self.pages = area.pages
        self.region = memory.region
        self._kind = memory.describe()
        self._mover = mover

    def source(self, *, has_digests: bool) -> StagedSource:
        """See `PoolWindow.source`."""
        return StagedSource(self.staging, self._mover, has_digests=has_digests)

    def port(self, wake: Callable[[], None], *, has_digests: bool) -> StagedPort:
        """See `PoolWindow.port`."""
        return StagedPort(self.staging, self._mover, wake, has_digests=has_digests)

    def describe(self) -> str:
        """See `PoolWindow.describe`."""
        num_pages, page_bytes = self.pages.shape
        return (
            f"staged through {num_pages:,} pages of {self._kind} "
            f"({num_pages * page_bytes / 2**30:.2f} GiB: {self.staging.num_landing:,} to receive, "
            f"{self.staging.num_sending:,} to send)"
        )

    def close(self) -> None:
        """See `PoolWindow.close`."""
        self._mover.close()
