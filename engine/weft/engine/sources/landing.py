"""Memory in which fills arrive, and ownership of its pages until they are accepted.

With a pool in host memory, a fill's destinations are the pool's own pages. With a pool on a device,
they are staging pages, one for each page of the pool to be filled. In that case only this process
writes to the pool's pages, so only staging pages are ever quarantined.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.transfer.staging import StagingArea
from weft.pages.memory.page_memory import PageMemory

ChunkTag = tuple[bytes, int]
"""Identity of a chunk: (lease, chunk)."""


class Landing:
    """The pages that fills write to: reserved, then accepted, released or quarantined. In this
    class they are the pool's own pages.

    In all methods `pages` are pages of the pool, and `landed` are the destinations that `reserve`
    returned for them.

    Args:
        max_fraction: Share of the pool that fills may hold.
    """

    needs_verifying = False
    """Whether chunks pass through `PagePort.verify` even without digests."""

    def __init__(self, memory: PageMemory, max_fraction: float) -> None:
        self._memory = memory
        self._max_fraction = max_fraction

    def max_pages(self, num_beside: int) -> int:
        """Most destinations that all fills may hold at once, including quarantined ones.

        Args:
            num_beside: Pages granted on top of the share, for those that follow pages of KV.
        """
        return self.max_pool_pages(num_beside)

    @property
    def least_pages(self) -> int:
        """Pages below which a larger fill waits instead of starting."""
        return 1

    @property
    def num_usable_pages(self) -> int:
        """Number of pages of which the limit of quarantine is a share."""
        return self._memory.num_usable_pages

    def max_pool_pages(self, num_beside: int) -> int:
        """Most pages of the pool that fills may hold at once: its share and `num_beside` more."""
        num_usable = self._memory.num_usable_pages
        return min(num_usable, max(1, int(num_usable * self._max_fraction)) + num_beside)

    def reserve(self, pages: Sequence[int]) -> list[int]:
        """Reserves destinations for pages of the pool, at most `max_pages` in all."""
        return list(pages)

    def verifying(self, tag: ChunkTag, pages: Sequence[int]) -> None:
        """The port got a chunk. Until `verified` the port may write to the chunk's pages of the
        pool.
        """

    def verified(self, tag: ChunkTag) -> None:
        """The port has finished with a chunk, whose fill may have ended meanwhile."""

    @property
    def num_verifying(self) -> int:
        """Number of chunks whose pages of the pool are being written by this process."""
        return 0

    def accepted(self, landed: Sequence[int]) -> None:
        """Transfers accepted pages to their request. Nothing more can arrive for them."""

    def release(self, pages: Sequence[int], landed: Sequence[int]) -> None:
        """Releases pages of a fill that ended before they were accepted. Nothing can arrive for
        them.
        """
        self._memory.release(pages)

    def quarantine(self, pages: Sequence[int], landed: Sequence[int]) -> None:
        """Quarantines pages of a fill that ended before they were accepted. A write may still
        arrive.
        """
        self._memory.quarantine(pages)

    def end_quarantine(self, landed: Sequence[int]) -> None:
        """Releases destinations once there is proof that no write can arrive any more."""
        self._memory.end_quarantine(landed)


class StagedLanding(Landing):
    """`Landing` for peers that write into a staging area. A chunk's pages of the pool keep a
    separate reference while the copy into them is under way, since its fill may end meanwhile.
    """

    needs_verifying = True

    def __init__(self, memory: PageMemory, area: StagingArea, max_fraction: float) -> None:
        super().__init__(memory, max_fraction)
        self._area = area
        self._verifying: dict[ChunkTag, list[int]] = {}

    def max_pages(self, num_beside: int) -> int:
        return self._area.num_landing

    @property
    def least_pages(self) -> int:
        return max(1, min(self._area.num_landing, self.max_pool_pages(0)) // 8)

    @property
    def num_usable_pages(self) -> int:
        return self._area.num_landing

    def reserve(self, pages: Sequence[int]) -> list[int]:
        landed = self._area.take_landing(len(pages))
        assert landed is not None, "more was reserved than `max_pages`"
        return landed

    def verifying(self, tag: ChunkTag, pages: Sequence[int]) -> None:
        self._memory.retain(pages)
        self._verifying[tag] = list(pages)

    def verified(self, tag: ChunkTag) -> None:
        self._memory.release(self._verifying.pop(tag))

    @property
    def num_verifying(self) -> int:
        return len(self._verifying)

    def accepted(self, landed: Sequence[int]) -> None:
        self._area.free_landing(landed)

    def release(self, pages: Sequence[int], landed: Sequence[int]) -> None:
        self._memory.release(pages)
        self._area.free_landing(landed)

    def quarantine(self, pages: Sequence[int], landed: Sequence[int]) -> None:
        self._memory.release(pages)
        self._area.quarantine(landed)

    def end_quarantine(self, landed: Sequence[int]) -> None:
        self._area.end_quarantine(landed)
