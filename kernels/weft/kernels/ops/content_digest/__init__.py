"""Sums of a tensor's words, each times numbers that its place decides: what digests are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.content_digest import triton_sums as _triton_sums
else:
    _triton_sums = deferred(__name__, "weft.kernels.ops.content_digest.triton_sums")


def weighted_sums(words: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Cuts words into rows and sums each row times each table, modulo 2**64.

    Args:
        words: [N] int32, contiguous.
        tables: [2, W] int64, contiguous, on the same device.

    Returns:
        [ceil(N / W), 2] int64; the last row may be shorter.
    """
    if words.dtype != torch.int32 or tables.dtype != torch.int64 or tables.shape[0] != 2:
        raise ValueError(f"words {words.dtype}, tables {tuple(tables.shape)} {tables.dtype}")
    if not (words.is_contiguous() and tables.is_contiguous()):
        raise ValueError("words and tables must be contiguous")
    if words.is_cuda:
        return _triton_sums.weighted_sums(words, tables)
    return weighted_sums_reference(words, tables)


def weighted_sums_reference(words: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """`weighted_sums` in eager torch, any device; a CPU uses it too."""
    width = tables.shape[1]
    found = [
        (words[first : first + width].long() * tables[:, : len(words) - first]).sum(1)
        for first in range(0, len(words), width)
    ]
    return torch.stack(found) if found else tables.new_empty((0, 2))
