"""The pieces of companions on a device: one `PieceMemory` for each companion of a layout."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from weft.engine.executor.block_pool import BlockPool, SpreadBlockPool
from weft.engine.executor.states import StateMemory
from weft.engine.transfer.device_pages import Pages, rows_of_pool
from weft.kernels.ops.pages import page_index, repack_pages
from weft.kernels.ops.pages.scaled_kv import ALL_BITS, is_scaled
from weft.pages.transfer.page_pool import PagePool


class PieceMemory(ABC):
    """The pieces of one companion."""

    lies_on_all: ClassVar[bool]
    """Whether one rank copies what all ranks have of a piece, where it maps their memory."""

    @abstractmethod
    def pack(
        self, pieces: Sequence[int], into: Sequence[int], pages: Pages, *, is_each: bool
    ) -> None:
        """Copies pieces into pages of the first group: with `is_each` each into an equal share of
        them, else one after another.

        Args:
            into: Numbers of these pages.
            pages: The first group's pages, with what all ranks have of them.
        """

    @abstractmethod
    def unpack(
        self, pieces: Sequence[int], out_of: Sequence[int], pages: Pages, *, is_each: bool
    ) -> None:
        """Copies pieces out of the pages where `pack` put them."""

    @abstractmethod
    def poison(self, pieces: Sequence[int]) -> None:
        """Fills free pieces with NaN, so that reading one is noticed."""

    @abstractmethod
    def zero(self, pieces: Sequence[int]) -> None:
        """Fills pieces with zeros."""

    @abstractmethod
    def pool(self, num_pages: int, page_bytes: int) -> PagePool:
        """Access for one thread to pieces, each as `num_pages` pages."""


class StatePieces(PieceMemory):
    """Blocks of recurrent layers, which lie in pages whole."""

    lies_on_all = True

    def __init__(self, memory: StateMemory) -> None:
        self._memory = memory

    def pack(
        self, pieces: Sequence[int], into: Sequence[int], pages: Pages, *, is_each: bool
    ) -> None:
        for piece, own in zip(pieces, _shares(into, len(pieces)), strict=True):
            self._memory.to_pages(piece, own, pages)

    def unpack(
        self, pieces: Sequence[int], out_of: Sequence[int], pages: Pages, *, is_each: bool
    ) -> None:
        for piece, own in zip(pieces, _shares(out_of, len(pieces)), strict=True):
            self._memory.from_pages(piece, own, pages)

    def poison(self, pieces: Sequence[int]) -> None:
        self._memory.poison(pieces)

    def zero(self, pieces: Sequence[int]) -> None:
        """Nothing: a block is written whole before it is read."""

    def pool(self, num_pages: int, page_bytes: int) -> PagePool:
        if self._memory.spread is not None:
            return SpreadBlockPool(self._memory.spread, num_pages, page_bytes)
        return BlockPool(self._memory.of_blocks, num_pages, page_bytes)


class WindowPieces(PieceMemory):
    """Pages of a group of windows.

    Args:
        pool: The group's pool.
        page_rows: [num_pages, page_bytes] uint8: this rank's pages of the first group, to which it
            copies its part of a piece.
    """

    lies_on_all = False

    def __init__(self, pool: torch.Tensor, page_rows: torch.Tensor) -> None:
        self._pool = pool
        self._rows = rows_of_pool(pool)
        self._page_rows = page_rows

    def pack(
        self, pieces: Sequence[int], into: Sequence[int], pages: Pages, *, is_each: bool
    ) -> None:
        num_runs = len(pieces) if is_each else 1
        repack_pages(self._rows, pieces, self._page_rows, into, num_runs=num_runs)

    def unpack(
        self, pieces: Sequence[int], out_of: Sequence[int], pages: Pages, *, is_each: bool
    ) -> None:
        num_runs = len(pieces) if is_each else 1
        repack_pages(self._page_rows, out_of, self._rows, pieces, num_runs=num_runs)

    def poison(self, pieces: Sequence[int]) -> None:
        poison_pages(self._pool, pieces)

    def zero(self, pieces: Sequence[int]) -> None:
        self._pool.index_fill_(0, page_index(pieces, self._pool.device), 0)

    def pool(self, num_pages: int, page_bytes: int) -> PagePool:
        return BlockPool((self._pool,), num_pages, page_bytes)


def make_pieces(
    states: StateMemory | None, windows: Sequence[torch.Tensor], page_rows: torch.Tensor
) -> tuple[PieceMemory, ...]:
    """The memory of each companion, in the order of `CacheLayout.companions`.

    Args:
        states: Blocks of recurrent layers; None: the model has none.
        windows: Pools of further page groups.
        page_rows: [num_pages, page_bytes] uint8: this rank's pages of the first group.
    """
    of_states = [] if states is None else [StatePieces(states)]
    return (*of_states, *(WindowPieces(pool, page_rows) for pool in windows))


def poison_pages(pool: torch.Tensor, pages: Sequence[int]) -> None:
    """Fills pages of a pool with NaN; a scale whose bits are all set is NaN."""
    nothing = ALL_BITS[pool.dtype] if is_scaled(pool) else math.nan
    pool.index_fill_(0, page_index(pages, pool.device), nothing)


def _shares(pages: Sequence[int], count: int) -> Sequence[Sequence[int]]:
    size = len(pages) // max(1, count)
    return [pages[at : at + size] for at in range(0, len(pages), size)] if size else []
