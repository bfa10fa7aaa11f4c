"""Digests of pages on a GPU: a tile of a page a program, then one sum a page."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096
"""Words a program digests."""


def row_digests(rows: torch.Tensor, pages: torch.Tensor, word_offset: int) -> torch.Tensor:
    """`weft.kernels.page_digest.page_digests` for CUDA tensors of int32 words."""
    num_pages, tiles = len(pages), triton.cdiv(rows.shape[1], _TILE)
    partial = torch.empty((num_pages, tiles), dtype=torch.int64, device=rows.device)
    _digest_kernel[(num_pages, tiles)](
        partial, rows, pages, rows.shape[1], word_offset, TILE=_TILE, num_warps=8
    )
    return partial.sum(dim=1)


@triton.jit
def _digest_kernel(
    partial: tl.tensor,
    rows: tl.tensor,
    pages: tl.tensor,
    num_words: int,
    word_offset: int,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    page = tl.load(pages + row)
    column = tile * TILE + tl.arange(0, TILE)
    mask = column < num_words
    words = tl.load(rows + page * num_words + column, mask=mask, other=0)
    index = column.to(tl.int64) + word_offset
    z = (index.to(tl.uint64) << 32) | words.to(tl.uint32, bitcast=True).to(tl.uint64)
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    z = tl.where(mask, z, 0).to(tl.int64, bitcast=True)
    tl.store(partial + row * tl.num_programs(1) + tile, tl.sum(z, axis=0))
