"""RMS normalisation."""

from __future__ import annotations

import torch
from weft.kernels.norm import rms_norm


class RMSNorm:
    """Rows scaled to unit root mean square, then by a learnt weight."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """`weight` is [size]; `eps` is added to the mean square."""
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises each row: [M, size] -> [M, size]."""
        return rms_norm(x, self.weight, self.eps)
