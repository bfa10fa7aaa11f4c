"""Linear layers on a GPU: our own kernels for few rows, cuBLAS for more."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from weft.kernels.ops.activation.triton_activation import activate
from weft.kernels.ops.linear import gpu_fp8 as fp8_linear
from weft.kernels.ops.linear.gpu_common import check_operands, with_adapters
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.linear.triton_fixed import fixed_linear
from weft.kernels.ops.linear.triton_fp8_few_rows import FewRows
from weft.kernels.ops.linear.triton_sliced import MAX_ROWS
from weft.kernels.ops.linear.triton_small import (
    MAX_SPREAD_ROWS,
    can_take_norm,
    columns_at_once,
    small_linear,
)
from weft.kernels.ops.linear.triton_streamed import multiply_streamed, streamed_rows
from weft.kernels.ops.linear.triton_tiled import is_faster, tiled_linear
from weft.kernels.ops.lora.checks import check_addition
from weft.kernels.ops.lora.gpu import Ranks
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.ops.lora.triton_fold import Folded
from weft.kernels.ops.lora.triton_product import added_within, can_add_within
from weft.kernels.ops.lora.triton_rows import NormOfRows
from weft.kernels.shared.formats.quantised import Fp8Blocks, Fp8Channels

_SMALL_WEIGHT = 1 << 23
"""Elements of a weight up to which cuBLAS is slower at 3 to 16 rows too (measured on an H200)."""


def linear(
    x: torch.Tensor,
    w: LinearWeight,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lora: LoraAddition | None = None,
) -> torch.Tensor:
    """`weft.kernels.ops.linear.linear` for weights in floats on a GPU.

    A float32 result of a narrower input is never rounded to the narrow dtype in between.
    """
    check_operands(x, w, residual)
    if lora is not None and not w.is_fixed and _adds_within(x.shape[0], w.data, lora):
        check_addition((x.shape[0], w.out_features), x.shape, x.dtype, lora)
        added = added_within(x, lora)
        return small_linear(x, w.data, w.bias, residual, out_dtype or x.dtype, added=added)
    if lora is None:
        return _product(x, w, residual, out_dtype or x.dtype)
    return with_adapters(x, w, partial(_product, x, w), residual, out_dtype, lora)


def _product(
    x: torch.Tensor, w: LinearWeight, residual: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    weight, bias = w.data, w.bias
    if w.is_fixed:
        return fixed_linear(x, weight, bias, residual, dtype)
    if _is_small(x, weight):
        return small_linear(x, weight, bias, residual, dtype)
    if x.shape[0] in streamed_rows(weight, x.dtype, is_gated=False):
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
        multiply_streamed(x, weight, out, FewRows(bias, residual))
        return out
    if dtype != x.dtype:
        out = torch.mm(x, weight.t(), out_dtype=dtype)
        for term in (bias, residual):
            if term is not None:
                out += term
        return out
    if residual is None:
        if is_faster(x.shape[0], weight, gated=False):
            return tiled_linear(x, weight, bias, gated=False)
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.addmm(residual, x, weight.t())
    return F.linear(x, weight, bias).add_(residual)


def supports_norm(rows: int, w: LinearWeight, lora: LoraAddition | None = None) -> bool:
    """Whether products of so many rows compute the norm of their input themselves."""
    if _is_fp8(w):
        return fp8_linear.supports_norm(rows, w, lora)
    is_small = w.data.dtype.itemsize == 2 and w.data.is_contiguous() and not w.is_fixed
    if not is_small or not can_take_norm(rows, w.in_features):
        return False
    return lora is None or _adds_within(rows, w.data, lora, is_gated=w.gated)


def normed_linear(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    w: LinearWeight,
    out_dtype: torch.dtype | None = None,
    lora: LoraAddition | None = None,
) -> torch.Tensor:
    """`weft.kernels.ops.linear.normed_linear` where `supports_norm` holds, in one launch; in two
    with adapters.
    """
    if gain.shape != x.shape[1:] or gain.dtype != x.dtype:
        raise ValueError(f"norm {tuple(gain.shape)} {gain.dtype} does not fit {tuple(x.shape)}")
    if lora is not None:
        check_addition((x.shape[0], w.out_features), x.shape, x.dtype, lora)
    norm = NormOfRows(gain, eps)
    if _is_fp8(w):
        return fp8_linear.normed_linear(x, norm, w, out_dtype)
    check_operands(x, w, None)
    added = None if lora is None else added_within(x, lora, norm)
    dtype = out_dtype or x.dtype
    return small_linear(x, w.data, w.bias, None, dtype, gated=w.gated, norm=norm, added=added)


def add_product(
    stream: torch.Tensor,
    x: torch.Tensor,
    w: LinearWeight,
    lora: LoraAddition | None = None,
    tap: torch.Tensor | None = None,
) -> None:
    """Adds x @ weight^T + bias to `stream` in one launch; in two with adapters.

    Args:
        stream: [M, N], contiguous, dtype of `x`.
        x: [M, K], contiguous, few enough rows for a product without tensor cores.
        lora: What adapters add as well, where `adds_within` holds; or None.
        tap: [M, N] with rows of any stride: receives the sum as well; or None.
    """
    if _is_fp8(w):
        fp8_linear.add_product(stream, x, w, tap)
        return
    check_operands(x, w, stream)
    if lora is not None:
        check_addition(stream.shape, x.shape, x.dtype, lora)
    added = None if lora is None else added_within(x, lora)
    small_linear(x, w.data, w.bias, stream, stream.dtype, out=stream, tap=tap, added=added)


def adds_within(rows: int, w: LinearWeight, lora: LoraAddition | None) -> bool:
    """Whether a product of so many rows can add what adapters add in its own launch, after one
    launch for their ranks. True if adapters add nothing.
    """
    if lora is None:
        return True
    if w.is_fixed or _is_fp8(w):
        return False
    return _adds_within(rows, w.data, lora, is_gated=w.gated)


def _is_fp8(w: LinearWeight) -> bool:
    return isinstance(w.form, Fp8Channels | Fp8Blocks)


def _adds_within(
    rows: int, weight: torch.Tensor, lora: LoraAddition, *, is_gated: bool = False
) -> bool:
    (n, k), is_narrow = weight.shape, weight.dtype.itemsize == 2
    if weight.numel() > _SMALL_WEIGHT or not (is_narrow and weight.is_contiguous()):
        return False
    columns = n // 2 if is_gated else n
    return can_add_within(rows, columns_at_once(rows, columns, k, is_gated=is_gated), lora)


def linear_to_fold(
    x: torch.Tensor, w: LinearWeight, lora: LoraAddition
) -> tuple[torch.Tensor, Folded | None]:
    """`linear` for at most MAX_FOLDED_ROWS rows, and what adapters still add to its result, or
    None.
    """
    check_operands(x, w, None)
    if _adds_within(x.shape[0], w.data, lora):
        return small_linear(x, w.data, w.bias, None, x.dtype, added=added_within(x, lora)), None
    ranks = Ranks(x, lora, is_ahead=True, is_folded=True)
    return _product(x, w, None, x.dtype), ranks.folded()


def gate_up_silu(x: torch.Tensor, w: LinearWeight, lora: LoraAddition | None) -> torch.Tensor:
    """`weft.kernels.ops.linear.gate_up_silu` for weights in floats on a GPU.

    For up to MAX_ROWS rows, the same kernel computes the product with and without adapters in the
    step.
    """
    if w.is_fixed:
        return activate(linear(x, w, lora=lora), "silu", is_gated=True)
    if lora is not None:
        check_addition((x.shape[0], w.out_features), x.shape, x.dtype, lora)
    return gate_up_silu_to_fold(x, w, lora, None)[0]


def gate_up_silu_to_fold(
    x: torch.Tensor, w: LinearWeight, lora: LoraAddition | None, down: LoraAddition | None
) -> tuple[torch.Tensor, Folded | None]:
    """`gate_up_silu`, and what adapters add to the product of its result with down; None if that
    was not computed.
    """
    check_operands(x, w, None)
    weight, bias = w.data, w.bias
    if lora is not None and _adds_within(x.shape[0], weight, lora, is_gated=True):
        within = added_within(x, lora)
        return small_linear(x, weight, bias, None, x.dtype, gated=True, added=within), None
    ranks = None if lora is None else Ranks(x, lora, down)
    if _is_small(x, weight):
        added = None
        if lora is not None and ranks is not None:
            is_whole = sum(part.out_features for part in lora.parts) == weight.shape[0]
            make = x.new_empty if is_whole else x.new_zeros
            added = make((x.shape[0], weight.shape[0]), dtype=torch.float32)
            ranks.add_to(added, is_new=is_whole)
        return small_linear(x, weight, bias, added, x.dtype, gated=True), None
    if ranks is None and is_faster(x.shape[0], weight, gated=True):
        return tiled_linear(x, weight, bias, gated=True), None
    both = F.linear(x, weight, bias)
    if ranks is not None:
        found = ranks.silu_of(both)
        if found is not None:
            return found
        ranks.add_to(both)
    return activate(both, "silu", is_gated=True), None


def _is_small(x: torch.Tensor, weight: torch.Tensor) -> bool:
    rows = x.shape[0]
    max_rows = MAX_ROWS if weight.numel() <= _SMALL_WEIGHT else MAX_SPREAD_ROWS
    return 0 < rows <= max_rows and x.dtype.itemsize == 2 and weight.is_contiguous()
