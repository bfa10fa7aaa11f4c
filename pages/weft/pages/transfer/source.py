"""Sources that pages are shipped from: the pool itself, or copies in a staging area.

Pages are shipped after the step that computed them is committed, so the pool has their content. The
device may copy them earlier: copies are then enqueued after the step while it is still under way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from weft.contract.clock import monotonic
from weft.contract.pages import StagingPages
from weft.pages.marks import WorkMark
from weft.pages.transfer.digest import digest_pages


class Reading:
    """Pages of a pool, in order, that are being made ready for shipping, in this class from the
    pool itself. `digests` are those of the pages as they are in the pool; 0 each if none are
    computed.
    """

    def __init__(
        self, pages: Sequence[int], digests: Sequence[int] = (), digest_s: float = 0.0
    ) -> None:
        self.pages = pages
        self._digests = list(digests)
        self._digest_s = digest_s

    def is_done(self) -> bool:
        """Whether the pages are ready. Raises the error that made them fail."""
        return True

    def digests(self) -> list[int]:
        """The digests, once ready."""
        return self._digests

    def digest_s(self) -> float:
        """Seconds that digesting took, once ready."""
        return self._digest_s


class PageSource:
    """Source of pages for the shipping thread, the only caller of `begin` and `end`. In this class
    the pages are those of a pool in host memory, uint8 `[num_pages, page_bytes]`, which is
    registered.
    """

    reads_early = False
    """Whether pages can be read while the step that computes them is under way."""

    def __init__(self, exchanged: StagingPages, *, has_digests: bool = True) -> None:
        self.exchanged = exchanged
        self._has_digests = has_digests

    @property
    def max_chunk_pages(self) -> int | None:
        """Most pages of one chunk; None: as many as one write can carry."""
        return None

    def begin(
        self,
        pages: Sequence[int],
        digests: Sequence[int] | None,
        after: WorkMark | None = None,
    ) -> Reading | None:
        """Starts making pages ready; None: there is no room until another reading ends. This class
        computes the digests at once.

        Args:
            pages: Pages of the pool; they do not change until the reading has ended.
            digests: Digests of these pages, if they are known.
            after: Mark after the step that computes the pages, if `reads_early`; None: the pages
                have their content.
        """
        assert after is None, "the step that computes the pages is under way"
        if not self._has_digests:
            return Reading(pages, [0] * len(pages))
        if digests:
            return Reading(pages, digests)
        assert isinstance(self.exchanged, np.ndarray), "the pool is in host memory"
        began_at = monotonic()
        found = digest_pages(self.exchanged, pages).tolist()
        return Reading(pages, found, monotonic() - began_at)

    def end(self, reading: Reading) -> None:
        """Releases the pages. No peer may read them any more."""
