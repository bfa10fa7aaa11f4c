"""Low-rank additions row by row on a GPU, without sorting, for steps in which rows rarely share an
adapter.

A program takes one row and streams a part of its adapter. Programs without work end at once, so
that a captured graph serves any mix of adapters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.lora.triton_parts import (
    FREE,
    PartRows,
    Parts,
    aligned,
    before,
    column_alignment,
    columns,
    most_rows,
    new_ranks,
    part_of,
    pick,
    rows_in,
    splits_of,
)
from weft.kernels.shared.dependent_launch import LaunchOptions, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_COLUMNS = 256
_TILE = 1024
"""Elements of K that a program takes at once."""
_PROGRAMS = 1024
"""Number of programs that keep the memory busy."""
_MIN_SPLIT_K = 512
"""Elements of K below which parts are too short to pay for their sum."""
_MAX_SPLITS = 8


class RowSlots(NamedTuple):
    """The adapter slot of each row: its token's, or that of one of the token's experts."""

    token_slots: torch.Tensor
    """[T] int32: adapter slot of each token."""
    ids: torch.Tensor
    """[T * k] int32: the expert of each pair; not read without experts."""
    experts: int = 0
    """Number of values that `ids` may have (`weft.kernels.ops.moe.spec.ExpertWeights.num_places`);
    0: there are no experts.
    """
    top_k: int = 1
    """Rows of a token: row p belongs to token p // k."""
    are_equal: bool = False
    """Whether all experts share the parameters; `ids` are then not read."""


class NormOfRows(NamedTuple):
    """The RMS norm of an input, which each program computes itself: it multiplies the input by the
    norm's weight, and the sums by the scale of their row.
    """

    weight: torch.Tensor
    """[K], dtype of the input."""
    eps: float


def of_tokens(token_slots: torch.Tensor) -> RowSlots:
    """Slots for rows that are tokens."""
    return RowSlots(token_slots, token_slots)


def shrink_rows(
    x: torch.Tensor,
    parts: Parts,
    layer: int,
    slots: RowSlots,
    options: LaunchOptions,
    x_top_k: int = 1,
    entries: torch.Tensor | None = None,
    *,
    norm: NormOfRows | None = None,
    is_early: bool = False,
    is_fixed: bool = False,
    are_zero: bool = False,
) -> torch.Tensor:
    """Computes the ranks of each row, separately from other rows.

    Args:
        x: [R / x_top_k, K]: x_top_k neighbouring rows share one row of x.
        x_top_k: Rows that share an input.
        entries: Written, if given; from `new_entries`.
        norm: Applied to `x` first; or None.
        is_early: Whether A may be loaded while the preceding kernel still computes x. Rows must be
            tokens, and their slots must have been written before a launch that was not dependent.
        is_fixed: Whether a row's sums must not depend on the number of rows; then K is not split.
        are_zero: Whether ranks that a row does not have are 0 instead of undefined.

    Returns:
        [splits, R, ranks of all parts] float32; the splits are to be added up.
    """
    depth, rows = x.shape[1], x.shape[0] * x_top_k
    programs = max(1, min(max(most_rows(parts)), _PROGRAMS // (rows * len(parts))))
    splits = splits_of(rows * len(parts) * programs, depth, _MIN_SPLIT_K, _MAX_SPLITS)
    if is_fixed:
        programs, splits = 1, 1
    if norm is not None:
        splits = 1
    ranks = new_ranks(rows, parts, splits, x.device, are_zero=are_zero)
    _shrink_kernel[(rows, len(parts) * programs, splits)](
        ranks, entries, x, slots.token_slots, slots.ids, PartRows.of_a(parts),
        *most_rows(parts), layer, parts[0].table.shape[1], ranks.shape[2],
        0 if entries is None else entries.shape[2], *(norm or (None, 0.0)), K=depth,
        EXPERTS=slots.experts, TOP_K=slots.top_k, ARE_EQUAL=slots.are_equal, X_TOP_K=x_top_k,
        SPLITS=splits, PROGRAMS=programs, IS_EARLY=is_early,
        TILE=min(_TILE, next_power_of_2(cdiv(depth, splits))),
        num_warps=4, **options,
    )  # fmt: skip
    return ranks


def expand_rows(
    out: torch.Tensor,
    ranks: torch.Tensor,
    parts: Parts,
    layer: int,
    slots: RowSlots,
    options: LaunchOptions,
    *,
    is_new: bool = False,
    ranks_top_k: int = 1,
) -> None:
    """Adds each row's ranks times B to `out`.

    Args:
        out: [R, N].
        ranks: [splits, R / ranks_top_k, ranks of all parts], from `shrink_rows`.
        is_new: Whether the parts' columns of `out` are overwritten, with 0 where nothing is added.
        ranks_top_k: Rows that share ranks.
    """
    blocks = sum(cdiv(part.out_features, _COLUMNS) for part in parts)
    _expand_kernel[(out.shape[0], blocks)](
        out, ranks, slots.token_slots, slots.ids, PartRows.of_b(parts),
        *most_rows(parts), layer, parts[0].table.shape[1],
        *columns(parts), *ranks.shape[1:], out.shape[1], EXPERTS=slots.experts,
        TOP_K=slots.top_k, ARE_EQUAL=slots.are_equal, RANKS_TOP_K=ranks_top_k, IS_NEW=is_new,
        SPLITS=ranks.shape[0], COLUMNS=_COLUMNS,
        ALIGNMENT=column_alignment(parts, out.shape[1]), num_warps=4, **options,
    )  # fmt: skip


@triton.jit
def slot_of(
    row: int,
    token_slots: tl.tensor,
    ids: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ARE_EQUAL: tl.constexpr,
) -> tl.tensor:
    """Slot of a row; 0: no adapter."""
    slot = tl.load(token_slots + row // TOP_K)
    if EXPERTS > 0:
        slot *= EXPERTS
        if not ARE_EQUAL:
            slot = tl.where(slot == 0, 0, slot + tl.load(ids + row))
    return slot


@triton.jit
def times_b(
    total: tl.tensor,
    given: tl.tensor,
    b: tl.tensor,
    row: tl.tensor,
    features: int,
    column: tl.tensor,
) -> tl.tensor:
    """[COLUMNS] float32: `total` plus one row of the pool's B, weighed by its 8 ranks."""
    rank = tl.arange(0, 8)
    at = b + (row.to(tl.int64) * 8 + rank[:, None]) * features + column[None, :]
    tile = tl.load(at, mask=(column < features)[None, :], other=0.0)
    return total + tl.sum(tile.to(tl.float32) * given[:, None], axis=0)


@triton.jit(do_not_specialize=[*FREE, "entry_width"])
def _shrink_kernel(
    ranks: tl.tensor,
    entries: tl.tensor,
    x: tl.tensor,
    token_slots: tl.tensor,
    ids: tl.tensor,
    of_a: PartRows,
    max_rows0: int,
    max_rows1: int,
    max_rows2: int,
    layer: int,
    slots: int,
    width: int,
    entry_width: int,
    gain: tl.tensor,
    eps: float,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ARE_EQUAL: tl.constexpr,
    X_TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    IS_EARLY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The ranks of some of a slot's rows for one row of x, over a part of K."""
    release_next()
    if not IS_EARLY:
        wait_for_last()
    token, split = tl.program_id(0), tl.program_id(2)
    part, first = tl.program_id(1) // PROGRAMS, tl.program_id(1) % PROGRAMS
    slot = slot_of(token, token_slots, ids, EXPERTS, TOP_K, ARE_EQUAL)
    at = layer * slots + slot
    table, its_count = rows_in(of_a, part, at, max_rows0, max_rows1, max_rows2)
    PART: tl.constexpr = ((K + SPLITS * TILE - 1) // (SPLITS * TILE)) * TILE
    rank = tl.arange(0, 8)
    step = tl.arange(0, TILE)
    given_at = x + (token // X_TOP_K).to(tl.int64) * K
    to = ranks + (split * tl.num_programs(0) + token) * width
    to += 8 * before(part, max_rows0, max_rows1)
    count = tl.load(its_count, mask=slot > 0, other=0)
    one = tl.load(table + first, mask=count > first, other=0)
    a = pick(part, *of_a.pools)
    column = split * PART + step
    tile = _tile_of_a(a, one, rank, column, K, count > first)
    if IS_EARLY:
        # Before the wait it reads only data from before the step, and writes nothing.
        wait_for_last()
    if entries is not None:
        entry = entries + (part * tl.num_programs(0) + token) * entry_width
        tl.store(entry, count)
    scale = 1.0
    if gain is not None:
        scale = _scale_of(given_at, eps, K, TILE)
    for index in range(first, count, PROGRAMS):
        if index > first:
            one = tl.load(table + index)
            tile = _tile_of_a(a, one, rank, column, K, count > index)
        if entries is not None:
            tl.store(entry + 1 + index, one)
        total = tile.to(tl.float32) * _given(given_at, gain, column, K)[None, :]
        for start in range(TILE, PART, TILE):
            more = _tile_of_a(a, one, rank, column + start, K, count > index)
            total += more.to(tl.float32) * _given(given_at, gain, column + start, K)[None, :]
        tl.store(to + index * 8 + rank, tl.sum(total, axis=1) * scale)


@triton.jit
def _tile_of_a(
    a: tl.tensor,
    row: tl.tensor,
    rank: tl.tensor,
    column: tl.tensor,
    K: tl.constexpr,
    is_there: tl.tensor,
) -> tl.tensor:
    """[8, TILE] of a row of the pool; zero beyond K, and for a row that does not exist."""
    at = a + (row.to(tl.int64) * 8 + rank[:, None]) * K + column[None, :]
    depth = tl.where(is_there, K, 0)
    return tl.load(at, mask=(column < depth)[None, :], other=0.0)


@triton.jit
def _given(begin: tl.tensor, gain: tl.tensor, column: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """[TILE] float32 of a row of the input, times the norm's weight if there is a norm, but without
    its scale.
    """
    values = tl.load(begin + column, mask=column < K, other=0.0).to(tl.float32)
    if gain is not None:
        values *= tl.load(gain + column, mask=column < K, other=0.0).to(tl.float32)
    return values


@triton.jit
def _scale_of(begin: tl.tensor, eps: float, K: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, K, TILE):
        values = _given(begin, None, start + tl.arange(0, TILE), K)
        total += values * values
    return tl.rsqrt(tl.sum(total, axis=0) / K + eps)


@triton.jit(do_not_specialize=FREE)
def _expand_kernel(
    out: tl.tensor,
    ranks: tl.tensor,
    token_slots: tl.tensor,
    ids: tl.tensor,
    of_b: PartRows,
    max_rows0: int,
    max_rows1: int,
    max_rows2: int,
    layer: int,
    slots: int,
    out0: int,
    out1: int,
    out2: int,
    column0: int,
    column1: int,
    column2: int,
    tokens: int,
    width: int,
    out_width: int,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ARE_EQUAL: tl.constexpr,
    RANKS_TOP_K: tl.constexpr,
    IS_NEW: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> None:
    """A row's ranks times some columns of one part."""
    release_next()
    wait_for_last()
    token, block = tl.program_id(0), tl.program_id(1)
    slot = slot_of(token, token_slots, ids, EXPERTS, TOP_K, ARE_EQUAL)
    if (slot == 0) & (not IS_NEW):
        return
    blocks0, blocks1 = tl.cdiv(out0, COLUMNS), tl.cdiv(out1, COLUMNS)
    part = part_of(block, blocks0, blocks1)
    table, its_count = rows_in(of_b, part, layer * slots + slot, max_rows0, max_rows1, max_rows2)
    count = tl.load(its_count, mask=slot > 0, other=0)
    if (count == 0) & (not IS_NEW):
        return
    b, features = pick(part, *of_b.pools), aligned(pick(part, out0, out1, out2), ALIGNMENT)
    column = (block - before(part, blocks0, blocks1)) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < features
    given_at = ranks + token // RANKS_TOP_K * width + 8 * before(part, max_rows0, max_rows1)
    given_at += tl.arange(0, 8)
    total = tl.zeros([COLUMNS], tl.float32)
    for index in range(count):
        given = tl.zeros([8], tl.float32)
        for split in tl.static_range(SPLITS):
            given += tl.load(given_at + split * tokens * width + index * 8)
        total = times_b(total, given, b, tl.load(table + index), features, column)
    to = out + token.to(tl.int64) * aligned(out_width, ALIGNMENT) + column
    to += aligned(pick(part, column0, column1, column2), ALIGNMENT)
    if not IS_NEW:
        total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)
