"""Low-rank additions of few rows within the kernel of the product itself.

A launch before the product computes the ranks. For small weights, which are read in less time than
a launch takes, this is faster than ranks on a second stream and launches that add them, since
branches of a graph begin later than launches in sequence. Each row loads its own rows of B before
the ranks have arrived.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.ops.lora.triton_parts import PartRows, before, most_rows, pick, three
from weft.kernels.ops.lora.triton_rows import NormOfRows, of_tokens, shrink_rows
from weft.kernels.shared.dependent_launch import launch_options, wait_for_last

MAX_ROWS = 8
"""Most rows for which it is used: up to here tokens rarely share an adapter."""
_AT_ONCE = tl.constexpr(16)
"""Ranks that are multiplied by B at once."""


class ToColumns(NamedTuple):
    """The tensors from which a product's kernel adds what adapters add to the columns of T rows."""

    ranks: torch.Tensor
    """[sums, T, ranks of all parts] float32; the sums are to be added up."""
    token_slots: torch.Tensor
    """[T] int32: adapter slot of each row."""
    of_b: PartRows


class AddedLaunchConfig(NamedTuple):
    slots: int
    sums: int
    """Number of sums, a power of two."""
    width: int
    """Ranks of all parts."""
    parts: int
    columns: tuple[int, ...]
    """First column of each part."""
    widths: tuple[int, ...]
    """Columns of each part."""
    max_rows: tuple[int, ...]
    """The most rows of an adapter in each part."""
    is_early: bool
    """Whether the tables that say where B is may be read before the preceding kernel has ended."""


class ProductAddition(NamedTuple):
    """What adapters add to a product, for its kernel."""

    tensors: ToColumns
    layer: int
    launch: AddedLaunchConfig

    def arguments(self) -> dict[str, Any]:
        return {"added": self.tensors, "layer": self.layer, "ADDED": self.launch}


NOTHING: dict[str, Any] = {"added": None, "layer": 0, "ADDED": None}
"""Arguments for a product to which nothing is added."""


def can_add_within(rows: int, columns_at_once: int, addition: LoraAddition) -> bool:
    """Whether a product's kernel can add what adapters add to so many rows. Each `columns_at_once`
    columns of a program must belong to one part, or to none.
    """
    places = [place for p in addition.parts for place in (p.column, p.out_features)]
    are_whole = all(place % columns_at_once == 0 for place in places)
    have_one_table = all(part.b_table is None for part in addition.parts)
    return 0 < rows <= MAX_ROWS and are_whole and have_one_table


def added_within(
    x: torch.Tensor, addition: LoraAddition, norm: NormOfRows | None = None
) -> ProductAddition:
    """Computes the ranks of each row, in a launch of its own.

    Args:
        x: [T, K], contiguous: the product's input.
        addition: One that `can_add_within`.
        norm: Norm that the product, too, applies to `x`; or None.
    """
    parts, layer, slots = addition.parts, addition.layer, addition.segments.token_slots
    options = launch_options(x.device)
    is_early = addition.are_given
    ranks = shrink_rows(x, parts, layer, of_tokens(slots), options, norm=norm, is_early=is_early)
    tensors = ToColumns(ranks, slots, PartRows.of_b(parts))
    launch = AddedLaunchConfig(
        parts[0].table.shape[1],
        ranks.shape[0],
        ranks.shape[2],
        len(parts),
        three([part.column for part in parts]),
        three([part.out_features for part in parts]),
        most_rows(parts),
        is_early,
    )
    return ProductAddition(tensors, layer, launch)


@triton.jit
def wait_for_ranks(
    added: ToColumns,
    layer: int,
    row: tl.tensor,
    rows: int,
    column: tl.tensor,
    columns: int,
    IS_GATED: tl.constexpr,
    SHAPE: tl.constexpr,
) -> tuple[tl.tuple, tl.tuple]:
    """Waits for all earlier launches, and returns what `added_to_columns` takes for some columns;
    then the same for those `columns` further where gated. B is read before the wait if it may be.
    """
    if not SHAPE.is_early:
        wait_for_last()
    given = rows_of_b(added, layer, row, rows, column, SHAPE)
    given_up = given
    if IS_GATED:
        given_up = rows_of_b(added, layer, row, rows, column + columns, SHAPE)
    if SHAPE.is_early:
        wait_for_last()
    given += (some_ranks(added, given[0], given[2], row, rows, 0, SHAPE),)
    if IS_GATED:
        given_up += (some_ranks(added, given_up[0], given_up[2], row, rows, 0, SHAPE),)
    return given, given_up


@triton.jit
def rows_of_b(
    added: ToColumns,
    layer: int,
    row: tl.tensor,
    rows: int,
    column: tl.tensor,
    SHAPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Reads what `added_to_columns` needs of adapters before the ranks have arrived.

    Args:
        row: [ROWS].
        rows: Number of rows that exist.
        column: [COLUMNS]: columns of the product, all of one part, or of none.
        SHAPE: An `AddedLaunchConfig`.

    Returns:
        The number of the part; the place of each row's slot in the part's tables, and the number of
        its rows of B there, [ROWS]; and the elements of B for the first ranks, [ROWS, _AT_ONCE,
        COLUMNS].
    """
    first = tl.min(column, axis=0)
    part = 0
    is_there = first < 0
    PARTS: tl.constexpr = SHAPE.parts
    for number in tl.static_range(PARTS):
        end = SHAPE.columns[number] + SHAPE.widths[number]
        inside = (first >= SHAPE.columns[number]) & (first < end)
        part = tl.where(inside, number, part)
        is_there = is_there | inside
    slot = tl.load(added.token_slots + row, mask=row < rows, other=0)
    counts = pick(part, *added.of_b.counts)
    begin = layer * SHAPE.slots
    # Columns of no part are treated as those of no adapter.
    slot = tl.where(is_there, slot, 0)
    count = tl.load(counts + begin + slot, mask=slot > 0, other=0)
    slot += begin
    return part, slot, count, _elements_of_b(added, part, slot, count, column, 0, SHAPE)


@triton.jit
def _elements_of_b(
    added: ToColumns,
    part: tl.tensor,
    slot: tl.tensor,
    count: tl.tensor,
    column: tl.tensor,
    start: int,
    SHAPE: tl.constexpr,
) -> tl.tensor:
    """[ROWS, _AT_ONCE, COLUMNS], of the ranks from `start` on."""
    rank = start + tl.arange(0, _AT_ONCE)
    most = pick(part, SHAPE.max_rows[0], SHAPE.max_rows[1], SHAPE.max_rows[2])
    width = pick(part, SHAPE.widths[0], SHAPE.widths[1], SHAPE.widths[2])
    begin = pick(part, SHAPE.columns[0], SHAPE.columns[1], SHAPE.columns[2])
    is_rank = rank[None, :] < 8 * count[:, None]
    at = pick(part, *added.of_b.tables)
    at += slot[:, None] * most + (rank // 8)[None, :]
    place = tl.load(at, mask=is_rank, other=0).to(tl.int64) * 8 + (rank % 8)[None, :]
    at = pick(part, *added.of_b.pools)
    at += place[:, :, None] * width + (column - begin)[None, None, :]
    inside = is_rank[:, :, None] & (column - begin < width)[None, None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def some_ranks(
    added: ToColumns,
    part: tl.tensor,
    count: tl.tensor,
    row: tl.tensor,
    rows: int,
    start: int,
    SHAPE: tl.constexpr,
) -> tl.tensor:
    """The ranks of each row from `start` on: [ROWS, _AT_ONCE] float32.

    Load the first ones before the product is computed: they would arrive late after it.

    Args:
        part: From `rows_of_b`.
        count: From `rows_of_b`.
        start: The first rank.
    """
    rank = start + tl.arange(0, _AT_ONCE)[None, None, :]
    is_rank = rank < 8 * count[None, :, None]
    number = tl.arange(0, SHAPE.sums)[:, None, None]
    at = added.ranks + (number * rows + row[None, :, None]) * SHAPE.width + rank
    at += 8 * before(part, SHAPE.max_rows[0], SHAPE.max_rows[1])
    # One load of all sums, since each of several loads would wait for the one before.
    return tl.sum(tl.load(at, mask=is_rank, other=0.0), axis=0)


@triton.jit
def added_to_columns(
    added: ToColumns,
    part: tl.tensor,
    slot: tl.tensor,
    count: tl.tensor,
    elements: tl.tensor,
    ranks: tl.tensor,
    row: tl.tensor,
    rows: int,
    column: tl.tensor,
    SHAPE: tl.constexpr,
) -> tl.tensor:
    """The addition to some columns of each row: [COLUMNS, ROWS] float32.

    Args:
        part: From `rows_of_b`, as are `slot`, `count` and `elements`.
        slot: The place of each row's slot in the tables.
        ranks: The first ones, from `some_ranks`.
    """
    total = tl.sum(elements.to(tl.float32) * ranks[:, :, None], axis=1)
    for start in range(_AT_ONCE, 8 * tl.max(count, axis=0), _AT_ONCE):
        elements = _elements_of_b(added, part, slot, count, column, start, SHAPE)
        ranks = some_ranks(added, part, count, row, rows, start, SHAPE)
        total += tl.sum(elements.to(tl.float32) * ranks[:, :, None], axis=1)
    return tl.trans(total)
