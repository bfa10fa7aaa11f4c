"""Memory of recurrent layers, and what a step does there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from weft.engine.base.arrays import Int64Array
from weft.engine.base.device_copies import DeviceCopies
from weft.engine.base.errors import ConfigError
from weft.engine.base.state_rows import NO_TABLE, StateRows
from weft.engine.executor.encodings import StepArrays
from weft.engine.memory.layout import StatePart, StatePlane
from weft.engine.memory.page_memory import NULL_PAGE
from weft.engine.model.state_step import StatePools, StateRound, StateStep
from weft.kernels.page_ops import page_index
from weft.kernels.slot_states import plan_slots

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
        self._found = plane.found, num_slots + 1, ring_rows, plane.layers

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

    def with_found(self) -> StatePools:
        """The memory, and what steps on a GPU keep in addition.

        Raises:
            ConfigError: It does not fit into memory.
        """
        parts, *sizes = self._found
        device = self.pools.rings[0].device
        try:
            found = [
                torch.zeros((*sizes, *part.shape), dtype=getattr(torch, part.dtype), device=device)
                for part in parts
            ]
        except RuntimeError as error:
            raise ConfigError(f"rings of recurrent layers do not fit: {error}") from error
        return self.pools._replace(found=tuple(found))

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
        pool.index_copy_(0, page_index(pages, pool.device), room.view(len(pages), -1))

    def from_pages(self, block: int, pages: Sequence[int], pool: torch.Tensor) -> None:
        """Copies a block out of pages; see `to_pages`."""
        room, at = pool.index_select(0, page_index(pages, pool.device)).view(-1), 0
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
        numbers = self.numbers(slots, starts, counts, rows)
        return _made(self.pools, numbers, [torch.from_numpy(each) for each in numbers.flat])

    def numbers(
        self, slots: Int64Array, starts: Int64Array, counts: Int64Array, rows: StateRows | None
    ) -> _Numbers:
        """Where each request begins and what it writes; arguments as `step` takes them."""
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
        return _Numbers(
            ring_slots=slots[of_old],
            ring_rows=old_positions % self._ring_rows,
            rounds=_rounds(borders, starts, ends, rows),
            new_rows=new_rows,
            new_slots=np.repeat(slots, num_kept),
            new_ring_rows=_behind(firsts, num_kept) % self._ring_rows,
            lasts=lasts,
        )


class DeviceStates:
    """What steps on a GPU do with a model's blocks and rings. Requests of few rows go by what the
    device knows of them; the others begin where the host says.

    Args:
        memory: Blocks and rings.
        page_size: Token positions a page.
        max_requests: Number of slots.
        device: The GPU.
    """

    def __init__(
        self, memory: StateMemory, page_size: int, max_requests: int, device: torch.device
    ) -> None:
        self._memory = memory
        self._pools = memory.with_found()
        self._page_size = page_size
        self._copies = DeviceCopies(device)
        self._borders = torch.zeros(max_requests + 1, dtype=torch.int64, device=device)
        """By slot: the border of the newest block. Steps change it as they run."""
        self._ends = torch.zeros_like(self._borders)
        """By slot: see `plan_slots`. The host sets it to the newest block's border."""
        self._table = torch.zeros((max_requests, 3), dtype=torch.int64, device=device)
        """`StateRows.table` of the captured step that was sent last."""

    def send(self, rows: StateRows | None, num_requests: int) -> None:
        """Sends the blocks of a captured step, padded to `num_requests`; None: nothing is kept."""
        buffer, host = self._copies.pinned.take(used := 24 * num_requests)
        table = host[:used].view(np.int64).reshape(num_requests, 3)
        table[:] = NULL_PAGE
        if rows is not None:
            table[: len(rows.table)] = rows.table
        flat = self._table[:num_requests].view(-1).view(torch.uint8)
        flat.copy_(buffer[:used], non_blocking=True)
        self._copies.pinned.sent()

    def captured(
        self, slots: torch.Tensor, cu_q_lens: torch.Tensor, positions: torch.Tensor
    ) -> StateStep:
        """A step of requests of few rows alone, whose blocks `send` sends; to be called while a
        graph is captured.

        Args:
            slots: [R] int64.
            cu_q_lens: [R + 1] int32.
            positions: [T] int64, complete.
        """
        return self._few(slots, cu_q_lens, positions, self._table[: len(slots)])

    def batch(
        self,
        arrays: StepArrays,
        slots: torch.Tensor,
        cu_q_lens: torch.Tensor,
        positions: torch.Tensor,
    ) -> StateStep:
        """A step of any requests.

        Args:
            arrays: The step on the host.
            slots: [R] int64.
            cu_q_lens: [R + 1] int32.
            positions: [T] int64, complete.
        """
        rows, few = arrays.states, 0 if arrays.states is None else arrays.states.num_few
        if rows is not None and few == len(arrays.slots):
            (table,) = self._copies.send((rows.table,))
            return self._few(slots, cu_q_lens, positions, table.view(-1, 3))
        bounds, chunks = arrays.cu_q_lens[few:], slice(few, None)
        own = None
        if rows is not None:
            writes = rows.writes[:, rows.writes[0] >= few] - np.array([[few], [0], [0]])
            own = StateRows(rows.borders[chunks], rows.blocks[chunks], writes)
        starts, counts = arrays.positions[bounds[:-1]], np.diff(bounds).astype(np.int64)
        numbers = self._memory.numbers(arrays.slots[chunks], starts, counts, own)
        of_few = NO_TABLE if rows is None else rows.table[:few]
        lasts, table, *sent = self._copies.send((numbers.lasts, of_few, *numbers.flat))
        step = _made(self._pools, numbers, sent)
        if rows is not None:
            self._borders.index_copy_(0, slots[chunks], lasts)
            self._ends.index_copy_(0, slots[chunks], lasts)
        if not few:
            return step
        first = self._few(slots[:few], cu_q_lens[: few + 1], positions, table.view(-1, 3))
        return replace(step, few=first.few, num_few=int(bounds[0]))

    def _few(
        self,
        slots: torch.Tensor,
        cu_q_lens: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
    ) -> StateStep:
        rows = slots, cu_q_lens, positions, self._borders, self._ends, table
        few, nothing = plan_slots(*rows, self._page_size), self._borders[:0]
        return StateStep(
            pools=self._pools,
            ring_slots=nothing,
            ring_rows=nothing,
            rounds=(),
            new_rows=nothing,
            new_slots=nothing,
            new_ring_rows=nothing,
            few=few,
            num_few=positions.shape[0],
        )


class _Round(NamedTuple):
    """A `StateRound` on the host."""

    rows: Int64Array
    cu_lens: Int64Array
    begins: Int64Array
    kept: Int64Array
    blocks: Int64Array


class _Numbers(NamedTuple):
    """A `StateStep` on the host."""

    ring_slots: Int64Array
    ring_rows: Int64Array
    rounds: tuple[_Round, ...]
    new_rows: Int64Array
    new_slots: Int64Array
    new_ring_rows: Int64Array
    lasts: Int64Array
    """[R]: border of each request's newest block behind the step."""

    @property
    def flat(self) -> list[Int64Array]:
        """All arrays that the step needs, one after another."""
        of_rounds = [each for part in self.rounds for each in part]
        rings = self.ring_slots, self.ring_rows
        return [*rings, self.new_rows, self.new_slots, self.new_ring_rows, *of_rounds]


def _made(pools: StatePools, numbers: _Numbers, sent: Sequence[torch.Tensor]) -> StateStep:
    """The step of these numbers, of which `_Numbers.flat` was sent to the device."""
    ring_slots, ring_rows, new_rows, new_slots, new_ring_rows, *rest = sent
    width = len(_Round._fields)
    rounds = [
        StateRound(*rest[number * width : (number + 1) * width])
        for number in range(len(numbers.rounds))
    ]
    if len(rounds) == 1 and not len(ring_slots):
        rounds = [rounds[0]._replace(rows=None)]
    return StateStep(
        pools=pools,
        ring_slots=ring_slots,
        ring_rows=ring_rows,
        rounds=tuple(rounds),
        new_rows=new_rows,
        new_slots=new_slots,
        new_ring_rows=new_ring_rows,
    )


def _rounds(
    borders: Int64Array, starts: Int64Array, ends: Int64Array, rows: StateRows
) -> tuple[_Round, ...]:
    """Cuts each request's positions where states are written. The first pieces are one round, the
    second ones another, and so on.
    """
    num_old, counts = starts - borders, ends - starts
    first_old = np.cumsum(num_old) - num_old
    first_new = int(num_old.sum()) + np.cumsum(counts) - counts
    writes: list[list[tuple[int, int]]] = [[] for _ in borders]
    for request, position, block in rows.writes.T.tolist():
        writes[request].append((position, block))
    rounds: list[_Round] = []
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
            _Round(
                rows=np.concatenate(pieces),
                cu_lens=np.cumsum([0, *lengths]),
                begins=np.array(begins, np.int64),
                kept=np.array(kept, np.int64),
                blocks=np.array(blocks, np.int64),
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
