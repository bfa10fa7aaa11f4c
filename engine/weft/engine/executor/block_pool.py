"""Access of tiers to blocks of recurrent layers and to window pages, as pages of a pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from weft.engine.executor.device_pool import CopyRows
from weft.engine.transfer.device_pages import DevicePages
from weft.pages.transfer.digest import digest_pages


class BlockPool:
    """`PagePool` for one thread. Page i of block b has the number b * num_pages + i; the last page
    of a block ends with zeros.

    Copies are complete when their call returns. No step reads or writes the blocks that it copies.

    Args:
        parts: The parts of all blocks, [num_blocks, ...] each, contiguous within a block.
        num_pages: Pages of a block.
    """

    def __init__(self, parts: Sequence[torch.Tensor], num_pages: int, page_bytes: int) -> None:
        self._parts = [part.view(len(part), -1).view(torch.uint8) for part in parts]
        self._num_pages = num_pages
        self._page_bytes = page_bytes
        self._copies = CopyRows(parts[0].device, page_bytes)

    def read(self, page: int) -> NDArray[np.uint8]:
        self._copy_out(page, self._copies.rows[0])
        return self._copies.row(0)

    def target(self, index: int, page: int) -> NDArray[np.uint8]:
        return self._copies.row(index)

    def commit(self, pages: Sequence[int]) -> None:
        self._copy_in(list(self._copies.rows[: len(pages)]), pages)

    def copy_in(self, rows: Sequence[NDArray[np.uint8]], pages: Sequence[int]) -> list[int]:
        self._copy_in([torch.from_numpy(row) for row in rows], pages)
        return [_digest(row) for row in rows]

    def copy_out(self, page: int, row: NDArray[np.uint8]) -> int:
        self._copy_out(page, torch.from_numpy(row))
        return _digest(row)

    def _copy_in(self, rows: Sequence[torch.Tensor], pages: Sequence[int]) -> None:
        with self._copies.on_stream():
            for row, page in zip(rows, pages, strict=True):
                for piece, at in self._pieces(page):
                    piece.copy_(row[at : at + len(piece)], non_blocking=True)
        self._copies.wait()

    def _copy_out(self, page: int, row: torch.Tensor) -> None:
        end = 0
        with self._copies.on_stream():
            for piece, at in self._pieces(page):
                end = at + len(piece)
                row[at:end].copy_(piece, non_blocking=True)
        self._copies.wait()
        row[end:] = 0

    def _pieces(self, page: int) -> Iterator[tuple[torch.Tensor, int]]:
        block, index = divmod(page, self._num_pages)
        first, begin = index * self._page_bytes, 0
        for part in self._parts:
            end = begin + part.shape[1]
            low, high = max(first, begin), min(first + self._page_bytes, end)
            if low < high:
                yield part[block, low - begin : high - begin], low - first
            begin = end


class SpreadBlockPool(BlockPool):
    """As `BlockPool`, of blocks that lie on several hosts.

    Args:
        blocks: Whole blocks as rows.
    """

    def __init__(self, blocks: DevicePages, num_pages: int, page_bytes: int) -> None:
        super().__init__((torch.empty((1, 1)),), num_pages, page_bytes)
        self._blocks = blocks

    def _copy_in(self, rows: Sequence[torch.Tensor], pages: Sequence[int]) -> None:
        for row, page in zip(rows, pages, strict=True):
            block, whole, part = self._part_of(page)
            part.copy_(row[: len(part)])
            self._blocks.write(block, whole)

    def _copy_out(self, page: int, row: torch.Tensor) -> None:
        _, _, part = self._part_of(page)
        row[: len(part)] = part
        row[len(part) :] = 0

    def _part_of(self, page: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """The block of a page, a copy of its bytes, and those of the page therein."""
        block, index = divmod(page, self._num_pages)
        whole = torch.empty(self._blocks.page_bytes, dtype=torch.uint8)
        self._blocks.read(block, whole)
        return block, whole, whole[index * self._page_bytes :][: self._page_bytes]


def _digest(row: NDArray[np.uint8]) -> int:
    return int(digest_pages(row.reshape(1, -1), [0])[0])
