"""Copies whole pages to and from a dense buffer on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.contract.layout import PagePart
from weft.kernels.shared.launch_sizes import cdiv

_TILE = 4096
"""Words copied by one program."""
_MAX_COPIERS = 32
"""Most programs that copy out of host memory. Few suffice for the bus, and steps run meanwhile."""


def gather_rows(rows: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> None:
    """`weft.kernels.ops.pages.gather_pages` for CUDA tensors of int32 words."""
    parts = cdiv(rows.shape[1], _TILE)
    sizes = (rows.shape[1], rows.stride(0), out.stride(0), parts)
    grid = (len(pages) * parts,)
    _gather_kernel[grid](out, rows, pages, *sizes, TILE=_TILE, num_warps=8)


def scatter_rows(source: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> None:
    """`weft.kernels.ops.pages.scatter_pages` for CUDA tensors of int32 words."""
    parts = cdiv(rows.shape[1], _TILE)
    sizes = (rows.shape[1], rows.stride(0), source.stride(0), parts)
    grid = (len(pages) * parts,)
    _scatter_kernel[grid](rows, source, pages, *sizes, TILE=_TILE, num_warps=8)


def copy_part_rows(
    addresses: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, part: PagePart
) -> None:
    """`weft.kernels.ops.pages.copy_parts` for CUDA tensors; `rows` are int32 words."""
    stride, begin, size = (num_bytes // rows.itemsize for num_bytes in part[1:])
    tile = min(_TILE, triton.next_power_of_2(size))
    num_tiles = len(pages) * part.num_ranges * cdiv(size, tile)
    grid = (min(_MAX_COPIERS, num_tiles),)
    sizes = (num_tiles, part.num_ranges, stride, begin, size, rows.stride(0))
    _copy_part_kernel[grid](rows, addresses, pages, *sizes, TILE=tile, num_warps=8)


@triton.jit
def _copy_part_kernel(
    rows: tl.tensor,
    addresses: tl.tensor,
    pages: tl.tensor,
    num_tiles: int,
    count: int,
    stride: int,
    begin: int,
    size: int,
    page_stride: int,
    TILE: tl.constexpr,
) -> None:
    tiles = tl.cdiv(size, TILE)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=1):
        at = tile // tiles
        row, slice = at // count, at % count
        source = tl.load(addresses + row).to(tl.pointer_type(tl.int32))
        page = tl.load(pages + row)
        column = tile % tiles * TILE + tl.arange(0, TILE)
        mask = column < size
        within = slice * stride + begin + column
        # Each byte crosses the bus once.
        words = tl.load(source + within, mask=mask, cache_modifier=".cv")
        tl.store(rows + page * page_stride + within, words, mask=mask)


@triton.jit
def _gather_kernel(
    out: tl.tensor,
    rows: tl.tensor,
    pages: tl.tensor,
    num_words: int,
    stride: int,
    buffer_stride: int,
    parts: int,
    TILE: tl.constexpr,
) -> None:
    # Programs of one page are neighbours, so that programs that run at the same time access
    # adjacent memory.
    row = (tl.program_id(0) // parts).to(tl.int64)
    page = tl.load(pages + row)
    column = tl.program_id(0) % parts * TILE + tl.arange(0, TILE)
    mask = column < num_words
    words = tl.load(rows + page * stride + column, mask=mask)
    tl.store(out + row * buffer_stride + column, words, mask=mask)


@triton.jit
def _scatter_kernel(
    rows: tl.tensor,
    source: tl.tensor,
    pages: tl.tensor,
    num_words: int,
    stride: int,
    buffer_stride: int,
    parts: int,
    TILE: tl.constexpr,
) -> None:
    # Programs of one page are neighbours, so that programs that run at the same time access
    # adjacent memory.
    row = (tl.program_id(0) // parts).to(tl.int64)
    page = tl.load(pages + row)
    column = tl.program_id(0) % parts * TILE + tl.arange(0, TILE)
    mask = column < num_words
    words = tl.load(source + row * buffer_stride + column, mask=mask)
    tl.store(rows + page * stride + column, words, mask=mask)
