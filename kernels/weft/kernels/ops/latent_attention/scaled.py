"""Latents in numbers of 8 bits, in eager torch on any device.

A pool is as in `weft.kernels.ops.pages.scaled_kv`, except that a vector's four bytes of scale are
two scales in bfloat16: of the latent, and of the shared key after it, whose sizes differ.
"""

from __future__ import annotations

import torch
from weft.kernels.ops.pages.scaled_kv import parts_of, quantised


def scaled_latents(pages: torch.Tensor, value_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[..., page_size, D]: the vectors of one layer's pages in 8 bits, rounded once."""
    numbers, scales = parts_of(pages.contiguous())
    return _widened(numbers, scales, value_dim).to(dtype)


def read_scaled(
    pages: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor], value_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """[T, D]: vectors of one layer's pages at these pages and offsets."""
    numbers, scales = parts_of(pages)
    return _widened(numbers[at], scales[at], value_dim).to(dtype)


def write_scaled(
    latents: torch.Tensor,
    pages: torch.Tensor,
    at: tuple[torch.Tensor, torch.Tensor],
    value_dim: int,
) -> None:
    """Writes vectors, [T, D], to one layer's pages at these pages and offsets."""
    numbers, scales = parts_of(pages)
    parts = torch.split(latents, [value_dim, latents.shape[-1] - value_dim], dim=-1)
    found = [quantised(part, numbers.dtype, _scale_of) for part in parts if part.shape[-1]]
    numbers.view(torch.uint8)[at] = torch.cat([one for one, _ in found], dim=-1).view(torch.uint8)
    both = torch.stack([found[0][1], found[-1][1]], dim=-1).bfloat16()
    scales[at] = both.view(torch.float32).squeeze(-1)


def _scale_of(scales: torch.Tensor) -> torch.Tensor:
    """The next numbers in bfloat16, so that no element exceeds the format's largest number."""
    above = ((scales.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    return torch.where(scales.isfinite(), above, scales)


def _widened(numbers: torch.Tensor, scales: torch.Tensor, value_dim: int) -> torch.Tensor:
    """[..., D] float32."""
    wide = numbers.float()
    both = scales.unsqueeze(-1).contiguous().view(torch.bfloat16).float()
    wide[..., :value_dim] *= both[..., :1]
    wide[..., value_dim:] *= both[..., 1:]
    return wide
