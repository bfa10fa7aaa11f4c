"""Low-rank additions to many tokens on a GPU: those of one adapter are multiplied together.

Tokens sorted by adapter are cut into tiles (after Punica, Chen et al. 2023, section 4, whose
programs take the tokens of one adapter: their number must be bounded by the tokens in a captured
graph, and most of them have nothing to do). The ranks of all adapters of a tile are multiplied as
one matrix, of which each token uses its own columns. Sums are taken in a fixed order, so that
results repeat.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.gpu.dependent_launch import LaunchOptions, release_next, wait_for_last
from weft.kernels.gpu.lora_parts import (
    FREE,
    Parts,
    aligned,
    alignment_of,
    before,
    column_alignment,
    columns,
    part_of,
    pick,
    splits_of,
    tables,
    three,
)
from weft.kernels.lora import LoraAddition, LoraSegments

_RANKS = 16
"""Of a unit: the least that tensor cores multiply. An adapter has as many as its ranks need."""
_GROUP = 64
"""Ranks taken at once: four units, of one adapter or of several."""
_LEAST_SPLIT_K = 256
_MAX_SPLITS = 16
_MAX_COUNTERS = 512
"""Products of more tiles and parts are not split (`splits_of`)."""
_FEW_PROGRAMS = 512


class Shrunk(NamedTuple):
    """The ranks of all tokens, and the units of each part and tile, with which B is found at once.

    A unit is up to 16 ranks of one of the tile's adapters; those of a tile follow each other.
    """

    ranks: torch.Tensor
    """[T, ranks of all parts], dtype of the parameters."""
    num_units: torch.Tensor
    """[parts, tiles] int32."""
    rows: torch.Tensor
    """[parts, tiles, ranks of the most units] int32: row of B, as [rows * 8, features]; -1: no
    rank."""
    owners: torch.Tensor
    """The same, int32: slot * 1024 + rank."""


def add_by_tiles(
    out: torch.Tensor, x: torch.Tensor, addition: LoraAddition, options: LaunchOptions
) -> None:
    """`weft.kernels.lora.add_lora` for many tokens."""
    expand_tiles(out, shrink_tiles(x, addition, options), addition, options)


def tile_of(tokens: int) -> int:
    """Tokens that are multiplied together."""
    if tokens <= 256:
        return 16
    return 32 if tokens <= 1024 else 64


def shrink_tiles(x: torch.Tensor, addition: LoraAddition, options: LaunchOptions) -> Shrunk:
    """The ranks of each token of x [T, K]."""
    (tokens, depth), parts, segments = x.shape, addition.parts, addition.segments
    tile = tile_of(tokens)
    tiles = triton.cdiv(tokens, tile)
    splits = splits_of(tiles * len(parts), depth, _LEAST_SPLIT_K, _MAX_SPLITS)
    shrunk = _new_shrunk(tokens, tile, parts, segments, x)
    sums, arrived = shrunk.ranks, shrunk.ranks
    if splits > 1:
        size = (splits, *shrunk.ranks.shape)
        sums = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = _counters(x.device)
    _shrink_kernel[(tiles, len(parts), splits)](
        *shrunk, sums, arrived, x, segments.order, segments.ordered, *three([p.a for p in parts]),
        *tables(parts, [p.table for p in parts]), addition.layer, parts[0].table.shape[1],
        *shrunk.ranks.shape, shrunk.rows.shape[2], K=depth,
        TILE=min(128, triton.next_power_of_2(depth)), TOKENS=tile, RANKS=_RANKS, GROUP=_GROUP,
        SPLITS=splits, IS_EXACT=x.dtype == torch.float32,
        num_warps=4, num_stages=3, **options,
    )  # fmt: skip
    return shrunk


def _new_shrunk(
    tokens: int, tile: int, parts: Parts, segments: LoraSegments, x: torch.Tensor
) -> Shrunk:
    width, tiles = sum(part.max_rank for part in parts), triton.cdiv(tokens, tile)
    most = max(part.max_rank for part in parts)
    units = min(tile, segments.slots.shape[0]) * triton.cdiv(most, _RANKS)
    size = (len(parts), tiles, triton.cdiv(units * _RANKS, _GROUP) * _GROUP)
    return Shrunk(
        torch.empty((tokens, width), dtype=x.dtype, device=x.device),
        torch.empty(size[:2], dtype=torch.int32, device=x.device),
        torch.empty(size, dtype=torch.int32, device=x.device),
        torch.empty(size, dtype=torch.int32, device=x.device),
    )


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros, which a launch leaves as zeros: how many programs of a tile's part have arrived.

    Launches that follow each other share them, also those of two streams that wait for each other.
    """
    return torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)


def expand_tiles(
    out: torch.Tensor, shrunk: Shrunk, addition: LoraAddition, options: LaunchOptions
) -> None:
    """Adds the tokens' ranks times B to `out` [T, N]."""
    parts, segments = addition.parts, addition.segments
    tile, wide = tile_of(out.shape[0]), 128
    tiles = triton.cdiv(out.shape[0], tile)
    if tiles * sum(triton.cdiv(part.out_features, wide) for part in parts) < _FEW_PROGRAMS:
        wide = 64
    blocks = sum(triton.cdiv(part.out_features, wide) for part in parts)
    starts = [sum(part.max_rank for part in parts[:n]) for n in range(len(parts))]
    _expand_kernel[(tiles, blocks)](
        out, *shrunk, segments.order, segments.ordered, *three([p.b for p in parts]),
        *columns(parts), *three(starts), *shrunk.ranks.shape, shrunk.rows.shape[2], out.shape[1],
        COLUMNS=wide, TOKENS=tile, RANKS=_RANKS, GROUP=_GROUP,
        ALIGNMENT=column_alignment(parts, out.shape[1]),
        IS_EXACT=shrunk.ranks.dtype == torch.float32, num_warps=4, **options,
    )  # fmt: skip


def expand_tiles_silu(
    both: torch.Tensor, shrunk: Shrunk, addition: LoraAddition, options: LaunchOptions
) -> torch.Tensor:
    """silu(gate) * up of the sums, [T, I], where the two parts are gate's and up's.

    Args:
        both: [T, 2 * I]: the products without adapters.
        shrunk: Of `shrink_tiles`.
        addition: Of which the first part begins at column 0, the second at I.
        options: Of the launch.
    """
    (gate, up), segments = addition.parts, addition.segments
    tokens, inner = both.shape[0], both.shape[1] // 2
    out = torch.empty((tokens, inner), dtype=both.dtype, device=both.device)
    tile, wide = tile_of(tokens), 128
    _expand_silu_kernel[(triton.cdiv(tokens, tile), triton.cdiv(inner, wide))](
        out, both, *shrunk, segments.order, segments.ordered, gate.b, up.b, inner, gate.max_rank,
        *shrunk.ranks.shape, shrunk.rows.shape[2], COLUMNS=wide, TOKENS=tile, RANKS=_RANKS,
        GROUP=_GROUP, ALIGNMENT=alignment_of(inner),
        IS_EXACT=shrunk.ranks.dtype == torch.float32, num_warps=4, **options,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=[*FREE, "most"])
def _shrink_kernel(
    ranks: tl.tensor,
    num_units: tl.tensor,
    rows: tl.tensor,
    owners: tl.tensor,
    sums: tl.tensor,
    arrived: tl.tensor,
    x: tl.tensor,
    order: tl.tensor,
    ordered: tl.tensor,
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    table0: tl.tensor,
    table1: tl.tensor,
    table2: tl.tensor,
    counts0: tl.tensor,
    counts1: tl.tensor,
    counts2: tl.tensor,
    max_rows0: int,
    max_rows1: int,
    max_rows2: int,
    layer: int,
    slots: int,
    tokens: int,
    width: int,
    most: int,
    IS_DEPENDENT: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """All ranks of a part of a tile's tokens, over a part of K; the last program adds them up."""
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    part, split = tl.program_id(1), tl.program_id(2)
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = place < tokens
    slot = tl.load(ordered + place, mask=is_token, other=0)
    last_slot = tl.load(ordered + place - 1, mask=is_token & (place % TOKENS > 0), other=0)
    token = tl.load(order + place, mask=is_token, other=0).to(tl.int64)
    counts = pick(part, counts0, counts1, counts2) + layer * slots
    count = 8 * tl.load(counts + slot, mask=slot > 0, other=0)
    # Units of each token that is its adapter's first, before which are those of others.
    units = tl.where(slot != last_slot, (count + RANKS - 1) // RANKS, 0)
    begin = tl.cumsum(units, axis=0) - units
    total_units = tl.sum(units, axis=0)
    at = part * tl.num_programs(0) + tl.program_id(0)
    if split == 0:
        tl.store(num_units + at, total_units)
    if total_units == 0:
        return
    max_rows = pick(part, max_rows0, max_rows1, max_rows2)
    table = pick(part, table0, table1, table2) + layer * slots * max_rows
    a = pick(part, a0, a1, a2)
    first_rank = 8 * before(part, max_rows0, max_rows1)
    given = x + token[:, None] * K
    PART: tl.constexpr = ((K + SPLITS * TILE - 1) // (SPLITS * TILE)) * TILE
    step = tl.arange(0, TILE)
    for start_rank in range(0, total_units * RANKS, GROUP):
        column = start_rank + tl.arange(0, GROUP)
        unit = (column // RANKS)[:, None]
        is_its = (unit >= begin[None, :]) & (unit < (begin + units)[None, :])
        owner = tl.sum(tl.where(is_its, slot[None, :], 0), axis=1)
        rank = tl.sum(tl.where(is_its, (unit - begin[None, :]) * RANKS, 0), axis=1)
        rank += column % RANKS
        is_rank = rank < tl.sum(tl.where(is_its, count[None, :], 0), axis=1)
        row = tl.load(table + owner * max_rows + rank // 8, mask=is_rank, other=0) * 8 + rank % 8
        if split == 0:
            tl.store(rows + at * most + column, tl.where(is_rank, row, -1))
            tl.store(owners + at * most + column, owner * 1024 + rank)
        tile_at = a + row.to(tl.int64)[:, None] * K
        total = tl.zeros([TOKENS, GROUP], tl.float32)
        for start in range(split * PART, (split + 1) * PART, TILE):
            inside = (start + step < K)[None, :]
            depth = (start + step)[None, :]
            values = tl.load(given + depth, mask=is_token[:, None] & inside, other=0.0)
            tile = tl.load(tile_at + depth, mask=is_rank[:, None] & inside, other=0.0)
            total = _dot(values, tl.trans(tile), total, IS_EXACT)
        mask = (slot[:, None] == owner[None, :]) & is_rank[None, :]
        to = token[:, None] * width + first_rank + rank[None, :]
        if SPLITS == 1:
            tl.store(ranks + to, total.to(ranks.dtype.element_ty), mask=mask)
        else:
            tl.store(sums + split * tokens * width + to, total, mask=mask)
    if SPLITS > 1:
        tl.debug_barrier()
        if tl.atomic_add(arrived + at, 1) == SPLITS - 1:
            for start_rank in range(0, tl.max(count, axis=0), RANKS):
                rank = start_rank + tl.arange(0, RANKS)
                mask = rank[None, :] < count[:, None]
                to = token[:, None] * width + first_rank + rank[None, :]
                whole = tl.zeros([TOKENS, RANKS], tl.float32)
                for number in tl.static_range(SPLITS):
                    one = sums + number * tokens * width + to
                    whole += tl.load(one, mask=mask, other=0.0, volatile=True)
                tl.store(ranks + to, whole.to(ranks.dtype.element_ty), mask=mask)
            tl.store(arrived + at, 0)


@triton.jit
def _times_b(
    ranks: tl.tensor,
    units: int,
    rows: tl.tensor,
    owners: tl.tensor,
    b: tl.tensor,
    features: int,
    column: tl.tensor,
    slot: tl.tensor,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> tl.tensor:
    """What is added to a tile's tokens in some columns, [TOKENS, COLUMNS] float32.

    Args:
        ranks: [TOKENS] pointers to the tokens' first ranks of this part.
        units: Of the tile.
        rows: `Shrunk.rows` of the tile.
        owners: `Shrunk.owners` of the tile.
        b: [rows, 8, features].
        features: Columns of B.
        column: [COLUMNS] of B.
        slot: [TOKENS]: the tokens'.
    """
    inside = (column < features)[None, :]
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start_rank in range(0, units * RANKS, GROUP):
        at = start_rank + tl.arange(0, GROUP)
        is_unit = at < units * RANKS
        row = tl.load(rows + at, mask=is_unit, other=-1)
        owner = tl.load(owners + at, mask=is_unit, other=0)
        tile_at = b + row.to(tl.int64)[:, None] * features + column[None, :]
        tile = tl.load(tile_at, mask=(row >= 0)[:, None] & inside, other=0.0)
        mask = (slot[:, None] == (owner // 1024)[None, :]) & (row >= 0)[None, :]
        given = tl.load(ranks[:, None] + (owner % 1024)[None, :], mask=mask, other=0.0)
        total = _dot(given, tile, total, IS_EXACT)
    return total


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
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """The ranks of a tile's tokens times some columns of one part."""
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    block = tl.program_id(1)
    blocks0, blocks1 = tl.cdiv(out0, COLUMNS), tl.cdiv(out1, COLUMNS)
    part = part_of(block, blocks0, blocks1)
    at = part * tl.num_programs(0) + tl.program_id(0)
    units = tl.load(num_units + at)
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(ordered + place, mask=place < tokens, other=0)
    token = tl.load(order + place, mask=place < tokens, other=0).to(tl.int64)
    if units == 0:
        return
    features = aligned(pick(part, out0, out1, out2), ALIGNMENT)
    first = aligned(pick(part, column0, column1, column2), ALIGNMENT)
    column = (block - before(part, blocks0, blocks1)) * COLUMNS + tl.arange(0, COLUMNS)
    to = out + token[:, None] * aligned(out_width, ALIGNMENT) + first + column[None, :]
    mask = (slot > 0)[:, None] & (column < features)[None, :]
    # On its way while B is.
    product = tl.load(to, mask=mask, other=0.0)
    total = _times_b(
        ranks + token * width + pick(part, start0, start1, start2), units, rows + at * most,
        owners + at * most, pick(part, b0, b1, b2), features, column, slot, COLUMNS, TOKENS, RANKS,
        GROUP, IS_EXACT,
    )  # fmt: skip
    total += product.to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["inner", "start1", "tokens", "width", "most"])
def _expand_silu_kernel(
    out: tl.tensor,
    both: tl.tensor,
    ranks: tl.tensor,
    num_units: tl.tensor,
    rows: tl.tensor,
    owners: tl.tensor,
    order: tl.tensor,
    ordered: tl.tensor,
    b0: tl.tensor,
    b1: tl.tensor,
    inner: int,
    start1: int,
    tokens: int,
    width: int,
    most: int,
    IS_DEPENDENT: tl.constexpr,
    COLUMNS: tl.constexpr,
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
    units0, units1 = tl.load(num_units + tile), tl.load(num_units + tiles + tile)
    place = tile * TOKENS + tl.arange(0, TOKENS)
    is_token = place < tokens
    slot = tl.load(ordered + place, mask=is_token, other=0)
    token = tl.load(order + place, mask=is_token, other=0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = is_token[:, None] & (column < inner)[None, :]
    gate_at = both + token[:, None] * 2 * inner + column[None, :]
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + inner, mask=mask, other=0.0).to(tl.float32)
    at = ranks + token * width
    gate += _times_b(
        at, units0, rows + tile * most, owners + tile * most, b0, inner, column, slot,
        COLUMNS, TOKENS, RANKS, GROUP, IS_EXACT,
    )  # fmt: skip
    up += _times_b(
        at + start1, units1, rows + (tiles + tile) * most, owners + (tiles + tile) * most, b1,
        inner, column, slot, COLUMNS, TOKENS, RANKS, GROUP, IS_EXACT,
    )  # fmt: skip
    product = gate / (1.0 + tl.exp(-gate)) * up
    to = out + token[:, None] * inner + column[None, :]
    tl.store(to, product.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _dot(values: tl.tensor, tile: tl.tensor, total: tl.tensor, IS_EXACT: tl.constexpr) -> tl.tensor:
    if IS_EXACT:
        total = tl.dot(values, tile, total, input_precision="ieee")
    else:
        total = tl.dot(values, tile, total)
    return total
