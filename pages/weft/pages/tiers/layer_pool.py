"""Access of tiers to the pool for loads by layer, which steps begin to read before they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.contract.layout import PagePart
from weft.pages.tiers.tier import PageLoad


class LayerPool(Protocol):
    """Copies pages into the pool, one group of layers after another. One load at a time uses it.

    Steps wait for a group before they read its layers, from `begin` until the group is opened.
    """

    num_groups: int
    needs_rows: bool
    """Whether pages can come only from memory that the pool's device reads (`PageLoad.direct`)."""
    is_enqueued: bool
    """Whether `copy` and `open` enqueue work in place of doing it. A step then waits only for what
    was enqueued before it, so it must not begin before the last group was opened.
    """

    @property
    def parts(self) -> Sequence[PagePart]:
        """Of a page, for each group."""
        ...

    @property
    def was_left(self) -> bool:
        """Whether a step has gone on without waiting for all groups of the present load, so that it
        has read what the load had not yet written. Asked after the last group was opened.
        """
        ...

    def begin(self) -> None:
        """Closes all groups. The engine must not begin a step of the load before."""
        ...

    def copy(self, group: int, loads: Sequence[PageLoad], pages: Sequence[int]) -> bool:
        """Copies the layers of a group into these pages. False: one could not be read."""
        ...

    def open(self, group: int) -> None:
        """Lets steps read the layers of a group."""
        ...

    def open_all(self) -> None:
        """Lets waiting steps go on, whatever the pages hold. Returns once all copies so far have
        ended.
        """
        ...

    def digests(self, pages: Sequence[int]) -> list[int]:
        """Digests of the pages as they are in the pool, once all copies so far have ended."""
        ...
