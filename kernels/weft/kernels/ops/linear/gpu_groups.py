"""Linear layers with weights of 4 bits in groups on a GPU.

One or two rows are multiplied as integers (`triton_groups_few_rows`). Up to MAX_OWN_ROWS are
multiplied by numbers that are unpacked in registers (`triton_groups_tensor_cores`, or
`triton_groups_product` for what that one does not take). For more rows the weight is unpacked to
floats for this product alone, and cuBLAS multiplies: that takes less time than unpacking for every
tile of rows.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from weft.kernels.ops.activation.triton_activation import activate
from weft.kernels.ops.linear.gpu_common import check_operands, with_adapters
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.linear.triton_groups_few_rows import can_take, multiply_few
from weft.kernels.ops.linear.triton_groups_product import (
    MAX_GATED_ROWS,
    multiply_groups,
    product_launch_config,
)
from weft.kernels.ops.linear.triton_groups_tensor_cores import can_multiply, multiply_wide
from weft.kernels.ops.linear.triton_groups_unpack import (
    GroupsTensors,
    groups_arguments,
    power_of_two,
    unpacked,
    unpacked_scaled,
)
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.shared.dependent_launch import (
    launch_options,
    release_next,
    wait_for_last,
)
from weft.kernels.shared.formats.packed_groups import LONG_HALF, PackedGroups

MAX_OWN_ROWS = 256
"""Most rows that are multiplied by numbers unpacked in registers."""
_ROWS_AT_ONCE = 16
"""Rows of the weight that a program unpacks."""


def linear(
    x: torch.Tensor,
    w: LinearWeight,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lora: LoraAddition | None = None,
) -> torch.Tensor:
    """`weft.kernels.ops.linear.linear` for weights in groups on a GPU."""
    matrix = _matrix_of(x, w, residual)
    product = partial(_product, _in_order(x, matrix), w, matrix)
    return with_adapters(x, w, product, residual, out_dtype, lora)


def gate_up_silu(x: torch.Tensor, w: LinearWeight, lora: LoraAddition | None) -> torch.Tensor:
    """`weft.kernels.ops.linear.gate_up_silu` for weights in groups on a GPU."""
    matrix = _matrix_of(x, w, None)
    is_short = matrix.half != LONG_HALF or can_multiply(x, matrix, is_gated=True)
    most = MAX_OWN_ROWS if is_short else MAX_GATED_ROWS
    if lora is not None or w.is_fixed or not 0 < x.shape[0] <= most:
        return activate(linear(x, w, lora=lora), "silu", is_gated=True)
    out = torch.empty((x.shape[0], w.out_features // 2), dtype=x.dtype, device=x.device)
    _multiply(out, _in_order(x, matrix), w, matrix, None, is_gated=True)
    return out


def _in_order(x: torch.Tensor, matrix: PackedGroups) -> torch.Tensor:
    """x with its columns in the matrix's order; adapters read x itself."""
    return x if matrix.order is None else x.index_select(1, matrix.order)


def _is_own(rows: int, w: LinearWeight) -> bool:
    """Whether numbers are unpacked in registers. These sums have another order, so that `is_fixed`
    rules it out.
    """
    return rows > 0 and (rows <= MAX_OWN_ROWS or w.is_fixed)


def _product(
    x: torch.Tensor,
    w: LinearWeight,
    matrix: PackedGroups,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows, columns = x.shape[0], w.out_features
    if _is_own(rows, w):
        out = torch.empty((rows, columns), dtype=dtype, device=x.device)
        _multiply(out, x, w, matrix, residual, is_gated=False)
        return out
    wide = in_floats(matrix, x.dtype).t()
    out = torch.mm(x, wide) if dtype == x.dtype else torch.mm(x, wide, out_dtype=dtype)
    for term in (w.bias, residual):
        if term is not None:
            out += term
    return out


def _multiply(
    out: torch.Tensor,
    x: torch.Tensor,
    w: LinearWeight,
    matrix: PackedGroups,
    residual: torch.Tensor | None,
    *,
    is_gated: bool,
) -> None:
    if can_take(x) and not w.is_fixed:
        multiply_few(out, x, matrix, bias=w.bias, residual=residual, is_gated=is_gated)
    elif can_multiply(x, matrix, is_gated=is_gated) and not w.is_fixed:
        multiply_wide(out, x, matrix, bias=w.bias, residual=residual, is_gated=is_gated)
    else:
        shape = product_launch_config(
            x.shape[0], out.shape[1], matrix.half, is_gated=is_gated, is_fixed=w.is_fixed
        )
        multiply_groups(out, x, matrix, shape, bias=w.bias, residual=residual, is_gated=is_gated)


def in_floats(matrix: PackedGroups, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in 16-bit floats, [N, K], rounded once; one launch."""
    (rows, columns), device = matrix.shape, matrix.data.device
    out = torch.empty((rows, columns), dtype=dtype, device=device)
    grid = (triton.cdiv(columns, 2 * matrix.half), triton.cdiv(rows, _ROWS_AT_ONCE))
    _in_floats_kernel[grid](
        out,
        rows=rows,
        columns=columns,
        stride=matrix.data.shape[1],
        **groups_arguments(matrix),
        ROWS=_ROWS_AT_ONCE,
        num_warps=4,
        **launch_options(device),
    )
    return out


@triton.jit
def _in_floats_kernel(
    out: tl.tensor,
    weight: GroupsTensors,
    rows: int,
    columns: int,
    width: int,
    stride: int,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """ROWS rows of a block of columns."""
    release_next()
    wait_for_last()
    HALF: tl.constexpr = FORM.half
    scales, offsets = weight.scales, weight.offsets
    block = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    last = tl.minimum(row, rows - 1)
    part = tl.arange(0, HALF)
    tile = tl.load(weight.data + last.to(tl.int64)[:, None] * stride + block * HALF + part[None, :])
    group = block * (2 * HALF // FORM.unit)
    at_scale = group * width + last
    column = block * 2 * HALF + part
    at = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    is_row = (row < rows)[:, None]
    is_in = is_row & (column + HALF < columns)[None, :]
    if weight.factors is not None:
        factor = tl.load(weight.factors + last)[:, None]
        words = tl.load(scales + at_scale)
        lower, upper = unpacked_scaled(tile, words, out.dtype.element_ty)
        wide = (lower.to(tl.float32) * factor).to(out.dtype.element_ty)
        tl.store(at, wide, mask=is_row & (column < columns)[None, :])
        wide = (upper.to(tl.float32) * factor).to(out.dtype.element_ty)
        tl.store(at + HALF, wide, mask=is_in)
        return
    lower, upper = unpacked(tile, out.dtype.element_ty, FORM.is_e2m1)
    wide = _scaled(lower, scales, offsets, at_scale, FORM.is_e2m1)
    tl.store(at, wide.to(out.dtype.element_ty), mask=is_row & (column < columns)[None, :])
    if FORM.unit == HALF:
        at_scale += width
    wide = _scaled(upper, scales, offsets, at_scale, FORM.is_e2m1)
    tl.store(at + HALF, wide.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _scaled(
    numbers: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    at: tl.tensor,
    IS_E2M1: tl.constexpr,
) -> tl.tensor:
    scale = tl.load(scales + at)
    if IS_E2M1:
        scale = power_of_two(scale)
    scale = scale.to(tl.float32)
    wide = numbers.to(tl.float32)
    if offsets is not None:
        wide = (wide + 8.0) * scale[:, None] + tl.load(offsets + at).to(tl.float32)[:, None]
    else:
        wide *= scale[:, None]
    return wide


def _matrix_of(x: torch.Tensor, w: LinearWeight, residual: torch.Tensor | None) -> PackedGroups:
    check_operands(x, w, residual)
    assert isinstance(w.form, PackedGroups)
    return w.form
