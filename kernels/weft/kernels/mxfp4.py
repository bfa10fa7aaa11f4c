"""Numbers of four bits in groups that share a power of two: MXFP4.

OCP Microscaling Formats (MX) Specification 1.0, section 5.2: e2m1 numbers in groups of 32, scales
in e8m0.
"""

from __future__ import annotations

import torch

GROUP = 32
"""Numbers of a row that share a scale."""
NO_SCALE = 255
"""The one scale that is no number."""
_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantised(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers in floats; exact in bfloat16 and float32.

    Args:
        blocks: [N, K / 32, 16] uint8: two numbers each, the first in the lower half.
        scales: [N, K / 32] uint8: exponents of 2, with a bias of 127.
        dtype: Of the result.

    Returns:
        [N, K].

    Raises:
        ValueError: Shapes or dtypes do not fit together, or a scale is no number.
    """
    fits = blocks.shape == (*scales.shape, GROUP // 2)
    if not fits or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(
            f"{tuple(blocks.shape)} {blocks.dtype} with scales {tuple(scales.shape)} "
            f"{scales.dtype} are no MXFP4"
        )
    if bool((scales == NO_SCALE).any()):
        raise ValueError("a scale is no number")
    values = torch.tensor(_VALUES, dtype=torch.float32, device=blocks.device)
    table = torch.cat((values, -values))
    halves = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    wide = table[halves.int()]
    power = torch.ldexp(wide.new_ones(scales.shape), scales.int() - _BIAS)
    return (wide * power.unsqueeze(-1)).flatten(-2).to(dtype)
