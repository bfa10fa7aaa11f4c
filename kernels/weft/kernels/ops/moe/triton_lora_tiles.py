"""Low-rank additions to experts on a GPU for many tokens, in tiles of tensor cores.

A tile is a block of items. Items are pairs of a token and an expert, sorted by expert, or tokens in
their order if all experts of an adapter share a matrix. Each program walks over the adapters of its
block and loads only what their items need. Tokens of a request follow one another, so that a block
of a prompt's step has few adapters. (Segments of one adapter as in Punica, arXiv:2310.18547,
section 4, with experts as a second key.)
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
    dot,
    most_rows,
    new_ranks,
    part_of,
    pick,
    rows_in,
)
from weft.kernels.ops.moe.triton_sort import Blocks
from weft.kernels.shared.dependent_launch import LaunchOptions, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_MAX_ROWS = 64
"""Most items of a tile: with more, each of a tile's adapters is multiplied by more items of other
adapters.
"""
_UNIT = 32
"""Most ranks for which a program computes the sums over K at once."""
_MAX_SPAN, _PROGRAMS = 8, 256
"""Most blocks of columns that a program takes in turn, as long as so many programs remain."""
_DEPTH, _COLUMNS = 128, 128
_FEW_TOKENS, _SOME_TOKENS = 256, 1024
"""Numbers of tokens up to which eight programs, or two, share the adapters of a tile."""
MAX_RANKS = 128
"""Most ranks of an adapter that a program can hold at once, with its part of B."""
_LAST: tl.constexpr = tl.constexpr(2**31 - 1)
"""A number that is larger than every slot."""


class Items(NamedTuple):
    """The items of tiles, and whose parameters each item uses."""

    token_slots: torch.Tensor
    """[T] int32: adapter slot of each token."""
    experts: int
    """E."""
    places: int
    """Entries of an adapter in a layer's table (`ExpertWeights.num_places`)."""
    top_k: int
    """Items of a token: item i belongs to token i // k."""
    num_items: int
    rows: int
    """Items of a tile, a power of two, at least 16."""
    tiles_each: int = 1
    """Tiles of a block."""
    blocks: Blocks | None = None
    """Pairs by expert; None: items are tokens, in order, for parameters that all experts share."""

    @property
    def num_tiles(self) -> int:
        """Number of tiles, some of which may be empty."""
        if self.blocks is None:
            return int(cdiv(self.num_items, self.rows))
        return self.blocks.expert.shape[0] * self.tiles_each

    @property
    def sharers(self) -> int:
        """Number of programs that share the adapters of a tile."""
        tokens = self.token_slots.shape[0]
        return 8 if tokens <= _FEW_TOKENS else 2 if tokens <= _SOME_TOKENS else 1


def can_tile(parts: Parts) -> bool:
    """Whether `expand_items` takes adapters of the largest rank that there is room for."""
    return all(part.max_rank <= MAX_RANKS for part in parts)


def pairs_of(
    token_slots: torch.Tensor,
    ids: torch.Tensor,
    experts: int,
    places: int,
    blocks: Blocks,
    rows: int,
) -> Items:
    """The pairs of `ids`, [T, k], in tiles of `rows` items."""
    tile = min(rows, _MAX_ROWS)
    counts = (ids.shape[1], ids.numel(), tile, rows // tile)
    return Items(token_slots, experts, places, *counts, blocks)


def tokens_of(token_slots: torch.Tensor, places: int) -> Items:
    """Tokens as items, for a matrix that all experts of an adapter share."""
    tokens = token_slots.shape[0]
    rows = 16 if tokens <= _FEW_TOKENS else _MAX_ROWS
    return Items(token_slots, 1, places, 1, tokens, rows)


def shrink_items(
    x: torch.Tensor,
    parts: Parts,
    layer: int,
    items: Items,
    options: LaunchOptions,
    x_top_k: int = 1,
    *,
    are_zero: bool = False,
) -> torch.Tensor:
    """The ranks of each item: x times its adapter's A.

    Args:
        x: [items / x_top_k, K], contiguous: x_top_k neighbouring items share one row of x.
        x_top_k: Items that share an input.
        are_zero: Whether ranks that an item does not have are 0.

    Returns:
        [1, items, ranks of all parts] float32; undefined for ranks that an item does not have,
        unless `are_zero`.
    """
    ranks = new_ranks(items.num_items, parts, 1, x.device, are_zero=are_zero)
    _shrink_kernel[(items.num_tiles, len(parts), items.sharers)](
        ranks, x, items.token_slots, items.blocks, PartRows.of_a(parts), *most_rows(parts), layer,
        parts[0].table.shape[1], items.num_items, ranks.shape[2],
        K=x.shape[1], EXPERTS=items.experts, EACH=items.places, TOP_K=items.top_k, X_TOP_K=x_top_k,
        ROWS=items.rows, TILES_EACH=items.tiles_each, SHARERS=items.sharers,
        UNIT=min(_UNIT, _most_ranks(parts)),
        TILE=min(_DEPTH, max(16, next_power_of_2(x.shape[1]))),
        IS_EXACT=x.dtype == torch.float32, num_warps=4, num_stages=3, **options,
    )  # fmt: skip
    return ranks


def expand_items(
    out: torch.Tensor,
    ranks: torch.Tensor,
    parts: Parts,
    layer: int,
    items: Items,
    options: LaunchOptions,
    *,
    ranks_top_k: int = 1,
    shares: torch.Tensor | None = None,
    summed: int = 1,
) -> None:
    """Writes each item's ranks times its adapter's B, and 0 for items without ranks.

    Args:
        out: [items, N]: the parts' columns are overwritten.
        ranks: [1, R, ranks of all parts], from `shrink_items`. R = items / ranks_top_k; with
            `shares` or `summed` R = items * n.
        ranks_top_k: Items that share ranks.
        shares: [items, n] float32: an item's ranks are the sum of n neighbours' ranks, each times
            its share; or None.
        summed: n, for the same sum without shares.
    """
    span = _span(items.num_tiles * cdiv(sum(p.out_features for p in parts), _COLUMNS))
    spans = sum(cdiv(part.out_features, _COLUMNS * span) for part in parts)
    _expand_kernel[(items.num_tiles, spans, items.sharers)](
        out, ranks, shares, items.token_slots, items.blocks, PartRows.of_b(parts),
        *most_rows(parts), layer, parts[0].table.shape[1], *columns(parts), items.num_items,
        ranks.shape[2], out.shape[1], EXPERTS=items.experts, EACH=items.places, TOP_K=items.top_k,
        RANKS_TOP_K=ranks_top_k, SUMMED=summed if shares is None else shares.shape[1],
        ROWS=items.rows, TILES_EACH=items.tiles_each, SHARERS=items.sharers,
        RANKS=_most_ranks(parts), COLUMNS=_COLUMNS, SPAN=span,
        ALIGNMENT=column_alignment(parts, out.shape[1]),
        IS_EXACT=parts[0].b.dtype == torch.float32, num_warps=4, num_stages=3, **options,
    )  # fmt: skip


def _span(programs: int) -> int:
    span = 1
    while 2 * span <= _MAX_SPAN and programs // (2 * span) >= _PROGRAMS:
        span *= 2
    return span


def _most_ranks(parts: Parts) -> int:
    """The most ranks of an adapter, as a power of two that tensor cores multiply."""
    return max(16, int(next_power_of_2(max(part.max_rank for part in parts))))


@triton.jit
def _items_of(
    blocks: Blocks,
    token_slots: tl.tensor,
    items: int,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    TILES_EACH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A tile's items [ROWS] int64, and their slots; -1 where there is no item."""
    tile = tl.program_id(0)
    if blocks is not None:
        block, rows_before = tile // TILES_EACH, tile % TILES_EACH * ROWS
        place = tl.load(blocks.begin + block) + rows_before + tl.arange(0, ROWS)
        is_item = place < tl.load(blocks.end + block)
        item = tl.load(blocks.order + place, mask=is_item, other=0)
    else:
        item = tile * ROWS + tl.arange(0, ROWS)
        is_item = item < items
    slot = tl.load(token_slots + item // TOP_K, mask=is_item, other=-1)
    return item.to(tl.int64), slot


@triton.jit
def _slot_after(slot: tl.tensor, last: tl.tensor, number: int) -> tl.tensor:
    """The slot `number` places after `last` among the slots of a tile; _LAST if there is none."""
    for _ in range(number):
        last = tl.min(tl.where(slot > last, slot, _LAST), axis=0)
    return last


@triton.jit(do_not_specialize=[*FREE, "items"])
def _shrink_kernel(
    ranks: tl.tensor,
    x: tl.tensor,
    token_slots: tl.tensor,
    blocks: Blocks,
    of_a: PartRows,
    max_rows0: int,
    max_rows1: int,
    max_rows2: int,
    layer: int,
    slots: int,
    items: int,
    width: int,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EACH: tl.constexpr,
    TOP_K: tl.constexpr,
    X_TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    TILES_EACH: tl.constexpr,
    SHARERS: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """The ranks of a tile's items for one part."""
    release_next()
    wait_for_last()
    expert = 0
    if blocks is not None:
        expert = tl.load(blocks.expert + tl.program_id(0) // TILES_EACH)
        if expert >= EXPERTS:
            return
    item, slot = _items_of(blocks, token_slots, items, TOP_K, ROWS, TILES_EACH)
    part = tl.program_id(1)
    a = pick(part, *of_a.pools)
    row_at = x + (item // X_TOP_K * K)[:, None]
    to = ranks + item * aligned(width, 8) + 8 * before(part, max_rows0, max_rows1)
    step = tl.arange(0, TILE)
    sharer = tl.program_id(2)
    current = _slot_after(slot, sharer * 0, sharer + 1)
    while current < _LAST:
        is_its = (slot == current)[:, None]
        group = layer * slots + current * EACH + expert
        table, its_count = rows_in(of_a, part, group, max_rows0, max_rows1, max_rows2)
        limit = 8 * tl.load(its_count)
        for first in range(0, limit, UNIT):
            rank = first + tl.arange(0, UNIT)
            is_rank = rank < limit
            row = tl.load(table + rank // 8, mask=is_rank, other=0).to(tl.int64)
            begin = a + ((row * 8 + rank % 8) * K)[:, None]
            total = tl.zeros([ROWS, UNIT], tl.float32)
            for start in range(0, K, TILE):
                at = (start + step)[None, :]
                inside = at < K
                values = tl.load(row_at + at, mask=is_its & inside, other=0.0)
                tile = tl.load(begin + at, mask=is_rank[:, None] & inside, other=0.0)
                total = dot(values, tl.trans(tile), total, IS_EXACT)
            tl.store(to[:, None] + rank[None, :], total, mask=is_its & is_rank[None, :])
        current = _slot_after(slot, current, SHARERS)


@triton.jit(do_not_specialize=[*FREE, "items"])
def _expand_kernel(
    out: tl.tensor,
    ranks: tl.tensor,
    shares: tl.tensor,
    token_slots: tl.tensor,
    blocks: Blocks,
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
    items: int,
    width: int,
    out_width: int,
    EXPERTS: tl.constexpr,
    EACH: tl.constexpr,
    TOP_K: tl.constexpr,
    RANKS_TOP_K: tl.constexpr,
    SUMMED: tl.constexpr,
    ROWS: tl.constexpr,
    TILES_EACH: tl.constexpr,
    SHARERS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """A tile's ranks times some columns of one part, adapter by adapter, a few blocks at a time."""
    release_next()
    wait_for_last()
    expert = 0
    if blocks is not None:
        expert = tl.load(blocks.expert + tl.program_id(0) // TILES_EACH)
        if expert >= EXPERTS:
            return
    item, slot = _items_of(blocks, token_slots, items, TOP_K, ROWS, TILES_EACH)
    spans0, spans1 = tl.cdiv(out0, COLUMNS * SPAN), tl.cdiv(out1, COLUMNS * SPAN)
    span = tl.program_id(1)
    part = part_of(span, spans0, spans1)
    b, features = pick(part, *of_b.pools), aligned(pick(part, out0, out1, out2), ALIGNMENT)
    first = (span - before(part, spans0, spans1)) * COLUMNS * SPAN
    given_at = ranks + item // RANKS_TOP_K * SUMMED * aligned(width, 8)
    given_at += 8 * before(part, max_rows0, max_rows1)
    to = out + item * aligned(out_width, ALIGNMENT)
    to += aligned(pick(part, column0, column1, column2), ALIGNMENT)
    rank = tl.arange(0, RANKS)
    sharer = tl.program_id(2)
    # Items without an adapter, in slot 0, take a turn without ranks, so that they get zeros.
    current = _slot_after(slot, sharer * 0 - 1, sharer + 1)
    while current < _LAST:
        is_its = slot == current
        group = layer * slots + current * EACH + expert
        table, its_count = rows_in(of_b, part, group, max_rows0, max_rows1, max_rows2)
        limit = 8 * tl.load(its_count, mask=current > 0, other=0)
        is_rank = rank < limit
        row = tl.load(table + rank // 8, mask=is_rank, other=0).to(tl.int64) * 8 + rank % 8
        given = tl.zeros([ROWS, RANKS], tl.float32)
        for number in range(SUMMED):
            one = (given_at + number * aligned(width, 8))[:, None] + rank[None, :]
            values = tl.load(one, mask=is_its[:, None] & is_rank[None, :], other=0.0)
            if shares is not None:
                share = tl.load(shares + item * SUMMED + number, mask=is_its, other=0.0)
                values *= share[:, None]
            given += values
        for block in range(SPAN):
            column = first + block * COLUMNS + tl.arange(0, COLUMNS)
            inside = (column < features)[None, :]
            at = b + (row * features)[:, None] + column[None, :]
            tile = tl.load(at, mask=is_rank[:, None] & inside, other=0.0)
            total = dot(given, tile, tl.zeros([ROWS, COLUMNS], tl.float32), IS_EXACT)
            total = total.to(out.dtype.element_ty)
            tl.store(to[:, None] + column[None, :], total, mask=is_its[:, None] & inside)
        current = _slot_after(slot, current, SHARERS)
