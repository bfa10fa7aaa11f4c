"""Memory of recurrent layers on a CPU, and what a step does there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from weft.engine.base.arrays import Int64Array
from weft.engine.base.errors import ConfigError
from weft.engine.base.state_rows import StateRows
from weft.engine.memory.layout import StatePart, StatePlane
from weft.engine.model.state_step import StatePools, StateRound, StateStep
from weft.kernels.page_ops import page_index

_NOTHING = np.zeros(0, np.int64)


class RankBlocks(NamedTuple):
    """Memory of the blocks where several ranks share it."""

    whole: tuple[torch.Tensor, ...]
    """For each part of the plane over all ranks, [num_blocks, layers, *shape]."""
    own: tuple[torch.Tensor, ...]
    """This rank's heads or channels of them."""


class StateMemory:
    """Blocks and rings of a model.

    Args:
        plane: What they contain.
        num_blocks: Number of blocks, the null block included.
        num_slots: Number of slots.
        ring_rows: Positions of a ring.
        device: Device of the model.
        blocks: The blocks of all ranks; None: this process has all of them.

    Raises:
        ConfigError: They do not fit into memory.
    """

    def __init__(
        self,
        plane: StatePlane,
        num_blocks: int,
        num_slots: int,
        ring_rows: int,
        device: torch.device,
        blocks: RankBlocks | None = None,
    ) -> None:
        self._ring_rows = ring_rows

        def zeros(part: StatePart, *sizes: int) -> torch.Tensor:
            dtype: torch.dtype = getattr(torch, part.dtype)
            return torch.zeros((*sizes, *part.shape), dtype=dtype, device=device)

        try:
            if blocks is None:
                whole = tuple(zeros(part, num_blocks, plane.layers) for part in plane.parts)
                blocks = RankBlocks(whole, whole)
            self._whole = blocks.whole
            self.pools = StatePools(
                blocks.own,
                tuple(zeros(part, num_slots + 1, ring_rows, plane.layers) for part in plane.ring),
                tuple(zeros(part, num_blocks, 1) for part in plane.rows),
                tuple(zeros(part, num_slots + 1, ring_rows, 1) for part in plane.rows),
            )
        except RuntimeError as error:
            size = num_blocks * plane.block_bytes
            raise ConfigError(f"{size:,} bytes of recurrent states do not fit: {error}") from error

    @property
    def of_blocks(self) -> tuple[torch.Tensor, ...]:
        """All parts of blocks over all ranks, [num_blocks, ...] each, as they are exchanged."""
        return (*self._whole, *self.pools.row_blocks)

    def to_pages(self, block: int, pages: Sequence[int], pool: torch.Tensor) -> None:
        """Copies a block into pages of a pool, which have room for it.

        Args:
            block: Number of the block.
            pages: Numbers of the pages, in order.
            pool: [num_pages, page_bytes] uint8.
        """
        row = torch.cat([part[block].reshape(-1).view(torch.uint8) for part in self.of_blocks])
        room = pool.new_zeros(len(pages) * pool.shape[1])
        room[: row.shape[0]] = row
        pool[list(pages)] = room.view(len(pages), -1)

    def from_pages(self, block: int, pages: Sequence[int], pool: torch.Tensor) -> None:
        """Copies a block out of pages; see `to_pages`."""
        room, at = pool[list(pages)].reshape(-1), 0
        for part in self.of_blocks:
            size = part[block].numel() * part.element_size()
            part[block] = room[at : at + size].clone().view(part.dtype).view(part[block].shape)
            at += size

    def poison(self, blocks: Sequence[int]) -> None:
        """Fills free blocks with NaN, so that reading one is noticed."""
        if blocks:
            for pool in self.of_blocks:
                pool.index_fill_(0, page_index(blocks, pool.device), float("nan"))

    def step(
        self, slots: Int64Array, starts: Int64Array, counts: Int64Array, rows: StateRows | None
    ) -> StateStep:
        """What recurrent layers do in a step.

        Args:
            slots: [R], of the requests.
            starts: [R]: positions of their first rows.
            counts: [R]: numbers of their rows.
            rows: Their blocks; None: they all begin at position 0, and nothing is kept of them.
        """
        ends, is_kept = starts + counts, rows is not None
        if rows is None:
            nowhere = np.zeros_like(slots)
            rows = StateRows(nowhere, nowhere, np.zeros((3, 0), np.int64))
        borders = rows.borders
        num_old = starts - borders
        assert (num_old >= 0).all(), "a request begins before its block"
        assert (num_old <= self._ring_rows).all(), "a ring is too short"
        of_old = np.repeat(np.arange(len(slots)), num_old)
        old_positions = _behind(borders, num_old)
        lasts = borders.copy()
        np.maximum.at(lasts, rows.writes[0], rows.writes[1])
        # Positions before the newest border are not read any more.
        firsts = np.maximum(starts, lasts) if is_kept else ends
        num_kept = np.maximum(ends - firsts, 0)
        assert (num_kept <= self._ring_rows).all(), "a ring is too short"
        new_rows = _behind(np.cumsum(counts) - counts + firsts - starts, num_kept)
        return StateStep(
            pools=self.pools,
            ring_slots=_tensor(slots[of_old]),
            ring_rows=_tensor(old_positions % self._ring_rows),
            rounds=_rounds(borders, starts, ends, rows),
            new_rows=_tensor(new_rows),
            new_slots=_tensor(np.repeat(slots, num_kept)),
            new_ring_rows=_tensor(_behind(firsts, num_kept) % self._ring_rows),
        )


def _rounds(
    borders: Int64Array, starts: Int64Array, ends: Int64Array, rows: StateRows
) -> tuple[StateRound, ...]:
    """Cuts each request's positions where states are written. The first pieces are one round, the
    second ones another, and so on.
    """
    num_old, counts = starts - borders, ends - starts
    first_old = np.cumsum(num_old) - num_old
    first_new = int(num_old.sum()) + np.cumsum(counts) - counts
    writes: list[list[tuple[int, int]]] = [[] for _ in borders]
    for request, position, block in rows.writes.T.tolist():
        writes[request].append((position, block))
    rounds: list[StateRound] = []
    begun = [(request, int(border), -1) for request, border in enumerate(borders)]
    while begun:
        pieces, lengths, kept, blocks, following = [], [], list[int](), list[int](), []
        for number, (request, begin, _) in enumerate(begun):
            end, cuts = int(ends[request]), writes[request]
            if cuts:
                end, block = cuts.pop(0)
                kept.append(number)
                blocks.append(block)
            if end < ends[request]:
                following.append((request, end, number))
            start = int(starts[request])
            old = np.arange(begin, min(end, start)) + (first_old[request] - borders[request])
            new = np.arange(max(begin, start), end) + (first_new[request] - start)
            pieces += [old, new]
            lengths.append(end - begin)
        begins = [before for _, _, before in begun] if rounds else rows.blocks
        rounds.append(
            StateRound(
                rows=_tensor(np.concatenate(pieces)),
                cu_lens=_tensor(np.cumsum([0, *lengths])),
                begins=_tensor(np.array(begins, np.int64)),
                kept=_tensor(np.array(kept, np.int64)),
                blocks=_tensor(np.array(blocks, np.int64)),
            )
        )
        begun = following
    return tuple(rounds)


def _behind(firsts: Int64Array, counts: Int64Array) -> Int64Array:
    """So many consecutive numbers from each of `firsts` on, one range after another."""
    if not counts.any():
        return _NOTHING
    ends = np.cumsum(counts)
    numbers: Int64Array = np.arange(ends[-1]) + np.repeat(firsts - (ends - counts), counts)
    return numbers


def _tensor(numbers: Int64Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers))
