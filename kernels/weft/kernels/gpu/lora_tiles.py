"""Low-rank additions to many tokens on a GPU: ranks of `lora_shrink` times B, added to a product.

What is added to gate and up is added in the launch that computes their activation, which also
multiplies it with A of down: its ranks come without a launch of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.gpu.dependent_launch import LaunchOptions, release_next, wait_for_last
from weft.kernels.gpu.lora_parts import (
    FREE,
    aligned,
    alignment_of,
    before,
    column_alignment,
    columns,
    dot,
    new_ranks,
    part_of,
    pick,
    three,
)
from weft.kernels.gpu.lora_shrink import UNIT, Shrunk, group_of, shrink_tiles, tile_of
from weft.kernels.lora import LoraAddition, LoraWeights

_FEW_PROGRAMS = 512
_WIDE = 128
"""Columns that a program takes at once."""
_EACH = 8
"""Such blocks of columns that a program of many tokens takes one after the other: most of its time
would go into finding out what it multiplies."""
_REGISTERS = 128
"""Of a thread; with more, too few programs run at once."""


class Activation(NamedTuple):
    """Of `expand_tiles_silu`."""

    out: torch.Tensor
    """[T, I]: silu(gate) * up."""
    ranks: torch.Tensor
    """[blocks of columns, T, ranks of down] float32: to be added up; empty without down."""


def add_by_tiles(
    out: torch.Tensor, x: torch.Tensor, addition: LoraAddition, options: LaunchOptions
) -> None:
    """`weft.kernels.lora.add_lora` for many tokens."""
    expand_tiles(out, shrink_tiles(x, addition, options), addition, options)


def expand_tiles(
    out: torch.Tensor, shrunk: Shrunk, addition: LoraAddition, options: LaunchOptions
) -> None:
    """Adds the tokens' ranks times B to `out` [T, N]."""
    parts, segments = addition.parts, addition.segments
    tile, wide = tile_of(out.shape[0]), _WIDE
    tiles, each = triton.cdiv(out.shape[0], tile), _EACH if tile == 64 else 1
    if tiles * sum(triton.cdiv(part.out_features, wide) for part in parts) < _FEW_PROGRAMS:
        wide = 64
    blocks = sum(triton.cdiv(part.out_features, wide * each) for part in parts)
    starts = [sum(part.max_rank for part in parts[:n]) for n in range(len(parts))]
    _expand_kernel[(tiles, blocks)](
        out, *shrunk[:4], segments.order, segments.ordered, *three([p.b for p in parts]),
        *columns(parts), *three(starts), *shrunk.ranks.shape[1:], shrunk.rows.shape[2],
        out.shape[1],
        COLUMNS=wide, EACH=each, TOKENS=tile, RANKS=UNIT, GROUP=group_of(tile),
        SUMS=shrunk.ranks.shape[0], ALIGNMENT=column_alignment(parts, out.shape[1]),
        IS_EXACT=out.dtype == torch.float32, num_warps=8 if tile == 64 else 4, num_stages=1,
        maxnreg=_REGISTERS, **options,
    )  # fmt: skip


def expand_tiles_silu(
    both: torch.Tensor,
    shrunk: Shrunk,
    addition: LoraAddition,
    options: LaunchOptions,
    down: LoraWeights | None = None,
) -> Activation:
    """silu(gate) * up of the sums, where the two parts are gate's and up's.

    Args:
        both: [T, 2 * I]: the products without adapters.
        shrunk: Of `shrink_tiles`.
        addition: Of which the first part begins at column 0, the second at I.
        options: Of the launch.
        down: Multiplied with the activation as well; `shrunk` is followed by it.
    """
    (gate, up), segments = addition.parts, addition.segments
    tokens, inner = both.shape[0], both.shape[1] // 2
    out = torch.empty((tokens, inner), dtype=both.dtype, device=both.device)
    tile = tile_of(tokens)
    wide = 64 if tile == 64 else _WIDE
    each = _EACH if tile == 64 else 1
    blocks = triton.cdiv(inner, wide * each)
    down_ranks = shrunk.ranks[:0]
    if down is not None:
        down_ranks = new_ranks(tokens, (down,), blocks, both.device)
    _expand_silu_kernel[(triton.cdiv(tokens, tile), blocks)](
        out, both, down_ranks, *shrunk[:4], segments.order, segments.ordered, gate.b, up.b,
        None if down is None else down.a, inner, gate.max_rank, tokens, shrunk.ranks.shape[2],
        0 if down is None else down.max_rank, shrunk.rows.shape[2], COLUMNS=wide,
        EACH=each, TOKENS=tile, RANKS=UNIT, GROUP=group_of(tile), ALIGNMENT=alignment_of(inner),
        IS_EXACT=both.dtype == torch.float32, num_warps=8 if tile == 64 else 4, num_stages=1,
        maxnreg=_REGISTERS, **options,
    )  # fmt: skip
    return Activation(out, down_ranks)


@triton.jit
def _group(rows: tl.tensor, owners: tl.tensor, rank: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Rows of B (or A), and whose they are."""
    return tl.load(rows + rank), tl.load(owners + rank)


@triton.jit
def _given(
    ranks: tl.tensor,
    slot: tl.tensor,
    row: tl.tensor,
    owner: tl.tensor,
    stride: int,
    SUMS: tl.constexpr,
) -> tl.tensor:
    """The tokens' ranks of a group, those of others' as 0: [TOKENS, GROUP]."""
    mask = (slot[:, None] == (owner // 1024)[None, :]) & (row >= 0)[None, :]
    at = ranks[:, None] + (owner % 1024)[None, :]
    total = tl.load(at, mask=mask, other=0.0)
    for number in tl.static_range(1, SUMS):
        total += tl.load(at + number * stride, mask=mask, other=0.0)
    return total


@triton.jit
def _tile(values: tl.tensor, row: tl.tensor, features: tl.tensor, column: tl.tensor) -> tl.tensor:
    """[GROUP, COLUMNS] of A or B, [rows * 8, features]; 0 where there is no row."""
    at = values + row.to(tl.int64)[:, None] * features + column[None, :]
    return tl.load(at, mask=(row >= 0)[:, None] & (column < features)[None, :], other=0.0)


@triton.jit(do_not_specialize=[*FREE, "start0", "start1", "start2", "most"])
def _expand_kernel(
    out: tl.tensor,
    ranks: tl.tensor,
    num_units: tl.tensor,
    rows: tl.tensor,
    owners: tl.tensor,
    order: tl.tensor,
    ordered: tl.tensor,
    b0: tl.tensor,
    b1: tl.tensor,
    b2: tl.tensor,
    out0: int,
    out1: int,
    out2: int,
    column0: int,
    column1: int,
    column2: int,
    start0: int,
    start1: int,
    start2: int,
    tokens: int,
    width: int,
    most: int,
    out_width: int,
    IS_DEPENDENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    EACH: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    SUMS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """The ranks of a tile's tokens times some columns of one part."""
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    block = tl.program_id(1)
    blocks0, blocks1 = tl.cdiv(out0, COLUMNS * EACH), tl.cdiv(out1, COLUMNS * EACH)
    part = part_of(block, blocks0, blocks1)
    at = part * tl.num_programs(0) + tl.program_id(0)
    units = tl.load(num_units + at)
    rows += at * most
    owners += at * most
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(ordered + place, mask=place < tokens, other=0)
    token = tl.load(order + place, mask=place < tokens, other=0).to(tl.int64)
    rank = tl.arange(0, GROUP)
    row, owner = _group(rows, owners, rank)
    if units == 0:
        return
    b = pick(part, b0, b1, b2)
    features = aligned(pick(part, out0, out1, out2), ALIGNMENT)
    first = aligned(pick(part, column0, column1, column2), ALIGNMENT)
    begin = (block - before(part, blocks0, blocks1)) * (COLUMNS * EACH)
    to_row = out + token[:, None] * aligned(out_width, ALIGNMENT) + first
    ranks += token * width + pick(part, start0, start1, start2)
    for number in range(EACH):
        column = begin + number * COLUMNS + tl.arange(0, COLUMNS)
        mask = (slot > 0)[:, None] & (column < features)[None, :]
        # On its way while B is.
        product = tl.load(to_row + column[None, :], mask=mask, other=0.0)
        total = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for start in range(0, units * RANKS, GROUP):
            its, whose = row, owner
            if start > 0:
                its, whose = _group(rows, owners, start + rank)
            tile = _tile(b, its, features, column)
            given = _given(ranks, slot, its, whose, tokens * width, SUMS).to(tile.dtype)
            total = dot(given, tile, total, IS_EXACT)
        total += product.to(tl.float32)
        tl.store(to_row + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["inner", "start1", "tokens", "width", "down_width", "most"])
def _expand_silu_kernel(
    out: tl.tensor,
    both: tl.tensor,
    down_ranks: tl.tensor,
    ranks: tl.tensor,
    num_units: tl.tensor,
    rows: tl.tensor,
    owners: tl.tensor,
    order: tl.tensor,
    ordered: tl.tensor,
    b0: tl.tensor,
    b1: tl.tensor,
    a_down: tl.tensor,
    inner: int,
    start1: int,
    tokens: int,
    width: int,
    down_width: int,
    most: int,
    IS_DEPENDENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    EACH: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """silu(gate) * up of a tile's tokens, some columns; tokens without adapters too."""
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    inner = aligned(inner, ALIGNMENT)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    units = tl.maximum(tl.load(num_units + tile), tl.load(num_units + tiles + tile))
    rows0, owners0 = rows + tile * most, owners + tile * most
    rows1, owners1 = rows0 + tiles * most, owners0 + tiles * most
    rank = tl.arange(0, GROUP)
    row0, owner0 = _group(rows0, owners0, rank)
    row1, owner1 = _group(rows1, owners1, rank)
    place = tile * TOKENS + tl.arange(0, TOKENS)
    is_token = place < tokens
    slot = tl.load(ordered + place, mask=is_token, other=0)
    token = tl.load(order + place, mask=is_token, other=0).to(tl.int64)
    ranks += token * width
    for number in range(EACH):
        column = (tl.program_id(1) * EACH + number) * COLUMNS + tl.arange(0, COLUMNS)
        mask = is_token[:, None] & (column < inner)[None, :]
        gate_at = both + token[:, None] * 2 * inner + column[None, :]
        gate = tl.load(gate_at, mask=mask, other=0.0)
        up = tl.load(gate_at + inner, mask=mask, other=0.0)
        to_gate = tl.zeros([TOKENS, COLUMNS], tl.float32)
        to_up = tl.zeros([TOKENS, COLUMNS], tl.float32)
        # Units of one part may be fewer: what is beyond is nobody's.
        for start in range(0, units * RANKS, GROUP):
            its0, whose0, its1, whose1 = row0, owner0, row1, owner1
            if start > 0:
                its0, whose0 = _noted(rows0, owners0, num_units + tile, start + rank, RANKS)
                its1, whose1 = _noted(rows1, owners1, num_units + tiles + tile, start + rank, RANKS)
            tile0, tile1 = _tile(b0, its0, inner, column), _tile(b1, its1, inner, column)
            to_gate = dot(_given(ranks, slot, its0, whose0, 0, 1), tile0, to_gate, IS_EXACT)
            to_up = dot(_given(ranks + start1, slot, its1, whose1, 0, 1), tile1, to_up, IS_EXACT)
        to_gate += gate.to(tl.float32)
        to_up += up.to(tl.float32)
        product = (to_gate / (1.0 + tl.exp(-to_gate)) * to_up).to(out.dtype.element_ty)
        tl.store(out + token[:, None] * inner + column[None, :], product, mask=mask)
        if a_down is not None:
            # Then there is one block of columns.
            units2 = tl.load(num_units + 2 * tiles + tile)
            rows2, owners2 = rows1 + tiles * most, owners1 + tiles * most
            to = down_ranks + (tl.program_id(1) * tokens + token) * down_width
            for start in range(0, units2 * RANKS, GROUP):
                row2, owner2 = _group(rows2, owners2, start + rank)
                tile2 = _tile(a_down, row2, inner, column)
                total = tl.zeros([TOKENS, GROUP], tl.float32)
                total = dot(product, tl.trans(tile2), total, IS_EXACT)
                mine = (slot[:, None] == (owner2 // 1024)[None, :]) & (row2 >= 0)[None, :]
                tl.store(to[:, None] + (owner2 % 1024)[None, :], total, mask=mine)


@triton.jit
def _noted(
    rows: tl.tensor,
    owners: tl.tensor,
    units: tl.tensor,
    rank: tl.tensor,
    RANKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`_group` of a tile that may have fewer: -1 beyond."""
    is_there = rank < tl.load(units) * RANKS
    row = tl.load(rows + rank, mask=is_there, other=-1)
    return row, tl.load(owners + rank, mask=is_there, other=0)
