"""Copies whole pages to and from a dense buffer on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.shared.launch_sizes import cdiv

_TILE = 4096
"""Words copied by one program."""


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
