"""Gated activations of MLPs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from weft.kernels import cpu


class Gating(NamedTuple):
    """gate * sigmoid(alpha * gate) * (up + offset), both limited before.

    SwiGLU (Shazeer 2020, arXiv 2002.05202) by default; gpt-oss limits both sides and has another
    slope and offset (its model card, section 2.2).
    """

    alpha: float = 1.0
    limit: float | None = None
    """Largest gate, and largest magnitude of up; None: any."""
    offset: float = 0.0

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 * I], gate columns first -> [T, I], dtype of `x`; float32 within, or wider."""
        gate, up = (x if x.dtype == torch.float64 else x.float()).chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (gate * torch.sigmoid(self.alpha * gate) * (up + self.offset)).to(x.dtype)


SILU = Gating()
"""silu(gate) * up."""


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, the SwiGLU of Shazeer 2020.

    Args:
        x: [T, 2 * I], contiguous, gate columns first; not changed.

    Returns:
        [T, I], dtype of `x`; computed in float32, rounded once.

    Raises:
        ValueError: `x` is not contiguous.
    """
    if x.is_cuda:
        from weft.kernels.gpu import activation as gpu

        return gpu.silu_and_mul(x)
    native = cpu.native_cpu_for(x)
    if native is None:
        return silu_and_mul_reference(x)
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    rows, width = x.shape
    out = torch.empty((rows, width // 2), dtype=x.dtype)
    native.silu_and_mul(x.dtype == torch.bfloat16, out.data_ptr(), x.data_ptr(), rows, width // 2)
    return out


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul` in eager torch, any device."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)
