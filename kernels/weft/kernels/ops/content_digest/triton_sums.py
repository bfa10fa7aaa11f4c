"""`weft.kernels.ops.content_digest` on a GPU: one launch reads all words once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from weft.kernels.shared.launch_sizes import cdiv

_WORD_BYTES = 4
_TILE, _TILES, _WARPS = 1024, 8, 8
"""Words that a program reads at once, and number of such tiles."""


def weighted_sums(tensors: Sequence[torch.Tensor], tables: torch.Tensor) -> torch.Tensor:
    width = tables.shape[1]
    parts = cdiv(width, _TILE * _TILES)
    rows = torch.from_numpy(_rows(tensors, width)).to(tables.device, non_blocking=True)
    partial = torch.empty((len(rows), parts, 2), dtype=torch.int64, device=tables.device)
    if len(rows):
        _sums_kernel[(len(rows) * parts,)](
            *(partial, rows, tables, width, parts), TILE=_TILE, TILES=_TILES, num_warps=_WARPS
        )
    return partial.sum(dim=1)


def _rows(tensors: Sequence[torch.Tensor], width: int) -> npt.NDArray[np.int64]:
    """[rows of all tensors, 2]: the address of each row, and its words."""
    begins = np.array([one.data_ptr() for one in tensors], np.int64)
    words = np.array([one.nbytes // _WORD_BYTES for one in tensors], np.int64)
    counts = -(-words // width)
    tensor = np.repeat(np.arange(len(words)), counts)
    row = np.arange(len(tensor)) - (np.cumsum(counts) - counts)[tensor]
    addresses = begins[tensor] + row * (width * _WORD_BYTES)
    return np.stack([addresses, np.minimum(words[tensor] - row * width, width)], axis=1)


@triton.jit
def _sums_kernel(
    partial: tl.tensor,
    rows: tl.tensor,
    tables: tl.tensor,
    width: int,
    parts: int,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    row = rows + (tl.program_id(0) // parts).to(tl.int64) * 2
    words = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int32)), 16)
    count = tl.load(row + 1)
    first = tl.program_id(0) % parts * TILE * TILES
    lane = tl.arange(0, TILE)
    left = tl.zeros((TILE,), tl.int64)
    right = tl.zeros((TILE,), tl.int64)
    for tile in tl.static_range(TILES):
        column = first + tile * TILE + lane
        exists = column < count
        word = tl.load(words + column, mask=exists, other=0).to(tl.int64)
        left += word * tl.load(tables + column, mask=exists, other=0)
        right += word * tl.load(tables + width + column, mask=exists, other=0)
    at = partial + tl.program_id(0).to(tl.int64) * 2
    tl.store(at, tl.sum(left, axis=0))
    tl.store(at + 1, tl.sum(right, axis=0))
