"""Low-rank additions to many tokens on a GPU: ranks of `triton_shrink` times B, added to a product.

Additions to gate and up are computed in the launch of their activation. It also multiplies the
activation by the A of down, whose ranks then need no launch of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.activation.triton_activation import silu_and
from weft.kernels.ops.lora.spec import LoraAddition, LoraWeights
from weft.kernels.ops.lora.triton_parts import (
    FREE,
    aligned,
    alignment_of,
    before,
    column_alignment,
    columns,
    dot,
    part_of,
    pick,
    three,
)
from weft.kernels.ops.lora.triton_shrink import Shrunk
from weft.kernels.ops.lora.triton_units import (
    UNIT,
    LoraLaunchConfig,
    load_units,
    store_units,
    tile_of,
    unit_ranks,
)
from weft.kernels.shared.dependent_launch import LaunchOptions, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

SHAPES = {
    16: LoraLaunchConfig(64, 32, warps=4),
    32: LoraLaunchConfig(128, 32, warps=4),
    64: LoraLaunchConfig(64, 32, warps=4, blocks=4, registers=128),
}
"""Launches by tokens of a tile."""
_FIXED = LoraLaunchConfig(64, UNIT, warps=4)
"""Launch of deterministic mode, for tiles of UNIT tokens. A unit is one tensor core instruction for
each of a token's elements. Units of other adapters add 0 before and after it, so that the sum is
that of the token's own unit.
"""
SILU_LAUNCH_CONFIGS = {
    16: LoraLaunchConfig(128, 32, warps=4, registers=128),
    32: LoraLaunchConfig(128, 32, warps=8, registers=128),
    64: LoraLaunchConfig(64, 32, warps=4, registers=168),
}
"""Launches by tokens of a tile, for kernels that compute the activation as well."""


class Activation(NamedTuple):
    """The results of `expand_tiles_silu`."""

    out: torch.Tensor
    """[T, I]: silu(gate) * up."""
    ranks: torch.Tensor
    """[blocks of columns, T, ranks of down] float32; the blocks are to be added up. Empty without
    down.
    """


def expand_tiles(
    out: torch.Tensor,
    shrunk: Shrunk,
    addition: LoraAddition,
    options: LaunchOptions,
    *,
    is_fixed: bool = False,
) -> None:
    """Adds the tokens' ranks times B to `out`, [T, N]; `is_fixed` as in `shrink_tiles`."""
    parts, segments = addition.parts, addition.segments
    tile = UNIT if is_fixed else tile_of(out.shape[0])
    shape, sums = _FIXED if is_fixed else SHAPES[tile], shrunk.ranks.shape[0]
    blocks = sum(cdiv(part.out_features, shape.block * shape.blocks) for part in parts)
    starts = [sum(unit_ranks(part) for part in parts[:n]) for n in range(len(parts))]
    _expand_kernel[(blocks, cdiv(out.shape[0], tile))](
        out, *shrunk[:4], segments.order, segments.ordered, three([p.b for p in parts]),
        *columns(parts), *three(starts), *shrunk.ranks.shape[1:], shrunk.rows.shape[2],
        out.shape[1], COLUMNS=shape.block, EACH=shape.blocks, TOKENS=tile, RANKS=UNIT,
        GROUP=shape.group, SUMS=sums, BLOCK_SUMS=next_power_of_2(sums),
        ALIGNMENT=column_alignment(parts, out.shape[1]), IS_EXACT=out.dtype == torch.float32,
        **shape.options(), **options,
    )  # fmt: skip


def expand_tiles_silu(
    both: torch.Tensor,
    shrunk: Shrunk,
    addition: LoraAddition,
    options: LaunchOptions,
    down: LoraWeights | None = None,
) -> Activation:
    """silu(gate) * up, both with what adapters add.

    Args:
        both: [T, 2 * I]: the products without adapters.
        shrunk: From `shrink_tiles`.
        addition: Its first part begins at column 0, the second at I.
        down: Multiplied by the activation as well; `shrunk` must have it in `following`.
    """
    (gate, up), segments = addition.parts, addition.segments
    tokens, inner = both.shape[0], both.shape[1] // 2
    out = torch.empty((tokens, inner), dtype=both.dtype, device=both.device)
    tile = tile_of(tokens)
    shape = SILU_LAUNCH_CONFIGS[tile]
    blocks = cdiv(inner, shape.block * shape.blocks)
    down_ranks = torch.empty(
        (blocks, tokens, 0 if down is None else unit_ranks(down)),
        dtype=torch.float32,
        device=both.device,
    )
    _expand_silu_kernel[(blocks, cdiv(tokens, tile))](
        out, both, down_ranks, *shrunk[:4], segments.order, segments.ordered, gate.b, up.b,
        None if down is None else down.a, inner, unit_ranks(gate), tokens, shrunk.ranks.shape[2],
        down_ranks.shape[2], shrunk.rows.shape[2], COLUMNS=shape.block, EACH=shape.blocks,
        TOKENS=tile, RANKS=UNIT, GROUP=shape.group, ALIGNMENT=alignment_of(inner),
        IS_EXACT=both.dtype == torch.float32, **shape.options(), **options,
    )  # fmt: skip
    return Activation(out, down_ranks)


@triton.jit
def _noted(
    rows: tl.tensor,
    owners: tl.tensor,
    start: int,
    units: tl.tensor,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Rows [GROUP] of B or A and owners [GROUP / RANKS] of a tile, from rank `start` on; units that
    do not exist have no owner.
    """
    rank = start + tl.arange(0, GROUP)
    unit = start // RANKS + tl.arange(0, GROUP // RANKS)
    row = tl.load(rows + rank, mask=rank < units * RANKS, other=-1)
    return row, tl.load(owners + unit, mask=unit < units, other=0)


@triton.jit
def _first_noted(
    rows: tl.tensor, owners: tl.tensor, RANKS: tl.constexpr, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Like `_noted` for the first units. They are always written, so that their number need not be
    known.
    """
    row = tl.load(rows + tl.arange(0, GROUP))
    return row, tl.load(owners + tl.arange(0, GROUP // RANKS))


@triton.jit
def _tile(values: tl.tensor, row: tl.tensor, features: tl.tensor, column: tl.tensor) -> tl.tensor:
    """[GROUP, COLUMNS] of A or B, [rows * 8, features]; 0 for rows that do not exist."""
    at = values + row.to(tl.int64)[:, None] * features + column[None, :]
    return tl.load(at, mask=(row >= 0)[:, None] & (column < features)[None, :], other=0.0)


@triton.jit
def _turned_tile(
    values: tl.tensor, row: tl.tensor, features: tl.tensor, column: tl.tensor
) -> tl.tensor:
    """Like `_tile`, as [COLUMNS, GROUP]."""
    at = values + row.to(tl.int64)[None, :] * features + column[:, None]
    return tl.load(at, mask=(row >= 0)[None, :] & (column < features)[:, None], other=0.0)


@triton.jit(do_not_specialize=[*FREE, "start0", "start1", "start2", "most"])
def _expand_kernel(
    out: tl.tensor,
    ranks: tl.tensor,
    num_units: tl.tensor,
    rows: tl.tensor,
    owners: tl.tensor,
    order: tl.tensor,
    ordered: tl.tensor,
    of_parts: tl.tuple,
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
    COLUMNS: tl.constexpr,
    EACH: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """The ranks of a tile's tokens times some columns of one part."""
    release_next()
    wait_for_last()
    block, tile, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    blocks0, blocks1 = tl.cdiv(out0, COLUMNS * EACH), tl.cdiv(out1, COLUMNS * EACH)
    part = part_of(block, blocks0, blocks1)
    at = part * tiles + tile
    units = tl.load(num_units + at)
    rows += at * most
    owners += at * (most // RANKS)
    place = tile * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(ordered + place, mask=place < tokens, other=0)
    token = tl.load(order + place, mask=place < tokens, other=0).to(tl.int64)
    row, owner = _first_noted(rows, owners, RANKS, GROUP)
    b = pick(part, *of_parts)
    features = aligned(pick(part, out0, out1, out2), ALIGNMENT)
    first = aligned(pick(part, column0, column1, column2), ALIGNMENT)
    begin = (block - before(part, blocks0, blocks1)) * (COLUMNS * EACH)
    to_row = out + token[:, None] * aligned(out_width, ALIGNMENT) + first
    width = aligned(width, RANKS)
    ranks += token * width + aligned(pick(part, start0, start1, start2), RANKS)
    stride = tokens * width
    for number in range(EACH):
        column = begin + number * COLUMNS + tl.arange(0, COLUMNS)
        # No early return without units, since the rest could then be loaded only after their number
        # is known.
        mask = (slot > 0)[:, None] & (column < tl.where(units > 0, features, 0))[None, :]
        # All loads are issued before the first one is waited for.
        product = tl.load(to_row + column[None, :], mask=mask, other=0.0)
        tile_b = _tile(b, row, features, column)
        given = load_units(ranks, slot, owner, stride, SUMS, BLOCK_SUMS, RANKS)
        total = tl.zeros([TOKENS, COLUMNS], tl.float32)
        total = dot(given, tile_b, total, IS_EXACT)
        for start in range(GROUP, units * RANKS, GROUP):
            its, whose = _noted(rows, owners, start, units, RANKS, GROUP)
            tile_b = _tile(b, its, features, column)
            given = load_units(ranks, slot, whose, stride, SUMS, BLOCK_SUMS, RANKS)
            total = dot(given, tile_b, total, IS_EXACT)
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
    COLUMNS: tl.constexpr,
    EACH: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """silu(gate) * up of a tile's tokens, some columns, for tokens without adapters too."""
    release_next()
    wait_for_last()
    inner = aligned(inner, ALIGNMENT)
    block, tile, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    units0, units1 = tl.load(num_units + tile), tl.load(num_units + tiles + tile)
    rows0, owners0 = rows + tile * most, owners + tile * (most // RANKS)
    rows1, owners1 = rows0 + tiles * most, owners0 + tiles * (most // RANKS)
    row0, owner0 = _first_noted(rows0, owners0, RANKS, GROUP)
    row1, owner1 = _first_noted(rows1, owners1, RANKS, GROUP)
    place = tile * TOKENS + tl.arange(0, TOKENS)
    is_token = place < tokens
    slot = tl.load(ordered + place, mask=is_token, other=0)
    token = tl.load(order + place, mask=is_token, other=0).to(tl.int64)
    if a_down is not None:
        tl.static_assert(EACH == 1, "sums of down are one block's each")
        units2 = tl.load(num_units + 2 * tiles + tile)
        rows2, owners2 = rows1 + tiles * most, owners1 + tiles * (most // RANKS)
        row2, owner2 = _first_noted(rows2, owners2, RANKS, GROUP)
    ranks0 = ranks + token * aligned(width, RANKS)
    ranks1 = ranks0 + aligned(start1, RANKS)
    for number in range(EACH):
        column = (block * EACH + number) * COLUMNS + tl.arange(0, COLUMNS)
        mask = is_token[:, None] & (column < inner)[None, :]
        gate_at = both + token[:, None] * 2 * inner + column[None, :]
        # All that is loaded is on its way before the first of it is waited for.
        gate = tl.load(gate_at, mask=mask, other=0.0)
        up = tl.load(gate_at + inner, mask=mask, other=0.0)
        tile0, tile1 = _tile(b0, row0, inner, column), _tile(b1, row1, inner, column)
        if a_down is not None:
            tile2 = _turned_tile(a_down, row2, inner, column)
        given0 = load_units(ranks0, slot, owner0, 0, 1, 1, RANKS)
        given1 = load_units(ranks1, slot, owner1, 0, 1, 1, RANKS)
        to_gate = tl.zeros([TOKENS, COLUMNS], tl.float32)
        to_up = tl.zeros([TOKENS, COLUMNS], tl.float32)
        to_gate = dot(given0, tile0, to_gate, IS_EXACT)
        to_up = dot(given1, tile1, to_up, IS_EXACT)
        for start in range(GROUP, tl.maximum(units0, units1) * RANKS, GROUP):
            its0, whose0 = _noted(rows0, owners0, start, units0, RANKS, GROUP)
            its1, whose1 = _noted(rows1, owners1, start, units1, RANKS, GROUP)
            tile0, tile1 = _tile(b0, its0, inner, column), _tile(b1, its1, inner, column)
            given0 = load_units(ranks0, slot, whose0, 0, 1, 1, RANKS)
            given1 = load_units(ranks1, slot, whose1, 0, 1, 1, RANKS)
            to_gate = dot(given0, tile0, to_gate, IS_EXACT)
            to_up = dot(given1, tile1, to_up, IS_EXACT)
        to_gate += gate.to(tl.float32)
        to_up += up.to(tl.float32)
        product = silu_and(to_gate, to_up).to(out.dtype.element_ty)
        tl.store(out + token[:, None] * inner + column[None, :], product, mask=mask)
        if a_down is not None:
            to = down_ranks + (block * tokens + token) * aligned(down_width, RANKS)
            nothing = tl.zeros([TOKENS, GROUP], tl.float32)
            store_units(to, slot, owner2, dot(product, tile2, nothing, IS_EXACT), RANKS)
            for start in range(GROUP, units2 * RANKS, GROUP):
                its2, whose2 = _noted(rows2, owners2, start, units2, RANKS, GROUP)
                more2 = _turned_tile(a_down, its2, inner, column)
                store_units(to, slot, whose2, dot(product, more2, nothing, IS_EXACT), RANKS)
