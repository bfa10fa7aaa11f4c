"""The pages that peers reach, as an owner of fills sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.engine.base.marks import WorkMark


class PagePort(Protocol):
    """The pages that peers write to and read from, and the transfer between them and the pool
    (`weft.engine.transfer.digester`, `weft.engine.transfer.staged`). Called by the engine's thread,
    which it never blocks.
    """

    @property
    def max_put_pages(self) -> int:
        """Most pages of one put."""
        ...

    @property
    def max_queued_pages(self) -> int:
        """Most pages queued for puts: they keep their place in the pool until then."""
        ...

    def read(self, page: int) -> bytes:
        """Content of a page that is exposed."""
        ...

    def write(self, page: int, offset: int, data: bytes) -> None:
        """Copies bytes into a page that a fill has reserved."""
        ...

    def mark(self) -> WorkMark | None:
        """A mark of the device's work enqueued so far; None: the pool is not on a device."""
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
            tag: (lease, chunk); the digests come back with it, by `OwnerFills.on_digested`.
            landed: Where its pages have arrived.
            pages: Pages of the pool.
            after: Earlier uses of these pages are over.
        """
        ...

    def expose(self, number: int, pages: Sequence[int]) -> bool:
        """Starts computing digests of pages to put, where the store can read them; False: no room
        now.
        """
        ...

    def conceal(self, exposed: Sequence[int]) -> None:
        """Ends the exposure of pages that the store does not read any more."""
        ...
