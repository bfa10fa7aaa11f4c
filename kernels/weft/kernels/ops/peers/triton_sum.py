"""Sums over ranks with a GPU each, through memory that all of them map.

A program takes a row. Up to a size it writes the row's part to all other ranks, waits for theirs,
and adds up all parts (one exchange). For more rows, each row has an owner, which adds up the parts
and writes the sum to all ranks (two exchanges, but fewer bytes). Both add the parts in float32 in
the order of the ranks, then the residual, and round once, so that all ranks get the same bits. The
norm that follows is computed in the same launch.

Flags say which parts have arrived. They count a row's exchanges (`turns`), since a captured launch
cannot carry a number of its own. Parts alternate between two places. A rank writes a row's part of
exchange n + 2 only after all ranks have begun exchange n + 1, and so no longer read exchange n.

A program that has waited for about a tenth of a second reads the group's stop word on the host, and
sets it when its time limit has passed. Results are then meaningless, and a reader of the results
must check the stop word as well. Programs do not read it sooner, because ranks often arrive at a
sum milliseconds apart: the reads of thousands of programs would queue for tens of milliseconds,
long after the late rank has arrived.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.peers.spec import LATE
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

MAX_TOKENS = 1 << 14
"""Most tokens that one launch of `share_tokens` takes."""
_LATE = tl.constexpr(LATE)
_TOKENS = 256
"""Tokens of one program of `share_tokens`."""
_ALIGNMENT = 256
SPINS_TO_LOOK = tl.constexpr(1 << 17)
"""Number of times that a waiting program checks its flags, about a microsecond each, before it
reads the stop word on the host.
"""


class PeerMemory(NamedTuple):
    """A rank's view of the memory of all ranks; all ranks lay out their memory alike."""

    rank: int
    size: int
    width: int
    """Elements of a row."""
    itemsize: int
    """Bytes of an element."""
    once_rows: int
    """Most rows of a sum with one exchange."""
    twice_rows: int
    """Most rows of a sum with two exchanges."""
    bases: torch.Tensor
    """[size] int64 on the device: address in this process of each rank's memory."""
    turns: torch.Tensor
    """[once_rows + twice_rows + programs of `share_tokens`] int32 on the device: number of
    exchanges so far.
    """
    control: torch.Tensor
    """[2] int64 on the device: addresses on the host of the stop word (uint32) and of the longest
    wait in nanoseconds (int64); 0: there are none.
    """

    @property
    def row_bytes(self) -> int:
        return self.width * self.itemsize

    @property
    def layout(self) -> Layout:
        return layout_of(self.size, self.row_bytes, self.once_rows, self.twice_rows)


class Layout(NamedTuple):
    """Offsets of the parts of one rank's memory, in bytes."""

    once_flags: int
    """[once_rows, size] int32."""
    twice_flags: int
    """[twice_rows, size] int32: which parts have arrived at the row's owner."""
    sum_flags: int
    """[twice_rows] int32: whether the owner's sum has arrived."""
    token_flags: int
    """int32 for each program of `share_tokens`."""
    tokens: int
    """[2, MAX_TOKENS] int64."""
    once_parts: int
    """[2, size, once_rows, width]."""
    twice_parts: int
    """[2, size, twice_rows / size, width]."""
    sums: int
    """[twice_rows, width]."""
    end: int
    """Bytes in all."""


def layout_of(size: int, row_bytes: int, once_rows: int, twice_rows: int) -> Layout:
    """Lays out a rank's memory; `twice_rows` is a multiple of `size`."""
    sizes = (
        4 * once_rows * size,
        4 * twice_rows * size,
        4 * twice_rows,
        4 * (MAX_TOKENS // _TOKENS),
        2 * 8 * MAX_TOKENS,
        2 * size * once_rows * row_bytes,
        2 * twice_rows * row_bytes,
        twice_rows * row_bytes,
    )
    offsets = [0]
    for part in sizes:
        offsets.append(offsets[-1] + -(-part // _ALIGNMENT) * _ALIGNMENT)
    return Layout(*offsets)


def num_turns(once_rows: int, twice_rows: int) -> int:
    """Length of `PeerMemory.turns`."""
    return once_rows + twice_rows + MAX_TOKENS // _TOKENS


def sum_rows(
    memory: PeerMemory,
    x: torch.Tensor,
    residual: torch.Tensor,
    total: torch.Tensor,
    norm: Norm | None = None,
    tap: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Sets total = residual + the sum of `x` over all ranks. All ranks must call it alike.

    Args:
        x: [T, width], contiguous: this rank's part.
        residual: [T, width], contiguous, of the dtype of `x`.
        total: Like `residual`; may be `residual`.
        tap: [T, width] with rows of any stride: receives the result as well; or None.

    Returns:
        [T, width]: norm(total); None without a norm.
    """
    for one in (x, residual, total):
        if one.shape != x.shape or one.dtype != x.dtype or not one.is_contiguous():
            raise ValueError(f"{tuple(one.shape)} {one.dtype} is not like x {tuple(x.shape)}")
    if x.shape[1] != memory.width or x.element_size() != memory.itemsize:
        raise ValueError(f"rows of {x.shape[1]} {x.dtype}, the memory is for {memory.width}")
    if norm is not None and norm.weight.shape != (memory.width,):
        raise ValueError(f"a norm of {tuple(norm.weight.shape)} for rows of {memory.width}")
    out = None if norm is None else torch.empty_like(x)
    rows, begin = x.shape[0], 0
    is_once = rows <= memory.once_rows or memory.once_rows >= memory.twice_rows
    most = memory.once_rows if is_once else memory.twice_rows
    layout = memory.layout
    where = (
        (layout.once_flags, layout.once_parts, 0, 0)
        if is_once
        else (layout.twice_flags, layout.twice_parts, layout.sum_flags, layout.sums)
    )
    block = next_power_of_2(memory.width)
    while begin < rows:
        end = min(rows, begin + most)
        part_tap = None if tap is None else tap[begin:end]
        _sum_kernel[(end - begin,)](
            *(None if out is None else out[begin:end], total[begin:end], x[begin:end]),
            *(residual[begin:end], None if norm is None else norm.weight, part_tap),
            *(memory.width, 0 if tap is None else tap.stride(0), 0.0 if norm is None else norm.eps),
            *(memory.bases, memory.turns[0 if is_once else memory.once_rows :], memory.control),
            *where, most if is_once else most // memory.size,
            RANK=memory.rank, SIZE=memory.size, LANES=next_power_of_2(memory.size),
            IS_ONCE=is_once, BLOCK=block, HAS_TIMER=x.is_cuda,
            num_warps=max(1, min(16, block // 256)),
            **launch_options(x.device),
        )  # fmt: skip
        begin = end
    return out


def share_tokens(memory: PeerMemory, tokens: torch.Tensor) -> torch.Tensor:
    """Gives the tokens of rank 0 to all ranks. All ranks must call it alike.

    Args:
        tokens: [L] int64, contiguous; of other ranks only L counts.

    Returns:
        [L] int64: the tokens of rank 0.

    Raises:
        ValueError: There are more than MAX_TOKENS.
    """
    count = tokens.shape[0]
    if count > MAX_TOKENS or tokens.dtype != torch.int64 or not tokens.is_contiguous():
        raise ValueError(f"{count} tokens of {tokens.dtype}; at most {MAX_TOKENS} are shared")
    out = tokens if memory.rank == 0 else torch.empty_like(tokens)
    layout = memory.layout
    if count:
        _share_kernel[(cdiv(count, _TOKENS),)](
            *(out, tokens, count, memory.bases, memory.turns[-(MAX_TOKENS // _TOKENS) :]),
            *(memory.control, layout.token_flags, layout.tokens, MAX_TOKENS),
            RANK=memory.rank, SIZE=memory.size, LANES=next_power_of_2(memory.size),
            BLOCK=_TOKENS, HAS_TIMER=tokens.is_cuda, num_warps=1,
            **launch_options(tokens.device),
        )  # fmt: skip
    return out


@triton.jit
def await_turn(
    flags: tl.tensor,
    mask: tl.tensor,
    lane: tl.tensor,
    turn: tl.tensor,
    control: tl.tensor,
    LANES: tl.constexpr,
    HAS_TIMER: tl.constexpr,
) -> None:
    """Returns when all flags have reached `turn`, or the group has stopped."""
    nothing = tl.zeros([LANES], tl.int32)
    seen = tl.atomic_add(flags, nothing, mask=mask, sem="acquire", scope="sys")
    # Compared by difference, since turns wrap around.
    waits = tl.max(tl.where(mask & (seen - turn < 0), 1, 0), axis=0)
    spins = 0
    began = turn.to(tl.int64) * 0
    while waits != 0:
        seen = tl.atomic_add(flags, nothing, mask=mask, sem="acquire", scope="sys")
        waits = tl.max(tl.where(mask & (seen - turn < 0), 1, 0), axis=0)
        spins += 1
        if spins == SPINS_TO_LOOK:
            spins = spins * 0
            stop_at = tl.load(control)
            if stop_at != 0:
                stop = stop_at.to(tl.pointer_type(tl.int32))
                if tl.load(stop, volatile=True) != 0:
                    waits = waits * 0
                elif HAS_TIMER:
                    now = tl.extra.cuda.globaltimer()
                    if began == 0:
                        began = now
                    limit = tl.load(control + 1).to(tl.pointer_type(tl.int64))
                    if now - began > tl.load(limit, volatile=True):
                        missing = mask & (seen - turn < 0)
                        late = tl.min(tl.where(missing, lane, LANES), axis=0)
                        tl.store(stop, late + _LATE)
                        waits = waits * 0


@triton.jit
def _sum_kernel(
    out: tl.tensor,
    total: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    tap: tl.tensor,
    width: int,
    tap_stride: int,
    eps: float,
    bases: tl.tensor,
    turns: tl.tensor,
    control: tl.tensor,
    flags_at: int,
    parts_at: int,
    sum_flags_at: int,
    sums_at: int,
    part_rows: int,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    IS_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TIMER: tl.constexpr,
) -> None:
    release_next()
    number = tl.program_id(0)
    begin = number.to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    mask = column < width
    lane = tl.arange(0, LANES)
    are_others = (lane < SIZE) & (lane != RANK)
    kind: tl.constexpr = x.dtype.element_ty
    own_base = tl.load(bases + RANK)
    all_bases = tl.load(bases + lane, mask=lane < SIZE, other=0)
    if weight is not None:
        gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    wait_for_last()
    turn = tl.load(turns + number) + 1
    parity = (turn & 1).to(tl.int64)
    row = tl.load(x + begin + column, mask=mask, other=0.0)
    stream = tl.load(residual + begin + column, mask=mask, other=0.0).to(tl.float32)
    own_flags = (own_base + flags_at).to(tl.pointer_type(tl.int32)) + number * SIZE
    own_parts = tl.multiple_of((own_base + parts_at).to(tl.pointer_type(kind)), 16)
    if IS_ONCE:
        place = number.to(tl.int64)
        here = ((parity * SIZE + RANK) * part_rows + place) * width
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                theirs = (tl.load(bases + peer) + parts_at).to(tl.pointer_type(kind))
                tl.store(tl.multiple_of(theirs, 16) + here + column, row, mask=mask)
        tl.debug_barrier()
        their_flags = (all_bases + flags_at).to(tl.pointer_type(tl.int32)) + number * SIZE + RANK
        tl.atomic_xchg(
            their_flags, tl.zeros([LANES], tl.int32) + turn,
            mask=are_others, sem="release", scope="sys",
        )  # fmt: skip
        await_turn(own_flags + lane, are_others, lane, turn, control, LANES, HAS_TIMER)
        added = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(SIZE):
            if peer == RANK:
                added += row.to(tl.float32)
            else:
                at = ((parity * SIZE + peer) * part_rows + place) * width
                added += tl.load(
                    own_parts + at + column, mask=mask, other=0.0, cache_modifier=".cg"
                ).to(tl.float32)
        summed = (stream + added).to(kind)
    else:
        owner = number % SIZE
        place = (number // SIZE).to(tl.int64)
        if owner == RANK:
            await_turn(own_flags + lane, are_others, lane, turn, control, LANES, HAS_TIMER)
            added = tl.zeros([BLOCK], tl.float32)
            for peer in tl.static_range(SIZE):
                if peer == RANK:
                    added += row.to(tl.float32)
                else:
                    at = ((parity * SIZE + peer) * part_rows + place) * width
                    added += tl.load(
                        own_parts + at + column, mask=mask, other=0.0, cache_modifier=".cg"
                    ).to(tl.float32)
            summed = (stream + added).to(kind)
            for peer in tl.static_range(SIZE):
                if peer != RANK:
                    theirs = (tl.load(bases + peer) + sums_at).to(tl.pointer_type(kind))
                    tl.store(tl.multiple_of(theirs, 16) + begin + column, summed, mask=mask)
            tl.debug_barrier()
            their_flags = (all_bases + sum_flags_at).to(tl.pointer_type(tl.int32)) + number
            tl.atomic_xchg(
                their_flags, tl.zeros([LANES], tl.int32) + turn,
                mask=are_others, sem="release", scope="sys",
            )  # fmt: skip
        else:
            owner_base = tl.load(bases + owner)
            here = ((parity * SIZE + RANK) * part_rows + place) * width
            theirs = tl.multiple_of((owner_base + parts_at).to(tl.pointer_type(kind)), 16)
            tl.store(theirs + here + column, row, mask=mask)
            tl.debug_barrier()
            flag = (owner_base + flags_at).to(tl.pointer_type(tl.int32)) + number * SIZE + RANK
            tl.atomic_xchg(flag, turn, sem="release", scope="sys")
            came = (own_base + sum_flags_at).to(tl.pointer_type(tl.int32)) + number
            await_turn(came + lane * 0, lane == owner, lane, turn, control, LANES, HAS_TIMER)
            sums = tl.multiple_of((own_base + sums_at).to(tl.pointer_type(kind)), 16)
            summed = tl.load(sums + begin + column, mask=mask, other=0.0, cache_modifier=".cg")
    tl.store(total + begin + column, summed, mask=mask)
    if tap is not None:
        tl.store(tap + number.to(tl.int64) * tap_stride + column, summed, mask=mask)
    if out is not None:
        value = summed.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
        tl.store(out + begin + column, (value * scale * gain).to(kind), mask=mask)
    tl.store(turns + number, turn)


@triton.jit
def _share_kernel(
    out: tl.tensor,
    tokens: tl.tensor,
    count: int,
    bases: tl.tensor,
    turns: tl.tensor,
    control: tl.tensor,
    flags_at: int,
    tokens_at: int,
    capacity: int,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TIMER: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    number = tl.program_id(0)
    turn = tl.load(turns + number) + 1
    at = number * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    here = (turn & 1) * capacity + at
    lane = tl.arange(0, LANES)
    if RANK == 0:
        mine = tl.load(tokens + at, mask=mask, other=0)
        for peer in tl.static_range(1, SIZE):
            theirs = (tl.load(bases + peer) + tokens_at).to(tl.pointer_type(tl.int64))
            tl.store(theirs + here, mine, mask=mask)
        tl.debug_barrier()
        others = (lane < SIZE) & (lane != 0)
        all_bases = tl.load(bases + lane, mask=lane < SIZE, other=0)
        flags = (all_bases + flags_at).to(tl.pointer_type(tl.int32)) + number
        tl.atomic_xchg(
            flags, tl.zeros([LANES], tl.int32) + turn, mask=others, sem="release", scope="sys"
        )
    else:
        base = tl.load(bases + RANK)
        came = (base + flags_at).to(tl.pointer_type(tl.int32)) + number
        await_turn(came + lane * 0, lane == 0, lane, turn, control, LANES, HAS_TIMER)
        given = (base + tokens_at).to(tl.pointer_type(tl.int64))
        tl.store(out + at, tl.load(given + here, mask=mask, cache_modifier=".cg"), mask=mask)
    tl.store(turns + number, turn)
