"""Access of tiers to the pool, whose pages they read and write outside the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from weft.contract.pages import Page
from weft.pages.transfer.digest import digest_pages


class PagePool(Protocol):
    """The bytes of the pool's pages. Every thread has a `PagePool` of its own."""

    def read(self, page: int) -> Page:
        """Bytes of a published page, valid until the next call."""
        ...

    def target(self, index: int, page: int) -> Page:
        """Buffer for the `index`-th page of a batch, to be filled before `commit`."""
        ...

    def commit(self, pages: Sequence[int]) -> None:
        """Moves the targets of a batch into these pages. Returns when the pool has the bytes."""
        ...

    def copy_in(self, rows: Sequence[Page], pages: Sequence[int]) -> list[int]:
        """Copies rows of pinned memory into pages directly. Returns digests of the pages' new
        content.
        """
        ...

    def copy_out(self, page: int, row: Page) -> int:
        """Copies a published page into a row of pinned memory. Returns its digest."""
        ...


class HostPool:
    """Implements `PagePool` over a pool in host memory, uint8 `[num_pages, page_bytes]`."""

    def __init__(self, rows: NDArray[np.uint8]) -> None:
        self._rows = rows

    def read(self, page: int) -> Page:
        row: Page = self._rows[page]
        return row

    def target(self, index: int, page: int) -> Page:
        row: Page = self._rows[page]
        return row

    def commit(self, pages: Sequence[int]) -> None:
        """Does nothing: targets are the pool's own rows."""

    def copy_in(self, rows: Sequence[Page], pages: Sequence[int]) -> list[int]:
        for row, page in zip(rows, pages, strict=True):
            np.copyto(self._rows[page], row)
        digests: list[int] = digest_pages(self._rows, pages).tolist()
        return digests

    def copy_out(self, page: int, row: Page) -> int:
        np.copyto(row, self._rows[page])
        return int(digest_pages(self._rows, [page])[0])
