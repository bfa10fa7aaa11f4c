"""Sources that pages are shipped from: the pool itself, or copies in a staging area.

Pages are shipped after the step that computed them is committed, so the pool has their content.
Copies of them may be enqueued on the device behind that step while it is still under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from weft.engine.base.clock import monotonic
from weft.engine.base.marks import WorkMark
from weft.engine.base.pages import StagingPages
from weft.engine.transfer.digest import digest_pages


class Reading(Protocol):
    """Pages of a pool that are being made ready for shipping."""

    @property
    def pages(self) -> Sequence[int]:
        """Pages to ship from, in order."""
        ...

    def is_done(self) -> bool:
        """Whether they are ready. Raises the error that made them fail."""
        ...

    def digests(self) -> list[int]:
        """Digests of the pages as they lie in the pool, once ready; 0 each if none are computed."""
        ...

    def digest_s(self) -> float:
        """Seconds that digesting took, once ready."""
        ...


class PageSource(Protocol):
    """Source of pages for the shipping thread, the only caller of `begin` and `end`."""

    @property
    def exchanged(self) -> StagingPages:
        """The registered memory that is shipped from, `[num_pages, page_bytes]`."""
        ...

    @property
    def max_chunk_pages(self) -> int | None:
        """Most pages of one chunk; None: as many as one write can carry."""
        ...

    @property
    def reads_early(self) -> bool:
        """Whether pages can be read behind a step that is under way."""
        ...

    def begin(
        self,
        pages: Sequence[int],
        digests: Sequence[int] | None,
        after: WorkMark | None = None,
    ) -> Reading | None:
        """Starts making pages ready.

        Args:
            pages: Pages of the pool; they do not change until the reading has ended.
            digests: Digests of these pages, where they are known.
            after: Mark behind the step that computes the pages, if `reads_early`; None: the pages
                have their content.

        Returns:
            None: There is no room now; ending other readings makes room.
        """
        ...

    def end(self, reading: Reading) -> None:
        """Releases the pages; no peer may read them any more."""
        ...


class DirectReading:
    """A `Reading` of pages that are shipped from the pool itself."""

    def __init__(self, pages: Sequence[int], digests: list[int], digest_s: float = 0.0) -> None:
        self.pages = pages
        self._digests = digests
        self._digest_s = digest_s

    def is_done(self) -> bool:
        """See `Reading.is_done`."""
        return True

    def digests(self) -> list[int]:
        """See `Reading.digests`."""
        return self._digests

    def digest_s(self) -> float:
        """See `Reading.digest_s`."""
        return self._digest_s


class DirectSource:
    """Implements `PageSource` over a pool in host memory.

    Args:
        pool: uint8 `[num_pages, page_bytes]`.
        has_digests: Whether to compute digests.
    """

    max_chunk_pages = None
    reads_early = False

    def __init__(self, pool: NDArray[np.uint8], *, has_digests: bool = True) -> None:
        self.exchanged: StagingPages = pool
        self._pool = pool
        self._has_digests = has_digests

    def begin(
        self,
        pages: Sequence[int],
        digests: Sequence[int] | None,
        after: WorkMark | None = None,
    ) -> DirectReading:
        """See `PageSource.begin`; computes the digests at once."""
        assert after is None, "the step that computes the pages is under way"
        if not self._has_digests:
            return DirectReading(pages, [0] * len(pages))
        if digests:
            return DirectReading(pages, list(digests))
        began_at = monotonic()
        found = digest_pages(self._pool, pages).tolist()
        return DirectReading(pages, found, monotonic() - began_at)

    def end(self, reading: Reading) -> None:
        """See `PageSource.end`."""
