"""Copies whole pages to and from a dense buffer on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.contract.layout import PagePart
from weft.kernels.ops.pages.pool import ALL_PAGES, PageShare
from weft.kernels.shared.launch_sizes import cdiv

_TILE = 4096
"""Words copied by one program."""
MAX_COPIERS = 8
"""Most programs that copy out of host memory. Each takes a multiprocessor from the steps that run
meanwhile.
"""
_COPIED_WORDS, _COPY_WARPS = 16_384, 16
"""Words that such a program has under way at once, and its warps: few programs must have enough
bytes under way to fill the bus, whose reads take microseconds.
"""
_COPIED_COLUMNS = 2048
"""Most of these words that follow one another."""


def gather_rows(
    rows: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, share: PageShare = ALL_PAGES
) -> None:
    """`weft.kernels.ops.pages.gather_pages` for CUDA tensors of int32 words."""
    _copy_rows(rows, pages, out, share, is_gathered=True)


def scatter_rows(
    source: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, share: PageShare = ALL_PAGES
) -> None:
    """`weft.kernels.ops.pages.scatter_pages` for CUDA tensors of int32 words."""
    _copy_rows(rows, pages, source, share, is_gathered=False)


def _copy_rows(
    rows: torch.Tensor,
    pages: torch.Tensor,
    buffer: torch.Tensor,
    share: PageShare,
    *,
    is_gathered: bool,
) -> None:
    parts = cdiv(rows.shape[1], _TILE)
    sizes = (rows.shape[1], rows.stride(0), buffer.stride(0), parts)
    _copy_rows_kernel[(len(pages) * parts,)](
        *(rows, buffer, pages, *sizes),
        IS_GATHERED=is_gathered,
        RANK=share.rank,
        SIZE=share.size,
        TILE=_TILE,
        num_warps=8,
    )


def copy_part_rows(
    addresses: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, part: PagePart
) -> None:
    """`weft.kernels.ops.pages.copy_parts` for CUDA tensors; `rows` are int32 words."""
    stride, begin, size = (num_bytes // rows.itemsize for num_bytes in part[1:])
    tile = min(_COPIED_COLUMNS, triton.next_power_of_2(size))
    num_tiles = len(pages) * part.num_ranges * cdiv(size, tile)
    tiles_at_once = _COPIED_WORDS // tile
    grid = (min(MAX_COPIERS, cdiv(num_tiles, tiles_at_once)),)
    sizes = (num_tiles, part.num_ranges, stride, begin, size, rows.stride(0))
    _copy_part_kernel[grid](
        *(rows, addresses, pages, *sizes),
        IS_ALIGNED=part.stride % 16 == 0,
        TILES=tiles_at_once,
        TILE=tile,
        num_warps=_COPY_WARPS,
    )


@triton.jit
def row_in_pool(page: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """`weft.kernels.ops.pages.pool.row_in_pool`, within kernels."""
    return 1 + page // SIZE


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
    IS_ALIGNED: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    tiles_of_range = tl.cdiv(size, TILE)
    step = tl.num_programs(0) * TILES
    for first in tl.range(tl.program_id(0) * TILES, num_tiles, step, num_stages=1):
        tile = first + tl.arange(0, TILES)
        is_tile = tile < num_tiles
        at = tile // tiles_of_range
        row, slice = at // count, at % count
        source = tl.load(addresses + row, mask=is_tile, other=0).to(tl.pointer_type(tl.int32))
        if IS_ALIGNED:
            # Threads read 16 bytes at once. In four reads of 4 bytes, each would fetch the same
            # sectors: the bytes would cross the bus several times.
            source = tl.multiple_of(source, 16)
        page = tl.load(pages + row, mask=is_tile, other=0)
        column = (tile % tiles_of_range * TILE)[:, None] + tl.arange(0, TILE)[None, :]
        mask = is_tile[:, None] & (column < size)
        within = (slice * stride + begin)[:, None] + column
        words = tl.load(source[:, None] + within, mask=mask, cache_modifier=".cv")
        tl.store(rows + (page * page_stride)[:, None] + within, words, mask=mask)


@triton.jit
def _copy_rows_kernel(
    rows: tl.tensor,
    buffer: tl.tensor,
    pages: tl.tensor,
    num_words: int,
    stride: int,
    buffer_stride: int,
    parts: int,
    IS_GATHERED: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    # Programs of one page are neighbours, so that programs that run at the same time access
    # adjacent memory.
    row = (tl.program_id(0) // parts).to(tl.int64)
    page = tl.load(pages + row)
    column = tl.program_id(0) % parts * TILE + tl.arange(0, TILE)
    if SIZE > 1:
        num_words = tl.where(page % SIZE == RANK, num_words, 0)
        page = row_in_pool(page, SIZE)
    mask = column < num_words
    in_pool, in_buffer = rows + page * stride + column, buffer + row * buffer_stride + column
    if IS_GATHERED:
        tl.store(in_buffer, tl.load(in_pool, mask=mask), mask=mask)
    else:
        tl.store(in_pool, tl.load(in_buffer, mask=mask), mask=mask)
