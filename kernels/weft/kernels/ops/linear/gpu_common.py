"""Common code of linear layers on a GPU: checks, adapters, residuals."""

from __future__ import annotations

from collections.abc import Callable

import torch
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.checks import check_addition
from weft.kernels.ops.lora.gpu import Ranks, add_fixed_lora
from weft.kernels.ops.lora.spec import LoraAddition

Multiply = Callable[[torch.Tensor | None, torch.dtype], torch.Tensor]
"""Computes x @ weight^T + bias + residual in a dtype; the residual may be None."""


def check_operands(x: torch.Tensor, w: LinearWeight, residual: torch.Tensor | None) -> None:
    """Raises ValueError unless x [M, K] and the residual [M, N] fit the weight."""
    if x.shape[1] != w.in_features or x.dtype != w.dtype or not x.is_contiguous():
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} contiguous={x.is_contiguous()} does not fit "
            f"{type(w.form).__name__} of {w.in_features} columns in a {w.dtype} layer"
        )
    if residual is not None and (
        residual.shape != (x.shape[0], w.out_features) or not residual.is_contiguous()
    ):
        raise ValueError(f"residual {tuple(residual.shape)} does not fit, or is not contiguous")


def with_adapters(
    x: torch.Tensor,
    w: LinearWeight,
    multiply: Multiply,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    lora: LoraAddition | None,
) -> torch.Tensor:
    """`weft.kernels.ops.linear.linear`, given a function that multiplies by the weight alone."""
    if lora is not None:
        check_addition((x.shape[0], w.out_features), x.shape, x.dtype, lora)
    dtype = out_dtype or x.dtype
    if w.is_fixed:
        # Rounded as with adapters, so that rows do not depend on whether another row has an
        # adapter.
        out = multiply(None, dtype)
        if lora is not None:
            add_fixed_lora(out, x, lora)
        return out if residual is None else out.add_(residual)
    ranks = None if lora is None else Ranks(x, lora, is_ahead=True)
    out = multiply(residual, dtype)
    if ranks is not None:
        ranks.add_to(out)
    return out
