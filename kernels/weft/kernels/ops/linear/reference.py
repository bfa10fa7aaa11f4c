"""Linear layers in eager torch, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from weft.kernels.ops.linear.spec import LinearWeight, NativeForm, OneDnnForm, PlainForm


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`linear` in eager torch over the original weight, on any device."""
    out = F.linear(x, weight, bias)
    if residual is not None:
        out = out + residual
    return out if out_dtype is None else out.to(out_dtype)


def linear_in_torch(
    x: torch.Tensor,
    w: LinearWeight,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    match w.form:
        case OneDnnForm(data):
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, data, w.bias, "none", [], "")
            if residual is not None:
                out = out + residual
            return out if out_dtype is None else out.to(out_dtype)
        case PlainForm(data):
            return linear_reference(x, data, w.bias, residual, out_dtype)
        case NativeForm():
            raise AssertionError("panels are multiplied by the native operations")
    weight = w.form.dequantised(w.dtype)
    return linear_reference(x, weight, w.bias, residual, out_dtype)
