"""Shared code of the LoRA kernels: the parts of a product, and where their rows are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.lora.spec import LoraWeights

_PROGRAMS = 512
"""Number of programs that keep the memory busy."""
_MIN_ENTRY = 2
"""Rows of an entry that are read whether they exist or not."""

Parts = tuple[LoraWeights, ...]

FREE = [
    *("layer", "slots", "width", "tokens", "out_width"),
    *(f"{name}{n}" for name in ("max_rows", "out", "column") for n in range(3)),
]
"""Arguments for whose values Triton does not specialise kernels."""


def splits_of(programs: int, depth: int, least: int, most: int, enough: int = _PROGRAMS) -> int:
    """Number of parts of K for so many programs. Parts have `least` elements or more; there are at
    most `most`, and about `enough` programs in all.
    """
    splits = 1
    while 2 * splits <= most and depth // (2 * splits) >= least:
        if programs * splits >= enough:
            break
        splits *= 2
    return splits


def max_rows(part: LoraWeights) -> int:
    """Most rows of a part that an adapter can have."""
    return part.table.shape[2]


def three(values: list[Any]) -> tuple[Any, Any, Any]:
    """Pads a list to the three parts that kernels expect; they never read the added ones."""
    first, second, third = (values + values[:1] * 2)[:3]
    return first, second, third


class AdapterRows(NamedTuple):
    """A or B of one part of a product, for kernels."""

    pool: torch.Tensor
    """[rows, 8, features]."""
    table: torch.Tensor
    """[layers, slots, most rows] int32: the rows of each slot."""
    counts: torch.Tensor
    """[layers, slots] int32: their number."""

    @classmethod
    def of_a(cls, part: LoraWeights) -> AdapterRows:
        return cls(part.a, part.table, part.counts)

    @classmethod
    def of_b(cls, part: LoraWeights) -> AdapterRows:
        return cls(part.b, part.rows_of_b, part.counts)


Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class PartRows(NamedTuple):
    """`AdapterRows` of the three parts of a product, field by field. If it has fewer parts, its
    first part fills the others.
    """

    pools: Three
    tables: Three
    counts: Three

    @classmethod
    def of_a(cls, parts: Parts) -> PartRows:
        return cls(*zip(*three([AdapterRows.of_a(part) for part in parts]), strict=True))

    @classmethod
    def of_b(cls, parts: Parts) -> PartRows:
        return cls(*zip(*three([AdapterRows.of_b(part) for part in parts]), strict=True))


def most_rows(parts: Parts) -> tuple[int, int, int]:
    """The most rows that an adapter can have in each of three parts."""
    return three([max_rows(p) for p in parts])


def columns(parts: Parts) -> tuple[Any, ...]:
    """Arguments that say which columns of the product belong to each part."""
    return (*three([p.out_features for p in parts]), *three([p.column for p in parts]))


def alignment_of(*sizes: int) -> int:
    """Alignment of columns, so that several are loaded at once: 8 if it divides all sizes, else 1.

    Triton does not specialise kernels for these sizes, and so does not find the alignment itself.
    """
    return 8 if all(size % 8 == 0 for size in sizes) else 1


def column_alignment(parts: Parts, width: int) -> int:
    """`alignment_of` for a product of `width` columns."""
    return alignment_of(width, *(size for p in parts for size in (p.out_features, p.column)))


def new_ranks(
    rows: int, parts: Parts, splits: int, device: torch.device, *, are_zero: bool = False
) -> torch.Tensor:
    """[splits, R, ranks of all parts] float32: memory for each row's ranks, in `splits` sums."""
    width, make = sum(part.max_rank for part in parts), torch.zeros if are_zero else torch.empty
    return make((splits, rows, width), dtype=torch.float32, device=device)


def new_entries(rows: int, parts: Parts, device: torch.device) -> torch.Tensor:
    """[parts, R, 1 + rows of the pool] int32: memory for the entries of rows.

    An entry of a row has the number of the pool's rows that its adapter uses in the part, then
    these rows; the rest is undefined.
    """
    most = max(_MIN_ENTRY, *(max_rows(part) for part in parts))
    size = (len(parts), rows, 1 + -(-most // _MIN_ENTRY) * _MIN_ENTRY)
    return torch.empty(size, dtype=torch.int32, device=device)


@triton.jit
def dot(values: tl.tensor, tile: tl.tensor, total: tl.tensor, IS_EXACT: tl.constexpr) -> tl.tensor:
    """`total` plus the product; `values` are converted to the tile's dtype."""
    values = values.to(tile.dtype)
    if IS_EXACT:
        total = tl.dot(values, tile, total, input_precision="ieee")
    else:
        total = tl.dot(values, tile, total)
    return total


@triton.jit
def pick(number: int, first: tl.tensor, second: tl.tensor, third: tl.tensor) -> tl.tensor:
    """Selects one of three pointers or numbers."""
    return tl.where(number == 0, first, tl.where(number == 1, second, third))


@triton.jit
def before(number: tl.tensor, first: int, second: int) -> tl.tensor:
    """Sum of the numbers of the parts before part `number`."""
    return (number >= 1).to(tl.int32) * first + (number >= 2).to(tl.int32) * second


@triton.jit
def part_of(block: tl.tensor, first: int, second: int) -> tl.tensor:
    """The part that a block belongs to, given the numbers of blocks of the first two parts."""
    return (block >= first).to(tl.int32) + (block >= first + second).to(tl.int32)


@triton.jit
def rows_in(
    given: PartRows, part: tl.tensor, at: tl.tensor, most0: int, most1: int, most2: int
) -> tuple[tl.tensor, tl.tensor]:
    """Where a slot's rows in a part are listed, and where their number is. `at` is the slot's place
    among those of all layers.
    """
    table = pick(part, *given.tables) + at * pick(part, most0, most1, most2)
    return table, pick(part, *given.counts) + at


@triton.jit
def aligned(number: tl.tensor, ALIGNMENT: tl.constexpr) -> tl.tensor:
    """The number, marked as a multiple of ALIGNMENT for the compiler."""
    return number // ALIGNMENT * ALIGNMENT
