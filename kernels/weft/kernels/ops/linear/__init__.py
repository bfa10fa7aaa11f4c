"""Linear layers over weights that are packed once at load."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.linear.cpu import native_linear
from weft.kernels.ops.linear.reference import linear_in_torch
from weft.kernels.ops.linear.spec import LinearWeight, NativeForm, PlainForm
from weft.kernels.ops.lora import add_lora
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.ops.norm import rms_norm
from weft.kernels.shared.deferred import deferred
from weft.kernels.shared.formats.packed_groups import PackedGroups
from weft.kernels.shared.formats.quantised import Fp8Blocks, Fp8Channels, Int8Channels

if TYPE_CHECKING:
    from weft.kernels.ops.linear import gpu as _gpu
    from weft.kernels.ops.linear import gpu_fp8 as _gpu_fp8
    from weft.kernels.ops.linear import gpu_groups as _gpu_groups
    from weft.kernels.ops.linear import triton_int8 as _triton_int8
else:
    _gpu = deferred(__name__, "weft.kernels.ops.linear.gpu")
    _gpu_fp8 = deferred(__name__, "weft.kernels.ops.linear.gpu_fp8")
    _gpu_groups = deferred(__name__, "weft.kernels.ops.linear.gpu_groups")
    _triton_int8 = deferred(__name__, "weft.kernels.ops.linear.triton_int8")


def linear(
    x: torch.Tensor,
    w: LinearWeight,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lora: LoraAddition | None = None,
) -> torch.Tensor:
    """x @ weight^T + bias + residual, and what adapters add.

    Args:
        x: [M, K], contiguous, the weight's dtype; M may be 0.
        residual: [M, N], contiguous, dtype of `x`; not changed.
        out_dtype: dtype of the result: that of `x` (default) or float32 (for logits).

    Returns:
        [M, N], accumulated in float32. The native form rounds once, and a row's result does not
        depend on the other rows. Other forms round what adapters add separately.
    """
    if isinstance(w.form, NativeForm):
        return native_linear(x, w, residual, out_dtype, lora)
    if (products := _on_gpu(w)) is not None:
        result: torch.Tensor = products.linear(x, w, residual, out_dtype, lora)
        return result
    out = linear_in_torch(x, w, residual, out_dtype)
    if lora is not None:
        add_lora(out, x, lora)
    return out


def gate_up_silu(
    x: torch.Tensor, w: LinearWeight, lora: LoraAddition | None = None
) -> torch.Tensor:
    """silu(x @ gate^T) * (x @ up^T), or another gating of the two, in one operation.

    Args:
        x: [M, K], contiguous, the weight's dtype; M may be 0.
        lora: What the adapters of these M tokens add before the activation, or None.

    Returns:
        [M, I], dtype of `x`.
    """
    if isinstance(w.form, NativeForm):
        return native_linear(x, w, None, None, lora)
    if (products := _on_gpu(w)) is not None:
        result: torch.Tensor = products.gate_up_silu(x, w, lora)
        return result
    both = linear_in_torch(x, w)
    if lora is not None:
        add_lora(both, x, lora)
    return w.gating.of(both)


def _on_gpu(w: LinearWeight) -> ModuleType | None:
    """The products of a GPU for weights in this form; None: there are none, or it is on a CPU."""
    match w.form:
        case PlainForm(data) if data.is_cuda:
            return _gpu
        case Fp8Channels(data) | Fp8Blocks(data) if data.is_cuda:
            return _gpu_fp8
        case PackedGroups():
            return _gpu_groups
        case Int8Channels(data) if data.is_cuda:
            return _triton_int8
    return None


def normed_linear(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    w: LinearWeight,
    out_dtype: torch.dtype | None = None,
    lora: LoraAddition | None = None,
) -> torch.Tensor:
    """`linear` of the RMS norm of `x`, or `gate_up_silu` of it where `w` is of a gated pair.

    Args:
        x: [M, K], contiguous, the weight's dtype.
        gain: [K]: weight of the norm.
        out_dtype: dtype of the result: that of `x` (default) or float32; None where gated.

    Returns:
        [M, N], or [M, I] where gated. On a GPU the product of a small input computes the norm in
        the same launch and does not round it.
    """
    if x.is_cuda and _gpu.supports_norm(x.shape[0], w, lora):
        return _gpu.normed_linear(x, gain, eps, w, out_dtype, lora)
    normed = rms_norm(x, gain, eps)
    if w.gated:
        return gate_up_silu(normed, w, lora)
    return linear(normed, w, out_dtype=out_dtype, lora=lora)
