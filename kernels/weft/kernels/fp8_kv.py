"""K and V in FP8 (e4m3), each vector with a scale of its own.

A pool of them is `[num_pages, Hkv, layers, 2, page_size, D + SCALE_BYTES]` uint8: of each head,
layer and part first the numbers of all the page's positions, then their scales, float32. So how a
position's vectors are rounded does not depend on other positions. The vectors themselves may depend
on how a prompt was cut, as in floats.
"""

from __future__ import annotations

import torch
from weft.kernels.fp8 import FP8, FP8_MAX

SCALE_BYTES = 4
"""Of a vector's scale."""
FP8_MULTIPLE = 16
"""D is a multiple of it."""


def is_fp8(pool: torch.Tensor) -> bool:
    """Whether a pool keeps vectors in FP8."""
    return pool.dtype == torch.uint8


def head_dim(pool: torch.Tensor) -> int:
    """D: elements of a vector of a pool in any format."""
    return pool.shape[-1] - (SCALE_BYTES if is_fp8(pool) else 0)


def holds(pool: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a pool holds vectors of a model that computes in a dtype."""
    return pool.dtype == dtype or (is_fp8(pool) and dtype.is_floating_point)


def parts_of(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers [..., page_size, D] in FP8 and scales [..., page_size] of pages; views."""
    page_size, width = pool.shape[-2:]
    flat, end = pool.flatten(-2), page_size * (width - SCALE_BYTES)
    numbers = flat[..., :end].view(*flat.shape[:-1], page_size, -1).view(FP8)
    return numbers, flat[..., end:].view(torch.float32)


def entries_of(pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Everything that a pool has of its positions, each [..., page_size, elements]; views."""
    if not is_fp8(pool):
        return (pool,)
    numbers, scales = parts_of(pool)
    return numbers.view(torch.uint8), scales.unsqueeze(-1)


def dequantised(pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The vectors of pages, [..., page_size, D], rounded once; of floats as they are."""
    if not is_fp8(pages):
        return pages
    numbers, scales = parts_of(pages.contiguous())
    return (numbers.float() * scales.unsqueeze(-1)).to(dtype)


def quantised(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D] in FP8, the largest magnitude of each being FP8_MAX; scales [...] float32."""
    wide = vectors.float()
    scales = wide.abs().amax(-1) / FP8_MAX
    inverse = torch.where(scales > torch.finfo(torch.float32).tiny, 1 / scales, 0)
    rounded = (wide * inverse.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return rounded, scales
