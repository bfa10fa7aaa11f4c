"""Normalisation of rows: RMS (Zhang and Sennrich 2019), plain and with the residual addition fused,
and layer norm (Ba et al. 2016).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from weft.kernels.ops.norm.cpu import native_norm
from weft.kernels.ops.norm.reference import add_rms_norm_reference, rms_norm_reference
from weft.kernels.shared import cpu as shared_cpu
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.norm import triton_layer as _triton_layer
    from weft.kernels.ops.norm import triton_rms as _triton_rms
else:
    _triton_layer = deferred(__name__, "weft.kernels.ops.norm.triton_layer")
    _triton_rms = deferred(__name__, "weft.kernels.ops.norm.triton_rms")


class Norm(NamedTuple):
    """An RMS norm with its parameters."""

    weight: torch.Tensor
    """[H], dtype of the rows, or float32 where 1 + the checkpoint's weight would lose bits by
    rounding.
    """
    eps: float
    """Added to the mean square."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises each row: [T, H] -> [T, H]."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(NamedTuple):
    """A layer norm with its parameters."""

    weight: torch.Tensor
    """[H], dtype of the rows."""
    bias: torch.Tensor | None
    """[H], or None."""
    eps: float
    """Added to the variance."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises each row to zero mean and unit variance: [T, H] -> [T, H]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


AnyNorm = Norm | LayerNorm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises each row to unit root mean square and scales it.

    Args:
        x: [T, H], contiguous; not changed.
        weight: [H], dtype of `x` or float32.

    Returns:
        [T, H], dtype of `x`; computed in float32, rounded once.
    """
    if x.is_cuda:
        return _triton_rms.rms_norm(x, weight, eps)
    native = shared_cpu.native_cpu_for(x)
    if native is None:
        return rms_norm_reference(x, weight, eps)
    return native_norm(native, x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds `x` to the residual stream in place and normalises the sum.

    Args:
        x: [T, H], contiguous; not changed.
        residual: [T, H], contiguous; becomes `residual + x`, rounded to its dtype.
        weight: [H], dtype of `x` or float32.

    Returns:
        The normalised rounded sum [T, H] and `residual` itself.
    """
    if x.is_cuda:
        return _triton_rms.add_rms_norm(x, residual, weight, eps)
    native = shared_cpu.native_cpu_for(x)
    if native is None:
        return add_rms_norm_reference(x, residual, weight, eps)
    if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous():
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} is not like x")
    return native_norm(native, x, residual, weight, eps), residual


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Layer norm of a sum.

    Args:
        x: [T, H], contiguous; not changed.
        residual: [T, H], contiguous; not changed.
        weight: [H], dtype of `x`.
        bias: [H], dtype of `x`, or None.

    Returns:
        [T, H], dtype of `x`; on a GPU computed in float32 and rounded once.
    """
    if x.is_cuda:
        return _triton_layer.add_layer_norm(x, residual, weight, bias, eps)
    return F.layer_norm(x + residual, weight.shape, weight, bias, eps)
