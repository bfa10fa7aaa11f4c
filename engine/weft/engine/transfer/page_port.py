"""The pages that peers reach, as an owner of fills sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.pages.marks import WorkMark


class PagePort(Protocol):
    """The pages that peers write to and read from, and the transfer between them and the pool. The
    engine thread calls it, and no call blocks.
    """

    @property
    def max_put_pages(self) -> int: ...

    @property
    def max_queued_pages(self) -> int:
        """Number of pages queued for puts from which on no more are queued. Queued pages stay in
        the pool.
        """
        ...

    def read(self, page: int) -> bytes:
        """Content of a page that is exposed."""
        ...

    def write(self, page: int, offset: int, data: bytes) -> None:
        """Copies bytes into a page that a fill has reserved."""
        ...

    def mark(self) -> WorkMark | None:
        """A mark after the device's work enqueued so far; None: the pool is not on a device."""
        ...

    def verify(
        self,
        tag: tuple[bytes, int],
        landed: Sequence[int],
        pages: Sequence[int],
        after: WorkMark | None,
    ) -> None:
        """Starts moving a chunk into the pool, if it is not there, and computing its digests.

        Args:
            tag: (lease, chunk); `OwnerFills.on_digested` gets the digests under this tag.
            landed: Pages in which the chunk has arrived.
            after: Mark after which earlier uses of the destination pages are over.
        """
        ...

    def expose(self, number: int, pages: Sequence[int]) -> bool:
        """Starts making pages readable for the store and computing their digests. False: there is
        no room now.
        """
        ...

    def conceal(self, exposed: Sequence[int]) -> None:
        """Ends the exposure of pages that the store does not read any more."""
        ...
