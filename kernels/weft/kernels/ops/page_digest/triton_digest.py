"""Digests of pages on a GPU. A program digests some tiles of a page; then a page's digests are
summed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.pages.pool import ALL_PAGES, PageShare
from weft.kernels.ops.pages.triton_pages import row_in_pool
from weft.kernels.shared.launch_sizes import cdiv

_TILE, _TILES, _WARPS = 1024, 4, 8
"""Words that a program digests at once, number of such tiles, and warps (measured on an H200)."""


def row_digests(
    rows: torch.Tensor, pages: torch.Tensor, first_word: int = 0, share: PageShare = ALL_PAGES
) -> torch.Tensor:
    """`weft.kernels.ops.page_digest.page_digests` for CUDA tensors of int64 words."""
    num_pages, num_words = len(pages), rows.shape[1]
    parts = cdiv(num_words, _TILE * _TILES)
    partial = torch.empty((num_pages, parts), dtype=torch.int64, device=rows.device)
    # Programs of one page are neighbours, so that programs that run at the same time read adjacent
    # memory.
    _digest_kernel[(num_pages * parts,)](
        partial, rows, pages, num_words, rows.stride(0), first_word, parts,
        TILE=_TILE, TILES=_TILES, IS_WHOLE=num_words % (_TILE * _TILES) == 0,
        RANK=share.rank, SIZE=share.size, num_warps=_WARPS,
    )  # fmt: skip
    return partial.sum(dim=1)


@triton.jit
def _digest_kernel(
    partial: tl.tensor,
    rows: tl.tensor,
    pages: tl.tensor,
    num_words: int,
    stride: int,
    first_word: int,
    parts: int,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    page = tl.load(pages + row)
    if SIZE > 1:
        if page % SIZE != RANK:
            tl.store(partial + tl.program_id(0), 0)
            return
        page = row_in_pool(page, SIZE)
    first = part * TILE * TILES
    lane = tl.arange(0, TILE)
    # The states of SplitMix64 at a tile's words; each state of the next tile is the same distance
    # further.
    state = (lane + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    state += (first_word + first).to(tl.uint64) * 0x9E3779B97F4A7C15
    total = tl.zeros((TILE,), tl.uint64)
    for tile in tl.static_range(TILES):
        column = first + tile * TILE + lane
        is_word = column < num_words
        if IS_WHOLE:
            words = tl.load(rows + page * stride + column)
        else:
            words = tl.load(rows + page * stride + column, mask=is_word, other=0)
        z = words.to(tl.uint64, bitcast=True) + state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        z = z ^ (z >> 31)
        total += z if IS_WHOLE else tl.where(is_word, z, 0)
        state += TILE * 0x9E3779B97F4A7C15 % 2**64
    summed = tl.sum(total.to(tl.int64, bitcast=True), axis=0)
    tl.store(partial + tl.program_id(0), summed)
