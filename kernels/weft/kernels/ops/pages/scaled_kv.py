"""K and V in numbers of 8 bits, each vector with a scale of its own.

Such a pool is `[num_pages, Hkv, layers, 2, page_size, D + SCALE_BYTES]`, uint8 for FP8 (e4m3), int8
for integers. For each head, layer and part it has first the numbers of all the page's positions,
then their scales, float32. So the rounding of a position's vectors does not depend on other
positions. The vectors themselves may depend on how a prompt was cut into chunks, as in floats.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from weft.kernels.shared.formats.fp8 import FP8, FP8_MAX

INT8_MAX = 127
"""Largest integer; -128 is not used."""

SCALE_BYTES = 4
"""Bytes of a vector's scale."""
SCALED_MULTIPLE = 16
"""D must be a multiple of it."""
ALL_BITS = {torch.uint8: 255, torch.int8: -1}
"""Dtypes of pools in FP8 and int8, and the number of each whose bits are all set."""


def is_scaled(pool: torch.Tensor) -> bool:
    """Whether a pool keeps vectors in 8 bits."""
    return pool.dtype in ALL_BITS


def head_dim(pool: torch.Tensor) -> int:
    """D: elements of a vector of a pool in any format."""
    return pool.shape[-1] - (SCALE_BYTES if is_scaled(pool) else 0)


def holds(pool: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a pool holds vectors of a model that computes in `dtype`."""
    return pool.dtype == dtype or (is_scaled(pool) and dtype.is_floating_point)


def parts_of(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of pages: numbers [..., page_size, D], FP8 or int8, and scales [..., page_size]."""
    page_size, width = pool.shape[-2:]
    flat, end = pool.flatten(-2), page_size * (width - SCALE_BYTES)
    numbers = flat[..., :end].view(*flat.shape[:-1], page_size, -1)
    return numbers.view(FP8 if pool.dtype == torch.uint8 else torch.int8), flat[..., end:].view(
        torch.float32
    )


def entries_of(pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of all that a pool keeps of its positions, each [..., page_size, elements]."""
    if not is_scaled(pool):
        return (pool,)
    numbers, scales = parts_of(pool)
    return numbers.view(torch.uint8), scales.unsqueeze(-1)


def dequantised(pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The vectors of pages, [..., page_size, D], rounded once; pages in floats are returned as they
    are.
    """
    if not is_scaled(pages):
        return pages
    numbers, scales = parts_of(pages.contiguous())
    return (numbers.float() * scales.unsqueeze(-1)).to(dtype)


def quantised(
    vectors: torch.Tensor,
    dtype: torch.dtype,
    scale_of: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D] in FP8 or int8, so that the largest magnitude of each vector is the format's largest
    number, and scales [...] float32. `scale_of` rounds scales to those that can be kept.
    """
    most = FP8_MAX if dtype == FP8 else INT8_MAX
    wide = vectors.float()
    # A GPU multiplies by the reciprocal of a number that is not on it, which rounds otherwise.
    scales = scale_of(wide.abs().amax(-1) / wide.new_full((), most))
    inverse = torch.where(scales > torch.finfo(torch.float32).tiny, 1 / scales, 0)
    scaled = (wide * inverse.unsqueeze(-1)).clamp_(-most, most)
    return (scaled if dtype == FP8 else scaled.round_()).to(dtype), scales
