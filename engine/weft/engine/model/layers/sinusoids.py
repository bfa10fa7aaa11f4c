"""Positions as sines and cosines of falling frequencies (Vaswani et al., arXiv 1706.03762)."""

from __future__ import annotations

import math

import torch


def sinusoids(first: int, count: int, width: int) -> torch.Tensor:
    """[count, width] float32: positions from `first` on, in tensor2tensor's form: all sines before
    the cosines. `width` must be even.
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10_000.0) / (half - 1)))
    positions = torch.arange(first, first + count, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.sin(), angles.cos()), dim=1)
