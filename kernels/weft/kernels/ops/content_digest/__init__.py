"""Sums of tensors' words, each times numbers that its place decides: what digests are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.content_digest import triton_sums as _triton_sums
else:
    _triton_sums = deferred(__name__, "weft.kernels.ops.content_digest.triton_sums")


ALIGNMENT_BYTES = 16
"""A GPU reads so many bytes at once."""


def weighted_sums(tensors: Sequence[torch.Tensor], tables: torch.Tensor) -> torch.Tensor:
    """Cuts each tensor's words into rows and sums each row times each table, modulo 2**64.

    Args:
        tensors: Of N words of 32 bits and less than one more, of any dtype, contiguous; each begins
            at a multiple of `ALIGNMENT_BYTES`.
        tables: [2, W] int64, contiguous, on the same device; W is a multiple of 4.

    Returns:
        [ceil(N / W) of all tensors, 2] int64; the last row of each tensor may be shorter.
    """
    if tables.dtype != torch.int64 or tables.shape[0] != 2 or tables.shape[1] % 4:
        raise ValueError(f"tables {tuple(tables.shape)} {tables.dtype}")
    if not all(one.is_contiguous() for one in (tables, *tensors)):
        raise ValueError("tensors and tables must be contiguous")
    if any(one.data_ptr() % ALIGNMENT_BYTES for one in tensors):
        raise ValueError(f"tensors must begin at multiples of {ALIGNMENT_BYTES} bytes")
    if tables.is_cuda:
        return _triton_sums.weighted_sums(tensors, tables)
    return weighted_sums_reference(tensors, tables)


def weighted_sums_reference(tensors: Sequence[torch.Tensor], tables: torch.Tensor) -> torch.Tensor:
    """`weighted_sums` in eager torch, any device; a CPU uses it too."""
    width, found = tables.shape[1], list[torch.Tensor]()
    for one in tensors:
        data = one.reshape(-1).view(torch.uint8)
        words = data[: data.numel() // 4 * 4].view(torch.int32)
        found += [
            (words[first : first + width].long() * tables[:, : len(words) - first]).sum(1)
            for first in range(0, len(words), width)
        ]
    return torch.stack(found) if found else tables.new_empty((0, 2))
