"""Host memory as a tier's medium."""

from __future__ import annotations

import contextlib
import mmap
from typing import Protocol

import numpy as np
from weft.contract import faults
from weft.contract.layout import PagePart
from weft.contract.pages import Page
from weft.pages.memory.eviction import EvictionPolicy
from weft.pages.tiers.keyed import KeyedPages, PagePlace
from weft.pages.tiers.tier import Tier


class Pinned(Protocol):
    """Memory that a device copies from and to directly, until `close`."""

    def close(self) -> None: ...


def map_memory(num_bytes: int) -> mmap.mmap:
    """The kernel allocates the memory when it is written to, in huge pages where it has some."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # The kernel has no huge pages.
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class HostMemory:
    """Implements `Medium` over one range of memory.

    The system provides the memory only when it is written to or pinned, in huge pages if it has
    some.

    Raises:
        OSError, OverflowError: There is not so much memory.
    """

    def __init__(self, num_slots: int, page_bytes: int) -> None:
        mapping = map_memory(num_slots * page_bytes)
        self.rows = np.frombuffer(mapping, np.uint8).reshape(num_slots, page_bytes)
        self.pinned: Pinned | None = None
        """Pins the memory for the pool's device, which then copies from and to it directly; None:
        not pinned.
        """

    def row(self, place: PagePlace) -> Page:
        row: Page = self.rows[place.slot - 1]
        return row

    def read(self, place: PagePlace, into: Page) -> bool:
        self._damage(place)
        np.copyto(into, self.row(place))
        return True

    def read_part(self, place: PagePlace, into: Page, part: PagePart) -> bool:
        self._damage(place)
        np.copyto(slices_of(into, part), slices_of(self.row(place), part))
        return True

    def write(self, place: PagePlace, content: Page) -> None:
        np.copyto(self.row(place), content)

    def remove(self, place: PagePlace) -> None:
        """Does nothing: the next page overwrites the slot."""

    def direct(self, place: PagePlace, *, is_read: bool) -> Page | None:
        if self.pinned is None:
            return None
        if is_read:
            self._damage(place)
        return self.row(place)

    def close(self) -> None:
        """Unpins the memory. No copy may be under way."""
        if self.pinned is not None:
            self.pinned.close()
            self.pinned = None

    def _damage(self, place: PagePlace) -> None:
        if faults.TIER_HOST.is_armed:
            faults.TIER_HOST.flip_bit(self.rows, [place.slot - 1])


def slices_of(page: Page, part: PagePart) -> Page:
    """The ranges of a part of a page [page_bytes], as [count, size]."""
    slices: Page = page.reshape(part.num_ranges, part.stride)[
        :, part.begin : part.begin + part.size
    ]
    return slices


def host_tier(num_slots: int, page_bytes: int, policy: EvictionPolicy) -> tuple[Tier, HostMemory]:
    """Creates a tier of `num_slots` pages in host memory, and that memory.

    Raises:
        OSError, OverflowError: There is not so much memory.
    """
    memory = HostMemory(num_slots, page_bytes)
    return Tier("host", KeyedPages(num_slots, policy), memory, page_bytes), memory
