"""The ranks of many tokens on a GPU: those of one adapter are multiplied together.

Tokens sorted by adapter are cut into tiles (after Punica, Chen et al. 2023, section 4, whose
programs take the tokens of one adapter: their number must be bounded by the tokens in a captured
graph, and most of them have nothing to do). The ranks of all adapters of a tile are multiplied as
one matrix, of which each token uses its own columns. K is split among programs, of which the last
one adds the sums up, in a fixed order, so that results repeat.
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
    before,
    dot,
    new_entries,
    new_ranks,
    pick,
    splits_of,
    tables,
    three,
)
from weft.kernels.lora import LoraAddition, LoraSegments

UNIT = 16
"""Ranks of a unit: the least that tensor cores multiply. An adapter has as many as it needs."""
_PROGRAMS = 200
"""About as many as run at once, where each takes tiles of many tokens."""
_LEAST_SPLIT_K = 1024
"""Beside a product, which leaves few multiprocessors free: few programs, all at once."""
_MAX_SPLITS = 8
_WHOLE = 512
"""Elements of K that a program has that comes before the product: fetched ahead, all at once."""
_MAX_COUNTERS = 512
"""Products of more tiles and parts are not split."""


class Shrunk(NamedTuple):
    """The ranks of all tokens, and the units of each part and tile, with which B is found at once.

    A unit is up to 16 ranks of one of the tile's adapters; those of a tile follow each other. The
    parts of a product that follows come last: of them there are units and entries, and no ranks.
    """

    ranks: torch.Tensor
    """[sums, T, ranks of all parts]: one sum, dtype of the parameters; or several in float32, for
    whoever reads them to add up."""
    num_units: torch.Tensor
    """[parts, tiles] int32."""
    rows: torch.Tensor
    """[parts, tiles, ranks of the most units] int32: row of B, as [rows * 8, features]; -1: no
    rank. The first group's are always there."""
    owners: torch.Tensor
    """The same, int32: slot * 1024 + rank."""
    entries: torch.Tensor
    """[parts, T, 1 + rows]: see `new_entries`."""


def tile_of(tokens: int) -> int:
    """Tokens that are multiplied together."""
    if tokens <= 256:
        return 16
    return 32 if tokens <= 1024 else 64


def group_of(tile: int) -> int:
    """Ranks taken at once, of one adapter or of several: two units, or four of many tokens."""
    return 32 if tile == UNIT else 64


def shrink_tiles(
    x: torch.Tensor,
    addition: LoraAddition,
    options: LaunchOptions,
    following: Parts = (),
    *,
    is_ahead: bool = False,
) -> Shrunk:
    """The ranks of each token of x [T, K].

    Args:
        x: [T, K], contiguous.
        addition: Of these tokens.
        options: Of the launch.
        following: Of a later product, whose units and entries are noted as well.
        is_ahead: What little each program needs of A is fetched while the kernel ahead of it still
            computes x, and sums are left to be added up. Only of few tokens.
    """
    (tokens, depth), products, segments = x.shape, addition.parts, addition.segments
    parts, tile = (*products, *following), tile_of(tokens)
    tiles = triton.cdiv(tokens, tile)
    splits = triton.cdiv(depth, _WHOLE)
    is_ahead = is_ahead and tile == UNIT and splits <= _MAX_SPLITS
    if not is_ahead:
        splits = splits_of(tiles * len(products), depth, _LEAST_SPLIT_K, _MAX_SPLITS, _PROGRAMS)
    shrunk = _new_shrunk(tokens, tile, products, following, segments, x)
    if is_ahead:
        shrunk = shrunk._replace(ranks=new_ranks(tokens, products, splits, x.device))
    sums, arrived = shrunk.ranks, shrunk.ranks
    if splits > 1 and not is_ahead:
        size = (splits, *shrunk.ranks.shape[1:])
        sums = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = _counters(x.device)
    _shrink_kernel[(tiles, len(parts), splits)](
        *shrunk, sums, arrived, x, segments.order, segments.ordered, *three([p.a for p in parts]),
        *tables(parts, [p.table for p in parts]), addition.layer, parts[0].table.shape[1],
        *shrunk.ranks.shape[1:], shrunk.rows.shape[2], shrunk.entries.shape[2],
        PRODUCTS=len(products), K=depth,
        TILE=min(_WHOLE if is_ahead else 64, triton.next_power_of_2(depth)), TOKENS=tile,
        RANKS=UNIT, GROUP=group_of(tile), SPLITS=splits, IS_AHEAD=is_ahead,
        IS_EARLY=is_ahead and addition.are_given, IS_EXACT=x.dtype == torch.float32,
        num_warps=8 if is_ahead or tile == 64 else 4, num_stages=1 if is_ahead else 4, **options,
    )  # fmt: skip
    return shrunk


def _new_shrunk(
    tokens: int,
    tile: int,
    products: Parts,
    following: Parts,
    segments: LoraSegments,
    x: torch.Tensor,
) -> Shrunk:
    parts, device = (*products, *following), x.device
    width, tiles = sum(part.max_rank for part in products), triton.cdiv(tokens, tile)
    most = max(part.max_rank for part in parts)
    units = min(tile, segments.slots.shape[0]) * triton.cdiv(most, UNIT)
    size = (len(parts), tiles, triton.cdiv(units * UNIT, 64) * 64)
    return Shrunk(
        torch.empty((1, tokens, width), dtype=x.dtype, device=device),
        torch.empty(size[:2], dtype=torch.int32, device=device),
        torch.empty(size, dtype=torch.int32, device=device),
        torch.empty(size, dtype=torch.int32, device=device),
        new_entries(tokens, parts, device),
    )


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros, which a launch leaves as zeros: how many programs of a tile's part have arrived.

    Launches that follow each other share them, also those of two streams that wait for each other.
    """
    return torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=[*FREE, "most", "entry_width"])
def _shrink_kernel(
    ranks: tl.tensor,
    num_units: tl.tensor,
    rows: tl.tensor,
    owners: tl.tensor,
    entries: tl.tensor,
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
    entry_width: int,
    IS_DEPENDENT: tl.constexpr,
    PRODUCTS: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_AHEAD: tl.constexpr,
    IS_EARLY: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """All ranks of a part of a tile's tokens, over a part of K."""
    release_next(IS_DEPENDENT)
    # What says where A is was there before the step, as A was: it is fetched while the kernel ahead
    # still writes x. Nothing is written before the wait: others may still read the memory.
    if not IS_EARLY:
        wait_for_last(IS_DEPENDENT)
    part, split = tl.program_id(1), tl.program_id(2)
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = place < tokens
    slot = tl.load(ordered + place, mask=is_token, other=0)
    last_slot = tl.load(ordered + place - 1, mask=is_token & (place % TOKENS > 0), other=0)
    token = tl.load(order + place, mask=is_token, other=0).to(tl.int64)
    counts = pick(part, counts0, counts1, counts2) + layer * slots
    count = tl.load(counts + slot, mask=slot > 0, other=0)
    # Units of each token that is its adapter's first, before which are those of others.
    units = tl.where(slot != last_slot, (8 * count + RANKS - 1) // RANKS, 0)
    begin = tl.cumsum(units, axis=0) - units
    total_units = tl.sum(units, axis=0)
    at = part * tl.num_programs(0) + tl.program_id(0)
    max_rows = pick(part, max_rows0, max_rows1, max_rows2)
    table = pick(part, table0, table1, table2) + layer * slots * max_rows
    a = pick(part, a0, a1, a2)
    first_rank = 8 * before(part, max_rows0, max_rows1)
    given = x + token[:, None] * K
    PART: tl.constexpr = ((K + SPLITS * TILE - 1) // (SPLITS * TILE)) * TILE
    if IS_AHEAD:
        owner, rank, row = _unit_rows(table, max_rows, slot, count, begin, units, 0, RANKS, GROUP)
        depth = split * PART + tl.arange(0, TILE)
        inside = (depth < K)[None, :]
        is_its = tl.where(part < PRODUCTS, row, -1) >= 0
        ahead = a + row.to(tl.int64)[:, None] * K + depth[None, :]
        tile = tl.load(ahead, mask=is_its[:, None] & inside, other=0.0)
        if IS_EARLY:
            wait_for_last(IS_DEPENDENT)
        values = tl.load(given + depth[None, :], mask=is_token[:, None] & inside, other=0.0)
        total = dot(values, tl.trans(tile), tl.zeros([TOKENS, GROUP], tl.float32), IS_EXACT)
        mask = _is_own(slot, owner) & is_its[None, :]
        to = token[:, None] * width + first_rank + rank[None, :]
        tl.store(sums + split * tokens * width + to, total, mask=mask)
    if split == SPLITS - 1:
        tl.store(num_units + at, total_units)
        entry = entries + (part * tokens + token) * entry_width
        tl.store(entry, count, mask=is_token)
        for index in range(0, tl.max(count, axis=0)):
            one = tl.load(table + slot * max_rows + index, mask=index < count, other=0)
            tl.store(entry + 1 + index, one, mask=index < count)
    # Once even where there are no units: the first group is read whether there are any or not.
    for start in range(0, tl.maximum(total_units * RANKS, 1), GROUP):
        owner, rank, row = _unit_rows(
            table, max_rows, slot, count, begin, units, start, RANKS, GROUP
        )
        if split == SPLITS - 1:
            column = at * most + start + tl.arange(0, GROUP)
            tl.store(rows + column, row)
            tl.store(owners + column, owner * 1024 + rank)
        if (part < PRODUCTS) & (start < total_units * RANKS) & ((start > 0) | (not IS_AHEAD)):
            total = _walk(given, is_token, a, row, split, K, TILE, PART, TOKENS, GROUP, IS_EXACT)
            mask = _is_own(slot, owner) & (row >= 0)[None, :]
            to = token[:, None] * width + first_rank + rank[None, :]
            if SPLITS == 1 and not IS_AHEAD:
                tl.store(ranks + to, total.to(ranks.dtype.element_ty), mask=mask)
            else:
                tl.store(sums + split * tokens * width + to, total, mask=mask)
    if (part >= PRODUCTS) | (total_units == 0):
        return
    if SPLITS > 1 and not IS_AHEAD:
        tl.debug_barrier()
        if tl.atomic_add(arrived + at, 1) == SPLITS - 1:
            for start in range(0, 8 * tl.max(count, axis=0), RANKS):
                rank_on = start + tl.arange(0, RANKS)
                mask_on = rank_on[None, :] < 8 * count[:, None]
                to_on = token[:, None] * width + first_rank + rank_on[None, :]
                whole = tl.zeros([TOKENS, RANKS], tl.float32)
                for number in tl.static_range(SPLITS):
                    one_sum = sums + number * tokens * width + to_on
                    whole += tl.load(one_sum, mask=mask_on, other=0.0, volatile=True)
                tl.store(ranks + to_on, whole.to(ranks.dtype.element_ty), mask=mask_on)
            tl.store(arrived + at, 0)


@triton.jit
def _unit_rows(
    table: tl.tensor,
    max_rows: tl.tensor,
    slot: tl.tensor,
    count: tl.tensor,
    begin: tl.tensor,
    units: tl.tensor,
    start: int,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Slot, rank and row of the pool (-1: none) of GROUP ranks of a tile, from `start` on."""
    column = start + tl.arange(0, GROUP)
    unit = (column // RANKS)[:, None]
    is_its = (unit >= begin[None, :]) & (unit < (begin + units)[None, :])
    owner = tl.sum(tl.where(is_its, slot[None, :], 0), axis=1)
    rank = tl.sum(tl.where(is_its, (unit - begin[None, :]) * RANKS, 0), axis=1)
    rank += column % RANKS
    is_rank = rank < tl.sum(tl.where(is_its, 8 * count[None, :], 0), axis=1)
    row = tl.load(table + owner * max_rows + rank // 8, mask=is_rank, other=0) * 8 + rank % 8
    return owner, rank, tl.where(is_rank, row, -1)


@triton.jit
def _is_own(slot: tl.tensor, owner: tl.tensor) -> tl.tensor:
    """[TOKENS, GROUP]: ranks of the token's own adapter."""
    return slot[:, None] == owner[None, :]


@triton.jit
def _walk(
    given: tl.tensor,
    is_token: tl.tensor,
    a: tl.tensor,
    row: tl.tensor,
    split: tl.tensor,
    K: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> tl.tensor:
    """[TOKENS, GROUP] float32: the tokens times rows of A, over a part of K."""
    step = tl.arange(0, TILE)
    tile_at = a + row.to(tl.int64)[:, None] * K
    total = tl.zeros([TOKENS, GROUP], tl.float32)
    for start in range(split * PART, (split + 1) * PART, TILE):
        inside = (start + step < K)[None, :]
        depth = (start + step)[None, :]
        values = tl.load(given + depth, mask=is_token[:, None] & inside, other=0.0)
        tile = tl.load(tile_at + depth, mask=(row >= 0)[:, None] & inside, other=0.0)
        total = dot(values, tl.trans(tile), total, IS_EXACT)
    return total
