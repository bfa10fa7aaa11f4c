"""RMS norms by native operations on a CPU."""

from __future__ import annotations

import torch
from weft.kernels.shared import cpu


def native_norm(
    native: cpu.NativeCpu,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The norm of rows x [T, H], or of `residual`, to which x is added in place."""
    rows, width = x.shape
    is_fine = weight.dtype == torch.float32
    is_typed = is_fine or weight.dtype == x.dtype
    if weight.shape != (width,) or not is_typed or not x.is_contiguous():
        raise ValueError(
            f"weight {tuple(weight.shape)} {weight.dtype} does not fit x {tuple(x.shape)} "
            f"{x.dtype} contiguous={x.is_contiguous()}"
        )
    out = torch.empty_like(x)
    native.rms_norm(
        x.dtype == torch.bfloat16,
        is_fine,
        out.data_ptr(),
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        rows,
        width,
        eps,
    )
    return out
