"""Exchanges of ranks that divide pages and have a GPU each, through memory that all of them map.

A program takes some heads of a row. It writes what the other ranks need to their memory, waits for
theirs, and computes the result in the order of the ranks. Flags, turns and places alternate as in
`weft.kernels.ops.peers.triton_sum`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.peers.triton_sum import await_turn
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_HEADS = 16
"""Most heads of a program."""
_ALIGNMENT = 256


class PagesMemory(NamedTuple):
    """A rank's view of the memory of the ranks that divide pages; all lay it out alike."""

    rank: int
    size: int
    heads: int
    """H: query heads of each rank."""
    dim: int
    """D: elements of a query."""
    value_dim: int
    """V: elements of a result."""
    itemsize: int
    """Bytes of an element."""
    rows: int
    """Most rows of a launch. More take several launches."""
    bases: torch.Tensor
    """[size] int64 on the device: address in this process of each rank's memory."""
    turns: torch.Tensor
    """[2, rows * blocks] int32 on the device: exchanges so far, of queries and of results."""
    control: torch.Tensor
    """As in `weft.kernels.ops.peers.triton_sum.PeerMemory`."""

    @property
    def layout(self) -> PagesLayout:
        return layout_of(self.size, self.heads, self.dim, self.value_dim, self.itemsize, self.rows)


class PagesLayout(NamedTuple):
    """Offsets of the parts of one rank's memory, in bytes."""

    query_flags: int
    """[rows * blocks, size] int32."""
    result_flags: int
    """Like `query_flags`."""
    queries: int
    """[2, size, rows, H, D]."""
    results: int
    """[2, size, rows, H, V]."""
    sums: int
    """[2, size, rows, H] float32."""
    end: int
    """Bytes in all."""


def blocks_of(heads: int) -> int:
    """Programs of a row."""
    return cdiv(heads, _HEADS)


def layout_of(
    size: int, heads: int, dim: int, value_dim: int, itemsize: int, rows: int
) -> PagesLayout:
    """The arguments are as in `PagesMemory`."""
    flags, places = 4 * rows * blocks_of(heads) * size, 2 * size * rows * heads
    offsets = [0]
    for part in (flags, flags, places * dim * itemsize, places * value_dim * itemsize, 4 * places):
        offsets.append(offsets[-1] + -(-part // _ALIGNMENT) * _ALIGNMENT)
    return PagesLayout(*offsets)


def gather_queries(memory: PagesMemory, q: torch.Tensor) -> torch.Tensor:
    """[T, size * H, D]: the queries of all ranks' heads. All ranks must call it alike.

    Args:
        q: [T, H, D], contiguous: those of this rank's heads.
    """
    rows, heads, dim = q.shape
    if (heads, dim, q.element_size()) != (memory.heads, memory.dim, memory.itemsize):
        raise ValueError(f"queries {tuple(q.shape)} {q.dtype} do not fit {memory}")
    if not q.is_contiguous():
        raise ValueError("queries must be contiguous")
    out = torch.empty((rows, memory.size * heads, dim), dtype=q.dtype, device=q.device)
    layout, block = memory.layout, min(_HEADS, next_power_of_2(heads))
    for begin in range(0, rows, memory.rows):
        end = min(rows, begin + memory.rows)
        _queries_kernel[(end - begin, blocks_of(heads))](
            *(out[begin:end], q[begin:end], memory.bases, memory.turns[0], memory.control),
            *(layout.query_flags, layout.queries, memory.rows, heads),
            RANK=memory.rank, SIZE=memory.size, LANES=next_power_of_2(memory.size),
            HEADS=block, DIM=dim, BLOCK_DIM=next_power_of_2(dim), HAS_TIMER=q.is_cuda,
            num_warps=8, **launch_options(q.device),
        )  # fmt: skip
    return out


def merge_results(
    memory: PagesMemory, values: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """[T, H, V]: the merged results of this rank's heads. All ranks must call it alike.

    Args:
        values: [T, size * H, V], contiguous: attention of all heads to this rank's pages.
        sums: [T, size * H] float32, contiguous: the logarithm of each softmax's sum.
        sinks: [H] float32, or None.
    """
    rows, width, heads = values.shape[0], values.shape[2], memory.heads
    fits = (heads * memory.size, memory.value_dim, memory.itemsize)
    if (values.shape[1], width, values.element_size()) != fits or sums.shape != values.shape[:2]:
        raise ValueError(f"results {tuple(values.shape)} {values.dtype} do not fit {memory}")
    if not (values.is_contiguous() and sums.is_contiguous()) or sums.dtype != torch.float32:
        raise ValueError("results and sums must be contiguous, and sums float32")
    out = torch.empty((rows, heads, width), dtype=values.dtype, device=values.device)
    layout, block = memory.layout, min(_HEADS, next_power_of_2(heads))
    for begin in range(0, rows, memory.rows):
        end = min(rows, begin + memory.rows)
        _results_kernel[(end - begin, blocks_of(heads))](
            *(out[begin:end], values[begin:end], sums[begin:end], sinks),
            *(memory.bases, memory.turns[1], memory.control),
            *(layout.result_flags, layout.results, layout.sums, memory.rows, heads),
            RANK=memory.rank, SIZE=memory.size, LANES=next_power_of_2(memory.size),
            HEADS=block, WIDTH=width, BLOCK_WIDTH=next_power_of_2(width),
            HAS_TIMER=values.is_cuda, num_warps=8, **launch_options(values.device),
        )  # fmt: skip
    return out


@triton.jit
def _meet(
    bases: tl.tensor,
    flags_at: int,
    number: tl.tensor,
    turn: tl.tensor,
    control: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    HAS_TIMER: tl.constexpr,
) -> None:
    """Tells the other ranks that this program has written to them, and waits for theirs."""
    lane = tl.arange(0, LANES)
    are_others = (lane < SIZE) & (lane != RANK)
    all_bases = tl.load(bases + lane, mask=lane < SIZE, other=0)
    tl.debug_barrier()
    theirs = (all_bases + flags_at).to(tl.pointer_type(tl.int32)) + number * SIZE + RANK
    tl.atomic_xchg(
        theirs, tl.zeros([LANES], tl.int32) + turn, mask=are_others, sem="release", scope="sys"
    )
    own = (tl.load(bases + RANK) + flags_at).to(tl.pointer_type(tl.int32)) + number * SIZE
    await_turn(own + lane, are_others, lane, turn, control, LANES, HAS_TIMER)


@triton.jit
def _queries_kernel(
    out: tl.tensor,
    q: tl.tensor,
    bases: tl.tensor,
    turns: tl.tensor,
    control: tl.tensor,
    flags_at: int,
    queries_at: int,
    max_rows: int,
    heads: int,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_TIMER: tl.constexpr,
) -> None:
    release_next()
    row = tl.program_id(0)
    number = row * tl.num_programs(1) + tl.program_id(1)
    kind: tl.constexpr = q.dtype.element_ty
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_DIM)
    mask = (head < heads)[:, None] & (column < DIM)[None, :]
    wait_for_last()
    turn = tl.load(turns + number) + 1
    parity = (turn & 1).to(tl.int64)
    in_row = head[:, None] * DIM + column[None, :]
    own = tl.load(q + row.to(tl.int64) * heads * DIM + in_row, mask=mask, other=0.0)
    here = row.to(tl.int64) * heads * DIM
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = (tl.load(bases + peer) + queries_at).to(tl.pointer_type(kind))
            at = (parity * SIZE + RANK) * max_rows * heads * DIM + here
            tl.store(theirs + at + in_row, own, mask=mask)
    _meet(bases, flags_at, number, turn, control, RANK, SIZE, LANES, HAS_TIMER)
    came = (tl.load(bases + RANK) + queries_at).to(tl.pointer_type(kind))
    for peer in tl.static_range(SIZE):
        to = out + (row.to(tl.int64) * SIZE + peer) * heads * DIM + in_row
        if peer == RANK:
            tl.store(to, own, mask=mask)
        else:
            at = (parity * SIZE + peer) * max_rows * heads * DIM + here
            given = tl.load(came + at + in_row, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(to, given, mask=mask)
    tl.store(turns + number, turn)


@triton.jit
def _results_kernel(
    out: tl.tensor,
    values: tl.tensor,
    sums: tl.tensor,
    sinks: tl.tensor,
    bases: tl.tensor,
    turns: tl.tensor,
    control: tl.tensor,
    flags_at: int,
    results_at: int,
    sums_at: int,
    max_rows: int,
    heads: int,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    HAS_TIMER: tl.constexpr,
) -> None:
    release_next()
    row = tl.program_id(0)
    number = row * tl.num_programs(1) + tl.program_id(1)
    kind: tl.constexpr = values.dtype.element_ty
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < heads
    column = tl.arange(0, BLOCK_WIDTH)
    mask = is_head[:, None] & (column < WIDTH)[None, :]
    wait_for_last()
    turn = tl.load(turns + number) + 1
    parity = (turn & 1).to(tl.int64)
    here = row.to(tl.int64) * heads + head
    in_row = column[None, :]
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            given = (row.to(tl.int64) * SIZE + peer) * heads + head
            part = tl.load(values + given[:, None] * WIDTH + in_row, mask=mask, other=0.0)
            part_sums = tl.load(sums + given, mask=is_head, other=0.0)
            base = tl.load(bases + peer)
            at = (parity * SIZE + RANK) * max_rows * heads + here
            theirs = (base + results_at).to(tl.pointer_type(kind))
            tl.store(theirs + at[:, None] * WIDTH + in_row, part, mask=mask)
            tl.store((base + sums_at).to(tl.pointer_type(tl.float32)) + at, part_sums, mask=is_head)
    _meet(bases, flags_at, number, turn, control, RANK, SIZE, LANES, HAS_TIMER)
    base = tl.load(bases + RANK)
    came = (base + results_at).to(tl.pointer_type(kind))
    came_sums = (base + sums_at).to(tl.pointer_type(tl.float32))
    of_own = (row.to(tl.int64) * SIZE + RANK) * heads + head
    highest = tl.load(sums + of_own, mask=is_head, other=0.0)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            at = (parity * SIZE + peer) * max_rows * heads + here
            part_sums = tl.load(came_sums + at, mask=is_head, other=0.0, cache_modifier=".cg")
            highest = tl.maximum(highest, part_sums)
    total = tl.zeros([HEADS], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_head, other=0.0)
        highest = tl.maximum(highest, sink)
        total += tl.exp(sink - highest)
    mixed = tl.zeros([HEADS, BLOCK_WIDTH], tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            part_sums = tl.load(sums + of_own, mask=is_head, other=0.0)
            part = tl.load(values + of_own[:, None] * WIDTH + in_row, mask=mask, other=0.0)
        else:
            at = (parity * SIZE + peer) * max_rows * heads + here
            part_sums = tl.load(came_sums + at, mask=is_head, other=0.0, cache_modifier=".cg")
            part = tl.load(
                came + at[:, None] * WIDTH + in_row, mask=mask, other=0.0, cache_modifier=".cg"
            )
        share = tl.exp(part_sums - highest)
        total += share
        mixed += part.to(tl.float32) * share[:, None]
    at = out + here[:, None] * WIDTH + in_row
    tl.store(at, (mixed / total[:, None]).to(kind), mask=mask)
    tl.store(turns + number, turn)
