"""Rows on their way to the experts of ranks with a GPU each, and what experts add on its way back,
through memory that all of the ranks map.

Each rank has rows of its own and some of the experts. In one launch a program for each row writes
it to the ranks that have experts for it, once a rank, with its experts and their shares, and waits
until the rows of the same number have come from all other ranks. Each rank then computes its
experts over all rows, and a second launch sends what they add to each row back to its rank, which
adds it up in float32 in the order of the ranks, adds the residual, and rounds once.

All ranks say the same number of rows, which each fills up with rows that no expert takes. Flags,
turns and the end of long waits are those of `weft.kernels.ops.peers.triton_sum`. Nothing is written
twice before it was read: a rank sends further rows only once all others have sent back what they
add to the last ones, which they do after reading them; and it sends what experts add only once all
have sent further rows, which they do after reading what experts added before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.moe.spec import Routing
from weft.kernels.ops.peers.triton_sum import await_turn
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import next_power_of_2

_ALIGNMENT = 256


class ExpertMemory(NamedTuple):
    """A rank's view of the memory of all ranks; all ranks lay out their memory alike."""

    rank: int
    size: int
    shape: RowShape
    own: torch.Tensor
    """[bytes] uint8: this rank's memory."""
    bases: torch.Tensor
    """[size] int64 on the device: address in this process of each rank's memory."""
    turns: torch.Tensor
    """[2, most rows] int32 on the device: exchanges so far, of rows and of what experts add."""
    control: torch.Tensor
    """As `PeerMemory.control`."""
    takes_part: torch.Tensor
    """[1] int32 on the device: 1: all ranks make the same calls. 0: this one is alone, whose rows
    get nothing from experts of others.
    """
    num_sent: torch.Tensor
    """[1] int64 on the device: rows sent so far, each counted once a rank it went to."""


class RowShape(NamedTuple):
    width: int
    """Elements of a row."""
    dtype: torch.dtype
    top_k: int
    experts: int
    """Experts of each rank; their numbers are consecutive."""
    rows: int
    """Most rows of each rank in one exchange."""


class Layout(NamedTuple):
    """Offsets of the parts of one rank's memory, in bytes."""

    row_flags: int
    """[rows, size] int32: which ranks' rows have come."""
    added_flags: int
    """[rows, size] int32: from which ranks has come what experts add."""
    ids: int
    """[size, number of rows, top_k] int32: experts of all ranks' rows, by their places on this
    rank; `experts`: none of this rank. Like the following it is packed by the rows of an exchange.
    """
    shares: int
    """[size, number of rows, top_k] float32."""
    x: int
    """[size, number of rows, width]."""
    added: int
    """[size, number of rows, width]: what each rank's experts add to this rank's rows."""
    end: int
    """Bytes in all."""


def layout_of(size: int, shape: RowShape) -> Layout:
    """Lays out the memory of one of `size` ranks."""
    rows = size * shape.rows
    of_pairs, of_rows = 4 * rows * shape.top_k, rows * shape.width * shape.dtype.itemsize
    offsets = [0]
    for part in (4 * rows, 4 * rows, of_pairs, of_pairs, of_rows, of_rows):
        offsets.append(offsets[-1] + -(-part // _ALIGNMENT) * _ALIGNMENT)
    return Layout(*offsets)


def send_rows(
    memory: ExpertMemory, x: torch.Tensor, routing: Routing, num_rows: int
) -> tuple[torch.Tensor, Routing]:
    """Sends rows to the ranks that have experts for them. All ranks must call it alike.

    Args:
        x: [T, width], contiguous; T may be 0.
        routing: Experts by their numbers among all ranks, contiguous.
        num_rows: Equal on all ranks, at least T, at most `RowShape.rows`.

    Returns:
        The rows of all ranks, [size * num_rows, width], and their experts by places on this rank;
        in the memory of the exchange, valid until the next one. Rows without an expert here may
        hold any numbers.

    Raises:
        ValueError: The rows do not fit the memory.
    """
    shape, (ids, shares) = memory.shape, routing
    count, most = x.shape[0], memory.size * num_rows
    if x.shape[1] != shape.width or x.dtype != shape.dtype or ids.shape != (count, shape.top_k):
        raise ValueError(f"rows {tuple(x.shape)} {x.dtype} with {tuple(ids.shape)} experts")
    if not count <= num_rows <= shape.rows or num_rows < 1:
        raise ValueError(f"{count} of {num_rows} rows; the memory is for {shape.rows}")
    if not (x.is_contiguous() and ids.is_contiguous() and shares.is_contiguous()):
        raise ValueError("rows and their experts must be contiguous")
    layout, block = layout_of(memory.size, shape), next_power_of_2(shape.width)
    _send_kernel[(num_rows,)](
        *(x, ids, shares, count, num_rows, shape.width, shape.experts),
        *(memory.bases, memory.turns[0], memory.control, memory.takes_part, memory.num_sent),
        *(layout.row_flags, layout.ids, layout.shares, layout.x),
        RANK=memory.rank, SIZE=memory.size, LANES=next_power_of_2(memory.size),
        TOP_K=shape.top_k, PAIRS=next_power_of_2(shape.top_k), BLOCK=block, HAS_TIMER=x.is_cuda,
        num_warps=max(1, min(16, block // 256)),
        **launch_options(x.device),
    )  # fmt: skip

    def part(begin: int, dtype: torch.dtype, width: int) -> torch.Tensor:
        num_bytes = most * width * dtype.itemsize
        return memory.own[begin : begin + num_bytes].view(dtype).view(most, width)

    sent = (
        part(layout.ids, torch.int32, shape.top_k),
        part(layout.shares, torch.float32, shape.top_k),
    )
    return part(layout.x, shape.dtype, shape.width), Routing(*sent)


def return_rows(
    memory: ExpertMemory,
    added: torch.Tensor,
    ids: torch.Tensor,
    residual: torch.Tensor | None,
    num_rows: int,
) -> torch.Tensor:
    """Sends back what this rank's experts add to the rows of the last `send_rows`, and adds up what
    this rank's rows get. All ranks must call it alike.

    Args:
        added: [size * num_rows, width], contiguous.
        ids: [T, top_k]: experts of this rank's rows, by their numbers among all ranks.
        residual: [T, width], contiguous, or None.

    Returns:
        [T, width].

    Raises:
        ValueError: The rows do not fit the last `send_rows`.
    """
    shape, count = memory.shape, ids.shape[0]
    if added.shape != (memory.size * num_rows, shape.width) or added.dtype != shape.dtype:
        raise ValueError(
            f"{tuple(added.shape)} {added.dtype} added to {memory.size} x {num_rows} rows"
        )
    if count > num_rows or ids.shape != (count, shape.top_k):
        raise ValueError(f"{tuple(ids.shape)} experts of at most {num_rows} rows")
    if residual is not None and residual.shape != (count, shape.width):
        raise ValueError(f"residual {tuple(residual.shape)} of {count} rows")
    if not all(one is None or one.is_contiguous() for one in (added, ids, residual)):
        raise ValueError("rows and their experts must be contiguous")
    out = torch.empty((count, shape.width), dtype=shape.dtype, device=added.device)
    layout, block = layout_of(memory.size, shape), next_power_of_2(shape.width)
    _return_kernel[(num_rows,)](
        *(out, added, ids, residual, count, num_rows, shape.width, shape.experts),
        *(memory.bases, memory.turns[1], memory.control, memory.takes_part),
        *(layout.added_flags, layout.ids, layout.added),
        RANK=memory.rank, SIZE=memory.size, LANES=next_power_of_2(memory.size),
        TOP_K=shape.top_k, PAIRS=next_power_of_2(shape.top_k), BLOCK=block,
        HAS_TIMER=added.is_cuda, num_warps=max(1, min(16, block // 256)),
        **launch_options(added.device),
    )  # fmt: skip
    return out


@triton.jit
def _meet(
    bases: tl.tensor,
    own_base: tl.tensor,
    flags_at: int,
    number: tl.tensor,
    turn: tl.tensor,
    together: tl.tensor,
    control: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    HAS_TIMER: tl.constexpr,
) -> None:
    """Tells the other ranks that this program has written to them, and waits for theirs."""
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    are_others = (lane < SIZE * together) & (lane != RANK)
    all_bases = tl.load(bases + lane, mask=lane < SIZE, other=0)
    their_flags = (all_bases + flags_at).to(tl.pointer_type(tl.int32)) + number * SIZE + RANK
    tl.atomic_xchg(
        their_flags, tl.zeros([LANES], tl.int32) + turn,
        mask=are_others, sem="release", scope="sys",
    )  # fmt: skip
    own_flags = (own_base + flags_at).to(tl.pointer_type(tl.int32)) + number * SIZE
    await_turn(own_flags + lane, are_others, lane, turn, control, LANES, HAS_TIMER)


@triton.jit(do_not_specialize=["count", "rows"])
def _send_kernel(
    x: tl.tensor,
    ids: tl.tensor,
    shares: tl.tensor,
    count: int,
    rows: int,
    width: int,
    experts: int,
    bases: tl.tensor,
    turns: tl.tensor,
    control: tl.tensor,
    takes_part: tl.tensor,
    num_sent: tl.tensor,
    flags_at: int,
    ids_at: int,
    shares_at: int,
    x_at: int,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TIMER: tl.constexpr,
) -> None:
    """Does not release the next launch early: kernels of experts may read rows before their wait,
    as rows come from a launch before the routing's where no ranks take part.
    """
    wait_for_last()
    number = tl.program_id(0)
    together = tl.load(takes_part)
    turn = tl.load(turns + number) + together
    kind: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    columns = tl.where(number < count, width, 0)
    row = tl.load(x + number.to(tl.int64) * width + column, mask=column < columns, other=0.0)
    pair = tl.arange(0, PAIRS)
    is_given = pair < tl.where(number < count, TOP_K, 0)
    chosen = tl.load(ids + number * TOP_K + pair, mask=is_given, other=-1)
    share = tl.load(shares + number * TOP_K + pair, mask=is_given, other=0.0)
    place = (rows * RANK + number).to(tl.int64)
    sent = together * 0
    for peer in tl.static_range(SIZE):
        base = tl.load(bases + peer)
        there = chosen - peer * experts
        is_there = (there >= 0) & (there < experts)
        is_sent = pair < TOP_K
        if peer != RANK:
            is_sent = pair < TOP_K * together
        to_ids = (base + ids_at).to(tl.pointer_type(tl.int32)) + place * TOP_K + pair
        tl.store(to_ids, tl.where(is_there, there, experts), mask=is_sent)
        to_shares = (base + shares_at).to(tl.pointer_type(tl.float32)) + place * TOP_K + pair
        tl.store(to_shares, share, mask=is_sent)
        num_there = tl.sum(tl.where(is_there & is_sent, 1, 0), axis=0)
        to_x = tl.multiple_of((base + x_at).to(tl.pointer_type(kind)), 16)
        needed = tl.where(num_there != 0, columns, 0)
        if peer != RANK:
            sent += tl.where(num_there != 0, 1, 0)
        tl.store(to_x + place * width + column, row, mask=column < needed)
    tl.atomic_add(num_sent, sent.to(tl.int64), sem="relaxed")
    own_base = tl.load(bases + RANK)
    if together == 0:
        # Nobody else writes here, and what others sent last must not be computed again.
        own_ids = (own_base + ids_at).to(tl.pointer_type(tl.int32))
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                at = (rows * peer + number).to(tl.int64) * TOP_K + pair
                tl.store(own_ids + at, tl.zeros([PAIRS], tl.int32) + experts, mask=pair < TOP_K)
    _meet(bases, own_base, flags_at, number, turn, together, control, RANK, SIZE, LANES, HAS_TIMER)
    tl.store(turns + number, turn)


@triton.jit(do_not_specialize=["count", "rows"])
def _return_kernel(
    out: tl.tensor,
    added: tl.tensor,
    ids: tl.tensor,
    residual: tl.tensor,
    count: int,
    rows: int,
    width: int,
    experts: int,
    bases: tl.tensor,
    turns: tl.tensor,
    control: tl.tensor,
    takes_part: tl.tensor,
    flags_at: int,
    ids_at: int,
    added_at: int,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TIMER: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    number = tl.program_id(0)
    together = tl.load(takes_part)
    turn = tl.load(turns + number) + together
    kind: tl.constexpr = out.dtype.element_ty
    column = tl.arange(0, BLOCK)
    columns = tl.where(number < count, width, 0)
    pair = tl.arange(0, PAIRS)
    own_base = tl.load(bases + RANK)
    given_ids = (own_base + ids_at).to(tl.pointer_type(tl.int32))
    place = (rows * RANK + number).to(tl.int64)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            of_peer = (rows * peer + number).to(tl.int64)
            given = tl.load(given_ids + of_peer * TOP_K + pair, mask=pair < TOP_K, other=experts)
            num_here = tl.sum(tl.where(given < experts, 1, 0), axis=0)
            sent = tl.where(num_here * together != 0, width, 0)
            part = tl.load(added + of_peer * width + column, mask=column < sent, other=0.0)
            theirs = (tl.load(bases + peer) + added_at).to(tl.pointer_type(kind))
            tl.store(tl.multiple_of(theirs, 16) + place * width + column, part, mask=column < sent)
    _meet(bases, own_base, flags_at, number, turn, together, control, RANK, SIZE, LANES, HAS_TIMER)
    is_given = pair < tl.where(number < count, TOP_K, 0)
    chosen = tl.load(ids + number * TOP_K + pair, mask=is_given, other=-1)
    own_added = tl.multiple_of((own_base + added_at).to(tl.pointer_type(kind)), 16)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        at = (rows * peer + number).to(tl.int64) * width + column
        if peer == RANK:
            total += tl.load(added + at, mask=column < columns, other=0.0).to(tl.float32)
        else:
            there = chosen - peer * experts
            num_there = tl.sum(tl.where((there >= 0) & (there < experts), 1, 0), axis=0)
            came = tl.where(num_there * together != 0, width, 0)
            total += tl.load(
                own_added + at, mask=column < came, other=0.0, cache_modifier=".cg"
            ).to(tl.float32)  # fmt: skip
    at = number.to(tl.int64) * width + column
    if residual is not None:
        total += tl.load(residual + at, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(kind), mask=column < columns)
    tl.store(turns + number, turn)
