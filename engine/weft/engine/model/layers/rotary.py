"""Tables of the rotary position embedding."""

from __future__ import annotations

import math

import torch
from weft.engine.checkpoint.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians a position for each pair of elements.

    Returns:
        [head_dim / 2] float32.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _stretch_low(frequencies, rope)
    return frequencies


def cos_sin_table(rope: RopeConfig, head_dim: int, max_positions: int) -> torch.Tensor:
    """Table of the cosines and sines of every position.

    Returns:
        [max_positions, head_dim] float32: the cosines of the head_dim / 2 frequencies, then the
        sines.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _stretch_low(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1's context extension: long wavelengths are stretched, short ones kept, with a ramp
    between.
    """
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / rope.factor)
