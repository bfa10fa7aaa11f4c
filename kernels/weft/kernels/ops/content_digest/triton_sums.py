"""`weft.kernels.ops.content_digest` on a GPU: one launch reads the words once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.shared.launch_sizes import cdiv

_TILE, _TILES, _WARPS = 1024, 8, 8
"""Words that a program reads at once, and number of such tiles."""


def weighted_sums(words: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    count, width = words.numel(), tables.shape[1]
    rows, parts = cdiv(count, width), cdiv(width, _TILE * _TILES)
    partial = torch.zeros((rows, parts, 2), dtype=torch.int64, device=words.device)
    if rows:
        _sums_kernel[(rows * parts,)](
            *(partial, words, tables, count, width, parts),
            TILE=_TILE,
            TILES=_TILES,
            num_warps=_WARPS,
        )
    return partial.sum(dim=1)


@triton.jit(do_not_specialize=["count"])
def _sums_kernel(
    partial: tl.tensor,
    words: tl.tensor,
    tables: tl.tensor,
    count: int,
    width: int,
    parts: int,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // parts).to(tl.int64)
    first = tl.program_id(0) % parts * TILE * TILES
    lane = tl.arange(0, TILE)
    left = tl.zeros((TILE,), tl.int64)
    right = tl.zeros((TILE,), tl.int64)
    for tile in tl.static_range(TILES):
        column = first + tile * TILE + lane
        exists = (column < width) & (row * width + column < count)
        word = tl.load(words + row * width + column, mask=exists, other=0).to(tl.int64)
        left += word * tl.load(tables + column, mask=exists, other=0)
        right += word * tl.load(tables + width + column, mask=exists, other=0)
    at = partial + tl.program_id(0).to(tl.int64) * 2
    tl.store(at, tl.sum(left, axis=0))
    tl.store(at + 1, tl.sum(right, axis=0))
