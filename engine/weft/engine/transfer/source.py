"""What pages are shipped from: the pool itself, or copies of its pages in a staging area.

Pages are shipped once the step that computed them is committed: they are there by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from weft.engine.transfer.digest import digest_pages
from weft.engine.transfer.staging import Pages


class Reading(Protocol):
    """Pages of a pool on their way to where they are shipped from."""

    @property
    def pages(self) -> Sequence[int]:
        """Where they are shipped from, in order."""
        ...

    def is_done(self) -> bool:
        """They are there. Raises what made it impossible."""
        ...

    def digests(self) -> list[int]:
        """Of the pages as they lie in the pool, once it is done; 0 each where none are taken."""
        ...


class PageSource(Protocol):
    """Pages of a pool for the shipping thread, which alone calls `begin` and `end`."""

    @property
    def window(self) -> Pages:
        """`[num_pages, page_bytes]`: what is registered, and what is shipped."""
        ...

    @property
    def max_chunk_pages(self) -> int | None:
        """Most pages of one chunk; None: as many as one write may have."""
        ...

    def begin(self, pages: Sequence[int], digests: Sequence[int] | None) -> Reading | None:
        """Starts making pages ready.

        Args:
            pages: Of the pool; they do not change until the reading has ended.
            digests: Of these pages, where they are known.

        Returns:
            None: There is no room now; some comes as other readings end.
        """
        ...

    def end(self, reading: Reading) -> None:
        """Nobody reads these pages any more."""
        ...


class DirectReading:
    """Implements `Reading` of pages that are shipped from where they lie."""

    def __init__(self, pages: Sequence[int], digests: list[int]) -> None:
        self.pages = pages
        self._digests = digests

    def is_done(self) -> bool:
        """See `Reading.is_done`."""
        return True

    def digests(self) -> list[int]:
        """See `Reading.digests`."""
        return self._digests


class DirectSource:
    """Implements `PageSource` over a pool in host memory.

    Args:
        pool: uint8 `[num_pages, page_bytes]`.
        has_digests: Take them.
    """

    max_chunk_pages = None

    def __init__(self, pool: NDArray[np.uint8], *, has_digests: bool = True) -> None:
        self.window: Pages = pool
        self._pool = pool
        self._has_digests = has_digests

    def begin(self, pages: Sequence[int], digests: Sequence[int] | None) -> DirectReading:
        """See `PageSource.begin`; takes the digests at once."""
        if not self._has_digests:
            return DirectReading(pages, [0] * len(pages))
        known = digests or digest_pages(self._pool, pages).tolist()
        return DirectReading(pages, list(known))

    def end(self, reading: Reading) -> None:
        """See `PageSource.end`."""
