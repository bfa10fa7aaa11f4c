"""Shared code of the LoRA kernels: the parts of a product, and where their rows are."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from weft.kernels.lora import LoraWeights

_PROGRAMS = 512
"""Number of programs that keep the memory busy."""
_MIN_ENTRY = 2
"""Rows that are read of an entry whether they are there or not."""

Parts = tuple[LoraWeights, ...]

FREE = [
    *("layer", "slots", "width", "tokens", "out_width"),
    *(f"{name}{n}" for name in ("max_rows", "out", "column") for n in range(3)),
]
"""Arguments for whose values kernels are not specialised."""


def splits_of(programs: int, depth: int, least: int, most: int, enough: int = _PROGRAMS) -> int:
    """Parts of K for so many programs: of `least` elements or more, at most `most`, and no more
    than `enough` programs in all, or little more."""
    splits = 1
    while 2 * splits <= most and depth // (2 * splits) >= least:
        if programs * splits >= enough:
            break
        splits *= 2
    return splits


def max_rows(part: LoraWeights) -> int:
    """The most rows that an adapter has of a part."""
    return part.table.shape[2]


def three(values: list[Any]) -> list[Any]:
    """Pads to three parts, which kernels expect; they never read the missing ones."""
    return (values + values[:1] * 2)[:3]


def tables(parts: Parts, rows: list[torch.Tensor]) -> tuple[Any, ...]:
    """Arguments that say where rows are."""
    return (*three(rows), *three([p.counts for p in parts]), *three([max_rows(p) for p in parts]))


def columns(parts: Parts) -> tuple[Any, ...]:
    """Arguments that say which columns of the product are each part's."""
    return (*three([p.out_features for p in parts]), *three([p.column for p in parts]))


def alignment_of(*sizes: int) -> int:
    """The alignment of columns, so that several are loaded at once: 8, if it divides all sizes.

    Kernels are not compiled anew for each size, and so do not know of it by themselves.
    """
    return 8 if all(size % 8 == 0 for size in sizes) else 1


def column_alignment(parts: Parts, width: int) -> int:
    """`alignment_of` a product of so many columns."""
    return alignment_of(width, *(size for p in parts for size in (p.out_features, p.column)))


def new_ranks(
    rows: int, parts: Parts, splits: int, device: torch.device, *, are_zero: bool = False
) -> torch.Tensor:
    """[splits, R, ranks of all parts] float32: each row's ranks, in as many sums."""
    width, make = sum(part.max_rank for part in parts), torch.zeros if are_zero else torch.empty
    return make((splits, rows, width), dtype=torch.float32, device=device)


def new_entries(rows: int, parts: Parts, device: torch.device) -> torch.Tensor:
    """[parts, R, 1 + rows of the pool] int32: what each row has of each part.

    An entry has the number of rows of the pool, then the rows; the rest is undefined.
    """
    most = max(_MIN_ENTRY, *(max_rows(part) for part in parts))
    size = (len(parts), rows, 1 + -(-most // _MIN_ENTRY) * _MIN_ENTRY)
    return torch.empty(size, dtype=torch.int32, device=device)


@triton.jit
def dot(values: tl.tensor, tile: tl.tensor, total: tl.tensor, IS_EXACT: tl.constexpr) -> tl.tensor:
    """`total` and the product; values are taken as of the tile's dtype."""
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
    """Sum of the numbers that precede a part."""
    return (number >= 1).to(tl.int32) * first + (number >= 2).to(tl.int32) * second


@triton.jit
def part_of(block: tl.tensor, first: int, second: int) -> tl.tensor:
    """The part that a block belongs to, from the block counts of the first two."""
    return (block >= first).to(tl.int32) + (block >= first + second).to(tl.int32)


@triton.jit
def aligned(number: tl.tensor, ALIGNMENT: tl.constexpr) -> tl.tensor:
    """The number, of which the compiler sees what divides it."""
    return number // ALIGNMENT * ALIGNMENT
