"""Memory of recurrent layers, and the reads and writes of a step there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from weft.contract.arrays import Int64Array
from weft.contract.errors import ConfigError
from weft.contract.layout import StatePart, StatePlane
from weft.engine.base.device_copies import DeviceCopies
from weft.engine.base.state_rows import NO_TABLE, StateRows
from weft.engine.executor.encodings import StepArrays
from weft.engine.executor.page_bytes import read_bytes, write_bytes
from weft.engine.model.state_step import Rows, StatePools, StateRound, StateStep
from weft.engine.transfer.device_pages import DevicePages, Pages
from weft.kernels.ops.pages import page_index
from weft.kernels.ops.recurrence.sequences import HostSequences, Sequences
from weft.kernels.ops.slot_states import plan_slots
from weft.pages.memory.page_memory import NULL_PAGE

_NOTHING = np.zeros(0, np.int64)
_NO_ROWS = slice(0, 0)
_HostRows = Int64Array | slice
"""`Rows` on the host: a range or row numbers."""


class RankBlocks(NamedTuple):
    whole: tuple[torch.Tensor, ...]
    """Blocks over all ranks: what a block has, in the order in which it lies in pages,
    [num_blocks, ...] each.
    """
    own: tuple[torch.Tensor, ...]
    """For each part of the plane, this rank's heads or channels: [num_blocks, layers, *shape]."""
    is_mapped: bool = False
    """Whether `whole` is in the memory of several devices, of which each rank works on its own."""


class StateMemory:
    """Blocks and rings of a model.

    Args:
        num_blocks: The null block included.
        blocks: Blocks of all ranks; None: this process allocates its own.

    Raises:
        ConfigError: The memory does not fit.
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
        self.spread: DevicePages | None = None
        """Whole blocks as rows, where other hosts have their parts; None: they are here."""

        def zeros(part: StatePart, *sizes: int) -> torch.Tensor:
            dtype: torch.dtype = getattr(torch, part.dtype)
            return torch.zeros((*sizes, *part.shape), dtype=dtype, device=device)

        try:
            if blocks is None:
                whole = tuple(zeros(part, num_blocks, plane.layers) for part in plane.parts)
                blocks = RankBlocks(whole, whole)
            self._whole = blocks.whole
            self._poisoned = blocks.own if blocks.is_mapped else blocks.whole
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
        """Blocks over all ranks, [num_blocks, ...] each, in the order in which they are packed into
        pages.
        """
        return (*self._whole, *self.pools.row_blocks)

    def with_found(self) -> StatePools:
        """The memory with the additional rings that steps on a GPU keep. Raises ConfigError if the
        memory does not fit.
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
        return replace(self.pools, found=tuple(found))

    def to_pages(self, block: int, pages: Sequence[int], pool: Pages) -> None:
        """Copies a block into pages, which together have room for it.

        Args:
            pages: Numbers of the pages, in order.
            pool: [num_pages, page_bytes] uint8, or the pages of all ranks.
        """
        if self.spread is not None:
            row = torch.empty(self.spread.page_bytes, dtype=torch.uint8)
            self.spread.read(block, row)
        else:
            row = torch.cat([part[block].reshape(-1).view(torch.uint8) for part in self.of_blocks])
        write_bytes(row, pages, pool)

    def from_pages(self, block: int, pages: Sequence[int], pool: Pages) -> None:
        """Copies a block out of the pages that `to_pages` has filled."""
        room, at = read_bytes(pages, pool), 0
        if self.spread is not None:
            self.spread.write(block, room[: self.spread.page_bytes])
            return
        for part in self.of_blocks:
            size = part[block].numel() * part.element_size()
            part[block] = room[at : at + size].clone().view(part.dtype).view(part[block].shape)
            at += size

    def poison(self, blocks: Sequence[int]) -> None:
        """Fills free blocks with NaN, so that reading one is noticed."""
        if blocks:
            for pool in (*self._poisoned, *self.pools.row_blocks):
                pool.index_fill_(0, page_index(blocks, pool.device), float("nan"))

    def step(
        self, slots: Int64Array, starts: Int64Array, counts: Int64Array, rows: StateRows | None
    ) -> StateStep:
        """The reads and writes of recurrent layers in a step.

        Args:
            slots: [R].
            starts: [R]: position of each request's first row.
            counts: [R]: rows of each request.
            rows: Blocks of the requests; None: all begin at position 0 and keep nothing.
        """
        numbers = self.numbers(slots, starts, counts, rows)
        return _made(self.pools, numbers, [torch.from_numpy(each) for each in numbers.flat])

    def numbers(
        self,
        slots: Int64Array,
        starts: Int64Array,
        counts: Int64Array,
        rows: StateRows | None,
        num_before: int = 0,
    ) -> _Numbers:
        """Where each request begins and what it writes. `num_before` counts the rows of the step
        that precede those of these requests.
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
        order, rounds = _rounds(borders, starts, ends, rows)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        back = np.concatenate([np.arange(num_before), num_before + back[len(of_old) :]])
        return _Numbers(
            ring_slots=slots[of_old],
            ring_rows=old_positions % self._ring_rows,
            order=_as_range(order),
            rounds=rounds,
            back=_as_range(back),
            new_rows=_as_range(new_rows),
            new_slots=np.repeat(slots, num_kept),
            new_ring_rows=_behind(firsts, num_kept) % self._ring_rows,
            lasts=lasts,
        )


class DeviceStates:
    """The work of GPU steps on blocks and rings. Requests of few rows use positions that the device
    knows; requests of more rows begin where the host says.
    """

    def __init__(
        self, memory: StateMemory, page_size: int, max_requests: int, device: torch.device
    ) -> None:
        self._memory = memory
        self._pools = memory.with_found()
        self._page_size = page_size
        self._copies = DeviceCopies(device)
        self._borders = torch.zeros(max_requests + 1, dtype=torch.int64, device=device)
        """[slots + 1]: for each slot, the border of its newest block. Steps change it as they run.
        """
        self._ends = torch.zeros_like(self._borders)
        """[slots + 1]: for each slot, an end as `plan_slots` defines it. The host sets it to the
        newest block's border.
        """
        self._table = torch.zeros((max_requests, 3), dtype=torch.int64, device=device)
        """`StateRows.table` of the captured step that was sent last."""

    def send(self, rows: StateRows | None, num_requests: int) -> None:
        """Sends the blocks of a captured step, padded to `num_requests`; None: the step keeps
        nothing.
        """
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
        """A step of requests of few rows alone, with the blocks that `send` sends. Call it while a
        graph is captured.

        Args:
            slots: [R] int64.
            cu_q_lens: [R + 1] int32.
            positions: [T] int64, with the values that only the device knows filled in.
        """
        return self._few(slots, cu_q_lens, positions, self._table[: len(slots)])

    def batch(
        self,
        arrays: StepArrays,
        slots: torch.Tensor,
        cu_q_lens: torch.Tensor,
        positions: torch.Tensor,
    ) -> StateStep:
        """A step of any requests, not captured.

        Args:
            slots: [R] int64.
            cu_q_lens: [R + 1] int32.
            positions: [T] int64, with the values that only the device knows filled in.
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
        num_few = int(bounds[0])
        numbers = self._memory.numbers(arrays.slots[chunks], starts, counts, own, num_few)
        of_few = NO_TABLE if rows is None else rows.table[:few]
        lasts, table, *sent = self._copies.send((numbers.lasts, of_few, *numbers.flat))
        step = _made(self._pools, numbers, sent)
        if rows is not None:
            self._borders.index_copy_(0, slots[chunks], lasts)
            self._ends.index_copy_(0, slots[chunks], lasts)
        if not few:
            return step
        first = self._few(slots[:few], cu_q_lens[: few + 1], positions, table.view(-1, 3))
        return replace(step, few=first.few, num_few=num_few)

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
            order=_NO_ROWS,
            rounds=(),
            back=slice(None),
            new_rows=_NO_ROWS,
            new_slots=nothing,
            new_ring_rows=nothing,
            few=few,
            num_few=positions.shape[0],
        )


class _Round(NamedTuple):
    sequences: HostSequences
    begins: _HostRows
    kept: _HostRows
    blocks: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    ring_slots: Int64Array
    ring_rows: Int64Array
    order: _HostRows
    rounds: tuple[_Round, ...]
    back: _HostRows
    new_rows: _HostRows
    new_slots: Int64Array
    new_ring_rows: Int64Array
    lasts: Int64Array
    """[R]: border of each request's newest block after the step."""

    @property
    def flat(self) -> list[Int64Array]:
        """All arrays that the step needs, in the order in which `_made` takes them."""
        rows = [self.order, self.back, self.new_rows]
        arrays = [self.ring_slots, self.ring_rows, self.new_slots, self.new_ring_rows]
        for part in self.rounds:
            arrays += [*part.sequences, part.blocks]
            rows += [part.begins, part.kept]
        return arrays + [each for each in rows if not isinstance(each, slice)]


def _made(pools: StatePools, numbers: _Numbers, sent: Sequence[torch.Tensor]) -> StateStep:
    """The step of these numbers. `sent` has `_Numbers.flat` on the device."""
    left = iter(sent)
    ring_slots, ring_rows, new_slots, new_ring_rows = (next(left) for _ in range(4))
    of_rounds = [
        (Sequences(next(left), next(left), next(left).view(-1, 2), next(left)), next(left))
        for _ in numbers.rounds
    ]

    def rows(on_host: _HostRows) -> Rows:
        return on_host if isinstance(on_host, slice) else next(left)

    order, back, new_rows = rows(numbers.order), rows(numbers.back), rows(numbers.new_rows)
    return StateStep(
        pools=pools,
        ring_slots=ring_slots,
        ring_rows=ring_rows,
        order=order,
        rounds=tuple(
            StateRound(sequences, rows(part.begins), rows(part.kept), blocks)
            for (sequences, blocks), part in zip(of_rounds, numbers.rounds, strict=True)
        ),
        back=back,
        new_rows=new_rows,
        new_slots=new_slots,
        new_ring_rows=new_ring_rows,
    )


def _rounds(
    borders: Int64Array, starts: Int64Array, ends: Int64Array, rows: StateRows
) -> tuple[Int64Array, tuple[_Round, ...]]:
    """Cuts each request's positions where states are written. The first pieces of all requests are
    one round, their second pieces the next one, and so forth. Also returns `StateStep.order`.
    """
    num_old, counts = starts - borders, ends - starts
    first_old = np.cumsum(num_old) - num_old
    first_new = int(num_old.sum()) + np.cumsum(counts) - counts
    writes: list[list[tuple[int, int]]] = [[] for _ in borders]
    for request, position, block in rows.writes.T.tolist():
        writes[request].append((position, block))
    rounds, order = list[_Round](), [_NOTHING]
    begun = [(request, int(border), -1) for request, border in enumerate(borders)]
    while begun:
        lengths, kept, blocks, following = [], list[int](), list[int](), []
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
            order += [old, new]
            lengths.append(end - begin)
        before = _as_range(np.array([number for _, _, number in begun], np.int64))
        rounds.append(
            _Round(
                sequences=HostSequences.of(np.array(lengths, np.int64)),
                begins=before if rounds else rows.blocks,
                kept=_as_range(np.array(kept, np.int64)),
                blocks=np.array(blocks, np.int64),
            )
        )
        begun = following
    return np.concatenate(order), tuple(rounds)


def _as_range(numbers: Int64Array) -> _HostRows:
    if not len(numbers):
        return _NO_ROWS
    first, end = int(numbers[0]), int(numbers[-1]) + 1
    follow = end - first == len(numbers) and bool((np.diff(numbers) == 1).all())
    return slice(first, end) if follow else numbers


def _behind(firsts: Int64Array, counts: Int64Array) -> Int64Array:
    if not counts.any():
        return _NOTHING
    ends = np.cumsum(counts)
    numbers: Int64Array = np.arange(ends[-1]) + np.repeat(firsts - (ends - counts), counts)
    return numbers
