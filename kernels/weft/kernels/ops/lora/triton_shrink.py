"""The ranks of many tokens on a GPU: tokens of one adapter are multiplied together.

Tokens sorted by adapter are cut into tiles. (In Punica, Chen et al. 2023, section 4, a program
takes the tokens of one adapter. A captured graph must bound the number of such programs by its
tokens, and most would have no work.) The ranks of all adapters of a tile are multiplied as one
matrix, of which each token uses its own columns. K is split among programs, and the last one adds
up the sums in a fixed order, so that results repeat.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.lora.spec import LoraAddition, LoraSegments
from weft.kernels.ops.lora.triton_fold import MAX_FOLDED_ROWS
from weft.kernels.ops.lora.triton_parts import (
    FREE,
    PartRows,
    Parts,
    aligned,
    before,
    dot,
    most_rows,
    new_entries,
    pick,
    rows_in,
    splits_of,
)
from weft.kernels.ops.lora.triton_units import (
    NOTED,
    UNIT,
    LoraLaunchConfig,
    store_units,
    tile_of,
    unit_ranks,
    units_of,
)
from weft.kernels.shared.dependent_launch import LaunchOptions, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

AHEAD = LoraLaunchConfig(512, 32, warps=8, sharers=4, registers=128)
"""For tiles of UNIT tokens whose A is prefetched as a whole."""
SHAPES = {
    16: LoraLaunchConfig(128, 64, warps=4, stages=3),
    32: LoraLaunchConfig(128, 32, warps=4, sharers=4, stages=4),
    64: LoraLaunchConfig(64, 32, warps=4, sharers=2, stages=4),
}
"""Launches by tokens of a tile."""
_BESIDE = (1024, 8, 200)
"""Least elements of a part of K, most parts, and number of programs that is enough (`splits_of`),
for launches that run together with a product. The product leaves few multiprocessors free; of large
tiles as many programs are launched as run at once.
"""
_ALONE = (512, 16, 1000)
"""Like `_BESIDE`, for small tiles before the product, where the end of the last program counts."""
_MAX_SUMS = 16
"""Most partial sums; more would take their consumer too long to add up."""
_MAX_COUNTERS = 512
"""Number of counters, more than the tiles and parts that are ever split."""
_FIXED_PART = 1024
"""Elements of a part of K where parts must not depend on the number of tokens, unless there would
be more than _MAX_SUMS parts.
"""


class Shrunk(NamedTuple):
    """The ranks of all tokens, and the units of each part and tile, by which B is found at once.

    A unit is up to 16 ranks of one of the tile's adapters; units of a tile follow one another.
    Parts of a following product come last: they have units and entries, but no ranks. For folded
    parts a token's rows of B are found by its entry, and there are no units.
    """

    ranks: torch.Tensor
    """[sums, T, ranks of all parts]: a single sum in the dtype of the parameters, or several in
    float32 that the reader adds up.
    """
    num_units: torch.Tensor
    """[parts, tiles] int32: number of units with work."""
    rows: torch.Tensor
    """[parts, tiles, ranks of the most units] int32: row of B as [rows * 8, features]; -1: no rank.
    The first NOTED ranks are always written.
    """
    owners: torch.Tensor
    """[parts, tiles, the most units] int32, as from `units_of`."""
    entries: torch.Tensor | None
    """[parts, T, 1 + rows], from `new_entries`, for parts that are folded; None if there are
    none.
    """


def can_be_ahead(tokens: int, depth: int) -> bool:
    """Whether A can be fetched before so many tokens of `depth` elements have arrived."""
    is_small = tile_of(tokens) == UNIT and depth <= _MAX_SUMS * AHEAD.block
    return is_small and tokens <= MAX_FOLDED_ROWS


def shrink_tiles(
    x: torch.Tensor,
    addition: LoraAddition,
    options: LaunchOptions,
    following: Parts = (),
    *,
    is_ahead: bool = False,
    is_folded: bool = False,
    is_fixed: bool = False,
) -> Shrunk:
    """The ranks of each token of x [T, K].

    Args:
        x: [T, K], contiguous.
        following: Parts of a later product, whose units and entries are written as well.
        is_ahead: Whether programs fetch their part of A while the preceding kernel still computes
            x, and leave sums to be added up. Only where `can_be_ahead` holds.
        is_folded: Whether the kernel that reads the product adds the result; `following` must be
            empty.
        is_fixed: Whether a token's ranks depend only on its adapter and its row of x. Tiles and
            parts of K are then the same for any number of tokens, and sums are left to be added up.
    """
    (tokens, depth), products, segments = x.shape, addition.parts, addition.segments
    assert all(part.b_table is None for part in (*products, *following)), "A and B have one table"
    parts, tile = (*products, *following), UNIT if is_fixed else tile_of(tokens)
    tiles = cdiv(tokens, tile)
    assert not is_ahead or can_be_ahead(tokens, depth)
    shape = AHEAD if is_ahead else SHAPES[tile]
    splits = cdiv(depth, shape.block)
    leaves_sums = is_ahead or is_fixed
    if is_fixed:
        splits = min(_MAX_SUMS, cdiv(depth, _FIXED_PART))
    elif not is_ahead:
        is_alone = tokens > MAX_FOLDED_ROWS and tile < max(SHAPES)
        splits = splits_of(tiles * len(products), depth, *(_ALONE if is_alone else _BESIDE))
    shrunk = _new_shrunk(x, products, following, segments, tile, is_folded=is_folded)
    sums, arrived = shrunk.ranks, shrunk.ranks
    if leaves_sums or splits > 1:
        size = (splits, *shrunk.ranks.shape[1:])
        sums = torch.empty(size, dtype=torch.float32, device=x.device)
    if leaves_sums:
        shrunk = shrunk._replace(ranks=sums)
    elif splits > 1:
        assert tiles * len(products) <= _MAX_COUNTERS
        arrived = _counters(x.device)
    groups = min(shape.sharers, cdiv(shrunk.rows.shape[2], shape.group))
    _shrink_kernel[(tiles, len(parts), 1 + splits * groups)](
        *shrunk, sums, arrived, x, segments.order, segments.ordered, PartRows.of_a(parts),
        *most_rows(parts), addition.layer, parts[0].table.shape[1],
        *shrunk.ranks.shape[1:], shrunk.rows.shape[2],
        0 if shrunk.entries is None else shrunk.entries.shape[2], PRODUCTS=len(products), K=depth,
        TILE=min(shape.block, next_power_of_2(depth)), TOKENS=tile, RANKS=UNIT,
        GROUP=shape.group, GROUPS=groups, NOTED=NOTED, SPLITS=splits, IS_FOLDED=is_folded,
        ADDS_UP=splits > 1 and not leaves_sums, IS_AHEAD=is_ahead,
        IS_EARLY=is_ahead and addition.are_given,
        IS_EXACT=x.dtype == torch.float32, **shape.options(), **options,
    )  # fmt: skip
    return shrunk


def _new_shrunk(
    x: torch.Tensor,
    products: Parts,
    following: Parts,
    segments: LoraSegments,
    tile: int,
    *,
    is_folded: bool,
) -> Shrunk:
    parts, device, tokens = (*products, *following), x.device, x.shape[0]
    listed = products if is_folded else following
    width, tiles = sum(unit_ranks(part) for part in products), cdiv(tokens, tile)
    most = min(tile, segments.slots.shape[0]) * max(unit_ranks(part) for part in parts)
    most = max(1, cdiv(most, NOTED)) * NOTED
    size = (0 if is_folded else len(parts), tiles)
    return Shrunk(
        torch.empty((1, tokens, width), dtype=x.dtype, device=device),
        torch.empty(size, dtype=torch.int32, device=device),
        torch.empty((*size, most), dtype=torch.int32, device=device),
        torch.empty((*size, most // UNIT), dtype=torch.int32, device=device),
        new_entries(tokens, listed, device) if listed else None,
    )


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Counters of the programs of a tile's part that have arrived; each launch leaves them at zero.

    Launches that follow one another share them, also launches of two streams that wait for each
    other.
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
    of_a: PartRows,
    max_rows0: int,
    max_rows1: int,
    max_rows2: int,
    layer: int,
    slots: int,
    tokens: int,
    width: int,
    most: int,
    entry_width: int,
    PRODUCTS: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    NOTED: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_FOLDED: tl.constexpr,
    ADDS_UP: tl.constexpr,
    IS_AHEAD: tl.constexpr,
    IS_EARLY: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """Computes all ranks of a part for a tile's tokens, over a part of K."""
    release_next()
    # A and the tables that say where it is existed before the step, so they are fetched while the
    # preceding kernel still writes x. Nothing is written before the wait, since other kernels may
    # still read that memory.
    if not IS_EARLY:
        wait_for_last()
    part, job = tl.program_id(1), tl.program_id(2)
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = place < tokens
    slot = tl.load(ordered + place, mask=is_token, other=0)
    last_slot = tl.load(ordered + place - 1, mask=is_token & (place % TOKENS > 0), other=0)
    token = tl.load(order + place, mask=is_token, other=0).to(tl.int64)
    table, counts = rows_in(of_a, part, layer * slots, max_rows0, max_rows1, max_rows2)
    count = tl.load(counts + slot, mask=slot > 0, other=0)
    # Units of each token that is the first of its adapter; the units of other adapters precede
    # them.
    units = tl.where(slot != last_slot, (8 * count + RANKS - 1) // RANKS, 0)
    begin = tl.cumsum(units, axis=0) - units
    total_units = tl.sum(units, axis=0)
    at = part * tl.num_programs(0) + tl.program_id(0)
    max_rows = pick(part, max_rows0, max_rows1, max_rows2)
    adapters = table, max_rows, slot, count, begin, units
    if job == 0:
        FIRST: tl.constexpr = 0 if IS_FOLDED else PRODUCTS
        if entries is not None:
            entry = entries + ((part - FIRST) * tokens + token) * entry_width
            is_listed = tl.where(is_token, part, -1) >= FIRST
            _list(entry, table + slot * max_rows, count, is_listed, IS_EARLY)
        if not IS_FOLDED:
            to = num_units + at, rows + at * most, owners + at * (most // RANKS)
            _note(to, adapters, total_units, RANKS, NOTED, IS_EARLY)
        return
    split, first = (job - 1) % SPLITS, (job - 1) // SPLITS * GROUP
    if (part >= PRODUCTS) | (first >= total_units * RANKS):
        return
    a = pick(part, *of_a.pools)
    wide0, wide1 = (max_rows0 * 8 + RANKS - 1) // RANKS, (max_rows1 * 8 + RANKS - 1) // RANKS
    width = aligned(width, RANKS)
    own = RANKS * before(part, wide0, wide1)
    to = sums + (split * tokens + token) * width + own
    given = x + token[:, None] * K
    PART: tl.constexpr = ((K + SPLITS * TILE - 1) // (SPLITS * TILE)) * TILE
    if IS_AHEAD:
        owner, row = units_of(adapters, first, RANKS, GROUP)
        depth = split * PART + tl.arange(0, TILE)
        inside = (depth < K)[None, :]
        ahead = a + row.to(tl.int64)[:, None] * K + depth[None, :]
        tile = tl.load(ahead, mask=(row >= 0)[:, None] & inside, other=0.0)
        if IS_EARLY:
            wait_for_last()
        values = tl.load(given + depth[None, :], mask=is_token[:, None] & inside, other=0.0)
        total = dot(values, tl.trans(tile), tl.zeros([TOKENS, GROUP], tl.float32), IS_EXACT)
        store_units(to, slot, owner, total, RANKS)
        first += GROUPS * GROUP
    for start in range(first, total_units * RANKS, GROUPS * GROUP):
        owner, row = units_of(adapters, start, RANKS, GROUP)
        total = _walk(given, is_token, a, row, split, K, TILE, PART, TOKENS, GROUP, IS_EXACT)
        store_units(to, slot, owner, total, RANKS)
    if ADDS_UP:
        tl.debug_barrier()
        arrivals = SPLITS * tl.minimum((total_units * RANKS + GROUP - 1) // GROUP, GROUPS)
        if tl.atomic_add(arrived + at, 1) == arrivals - 1:
            to_own = token[:, None] * width + own
            _add_up(ranks, sums, to_own, count, tokens * width, TOKENS, RANKS, SPLITS)
            tl.store(arrived + at, 0)


@triton.jit
def _note(
    to: tl.tuple,
    adapters: tl.tuple,
    total_units: tl.tensor,
    RANKS: tl.constexpr,
    NOTED: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """Writes the units of a tile's part. `to`: where their number, their rows and their owners go.
    `adapters` are as in `units_of`.
    """
    num_units, rows, owners = to
    owner, row = units_of(adapters, 0, RANKS, NOTED)
    if IS_EARLY:
        wait_for_last()
    tl.store(num_units, total_units)
    # Written even where there are no units, since the first ones are always read.
    to_rows, to_owners = rows + tl.arange(0, NOTED), owners + tl.arange(0, NOTED // RANKS)
    tl.store(to_rows, row)
    tl.store(to_owners, owner)
    for start in range(NOTED, total_units * RANKS, NOTED):
        owner, row = units_of(adapters, start, RANKS, NOTED)
        tl.store(to_rows + start, row)
        tl.store(to_owners + start // RANKS, owner)


@triton.jit
def _list(
    entry: tl.tensor,
    at_row: tl.tensor,
    count: tl.tensor,
    is_listed: tl.tensor,
    IS_EARLY: tl.constexpr,
) -> None:
    """Writes the entries of a tile's tokens, [TOKENS] pointers, from their rows of the table."""
    count = tl.where(is_listed, count, 0)
    index = tl.arange(0, 8)[None, :]
    listed = at_row[:, None] + index
    some = tl.load(listed, mask=index < count[:, None], other=0)
    if IS_EARLY:
        wait_for_last()
    tl.store(entry, count, mask=is_listed)
    to_list = entry[:, None] + 1 + index
    tl.store(to_list, some, mask=index < count[:, None])
    for start in range(8, tl.max(count, axis=0), 8):
        is_there = start + index < count[:, None]
        more = tl.load(listed + start, mask=is_there, other=0)
        tl.store(to_list + start, more, mask=is_there)


@triton.jit
def _add_up(
    ranks: tl.tensor,
    sums: tl.tensor,
    own: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Adds up the ranks of a tile's part in a fixed order; `own`, [TOKENS, 1], is where each
    token's ranks are.
    """
    for start in range(0, 8 * tl.max(count, axis=0), RANKS):
        rank = start + tl.arange(0, RANKS)
        mask = rank[None, :] < ((8 * count + RANKS - 1) // RANKS * RANKS)[:, None]
        at = own + rank[None, :]
        whole = tl.zeros([TOKENS, RANKS], tl.float32)
        for number in tl.static_range(SPLITS):
            whole += tl.load(sums + number * stride + at, mask=mask, other=0.0, volatile=True)
        tl.store(ranks + at, whole.to(ranks.dtype.element_ty), mask=mask)


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
