"""Host memory as a tier's medium."""

from __future__ import annotations

import contextlib
import mmap
from typing import Protocol

import numpy as np
from weft.engine import faults
from weft.engine.memory.eviction import EvictionPolicy
from weft.engine.tiers.keyed import KeyedPages, Place
from weft.engine.tiers.tier import Page, Tier


class Pinned(Protocol):
    """Memory that a device copies from and to by itself, until `close`."""

    def close(self) -> None:
        """Unpins it."""
        ...


class HostMemory:
    """Implements `Medium` over one range of memory.

    It takes no memory of the system before it is written to or pinned, and huge pages where there
    are some.

    Args:
        num_slots: Pages that fit.
        page_bytes: Of a page.

    Raises:
        OSError: There is not so much memory.
    """

    def __init__(self, num_slots: int, page_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = mmap.mmap(-1, num_slots * page_bytes, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # A kernel without them.
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self.rows = np.frombuffer(mapping, np.uint8).reshape(num_slots, page_bytes)
        self.pinned: Pinned | None = None
        """The pool's device copies from and to here by itself."""

    def row(self, place: Place) -> Page:
        """A slot's bytes."""
        row: Page = self.rows[place.slot - 1]
        return row

    def read(self, place: Place, into: Page) -> bool:
        """See `Medium.read`."""
        self._damage(place)
        np.copyto(into, self.row(place))
        return True

    def write(self, place: Place, content: Page) -> None:
        """See `Medium.write`."""
        np.copyto(self.row(place), content)

    def remove(self, place: Place) -> None:
        """See `Medium.remove`: the slot is written over."""

    def direct(self, place: Place, *, is_read: bool) -> Page | None:
        """See `Medium.direct`."""
        if self.pinned is None:
            return None
        if is_read:
            self._damage(place)
        return self.row(place)

    def close(self) -> None:
        """Nobody copies any more."""
        if self.pinned is not None:
            self.pinned.close()
            self.pinned = None

    def _damage(self, place: Place) -> None:
        if faults.TIER_HOST.is_armed:
            faults.TIER_HOST.flip_bit(self.rows, [place.slot - 1])


def host_tier(num_slots: int, page_bytes: int, policy: EvictionPolicy) -> tuple[Tier, HostMemory]:
    """A tier of so many pages in host memory, and that memory.

    Raises:
        OSError: There is not so much memory.
    """
    memory = HostMemory(num_slots, page_bytes)
    return Tier("host", KeyedPages(num_slots, policy), memory, page_bytes), memory
