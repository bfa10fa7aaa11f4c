"""Linear layers with FP8 weights on a GPU.

Few rows are multiplied as they are by weights that are widened in registers; how many are few
depends on the weight. More rows are rounded to FP8 first. Each row has a scale, or each group of
128 of its columns has one if the weight's scales are in blocks. In deterministic mode rows are
always rounded, and all products take one tile shape.

Our own kernels round a result once. Where torch is faster, the result is rounded after the product,
after the bias and after the residual.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from weft.kernels.ops.activation.triton_activation import activate
from weft.kernels.ops.linear.gpu_common import check_operands, with_adapters
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.linear.triton_fp8_few_rows import MAX_ROWS, FewRows, can_take_norm, few_rows
from weft.kernels.ops.linear.triton_fp8_rows import Fp8Rows, quantise_rows
from weft.kernels.ops.linear.triton_fp8_tiles import FIXED, multiply_fp8
from weft.kernels.ops.linear.triton_streamed import multiply_streamed, streamed_rows
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.ops.lora.triton_rows import NormOfRows
from weft.kernels.shared.formats.quantised import FP8_GROUP, Fp8Blocks, Fp8Channels, Fp8Matrix

MAX_OWN_ROWS = 256
"""Most rows for which our own kernel is faster than torch, with weights whose scales are of
channels (measured on an H100).
"""
_OWN_BLOCKS = ((16, 8192), (64, 4096))
"""Most rows and columns for which our own kernel is faster than torch, with weights whose scales
are of blocks (measured on an H100).
"""


def linear(
    x: torch.Tensor,
    w: LinearWeight,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lora: LoraAddition | None = None,
) -> torch.Tensor:
    """`weft.kernels.ops.linear.linear` for FP8 weights on a GPU; adapters read `x` before it is
    rounded.
    """
    check_operands(x, w, residual)
    return with_adapters(x, w, partial(_product, x, w), residual, out_dtype, lora)


def _product(
    x: torch.Tensor, w: LinearWeight, residual: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    rows, matrix = x.shape[0], matrix_of(w)
    if rounds_rows(rows, w):
        return _multiply_rounded(_rounded(x, w), matrix, w.bias, residual, dtype)
    out = torch.empty((rows, w.out_features), dtype=dtype, device=x.device)
    if rows == 0:
        return out
    if w.is_fixed:
        multiply_fp8(_rounded(x, w), matrix, out, w.bias, residual, launch=FIXED)
    else:
        _multiply_few(x, w, out, FewRows(w.bias, residual))
    return out


def _multiply_few(x: torch.Tensor, w: LinearWeight, out: torch.Tensor, given: FewRows) -> None:
    """For rows that are not rounded."""
    if _is_streamed(x.shape[0], w):
        multiply_streamed(x, matrix_of(w), out, given)
    else:
        few_rows(x, matrix_of(w), out, given)


def _is_streamed(rows: int, w: LinearWeight) -> bool:
    return rows in streamed_rows(matrix_of(w), w.dtype, is_gated=w.gated)


def gate_up_silu(x: torch.Tensor, w: LinearWeight, lora: LoraAddition | None) -> torch.Tensor:
    """`weft.kernels.ops.linear.gate_up_silu` for FP8 weights on a GPU."""
    check_operands(x, w, None)
    rows, matrix = x.shape[0], matrix_of(w)
    is_apart = w.is_fixed or lora is not None or not _is_activated_within(rows, matrix)
    if rows == 0 or is_apart:
        return activate(linear(x, w, lora=lora), "silu", is_gated=True)
    if rows > MAX_ROWS:
        return _gated(_rounded(x, w), w, x.dtype)
    out = torch.empty((rows, w.out_features // 2), dtype=x.dtype, device=x.device)
    _multiply_few(x, w, out, FewRows(w.bias, is_gated=True))
    return out


def _gated(x: Fp8Rows, w: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty((x.rows, w.out_features // 2), dtype=dtype, device=x.data.device)
    multiply_fp8(x, matrix_of(w), out, w.bias, None, is_gated=True)
    return out


def rounded_linear(x: Fp8Rows, w: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
    """`linear` without adapters, for rows that have been rounded for such a weight
    (`rounds_rows`).
    """
    return _multiply_rounded(x, matrix_of(w), w.bias, None, dtype)


def gated_mlp(
    x: torch.Tensor,
    gate_up: LinearWeight,
    down: LinearWeight,
    lora: LoraAddition | None = None,
    rounded: Fp8Rows | None = None,
) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) for so many rows that gate and up round them. `lora` is added to
    gate and up.

    If down rounds its rows too, the activation does it, and its result is kept in FP8 alone.
    `rounded` are the rows of x if they have been rounded already; not with adapters.
    """
    check_operands(x, gate_up, None)
    rows = x.shape[0]
    if lora is None:
        rounded = _rounded(x, gate_up) if rounded is None else rounded
        if _is_activated_within(rows, matrix_of(gate_up)):
            return _product(_gated(rounded, gate_up, x.dtype), down, None, x.dtype)
        both = rounded_linear(rounded, gate_up, x.dtype)
    else:
        both = linear(x, gate_up, lora=lora)
    if not rounds_rows(rows, down):
        return _product(activate(both, "silu", is_gated=True), down, None, x.dtype)
    inner = quantise_rows(both, has_groups=has_groups(down), is_gated=True)
    return _multiply_rounded(inner, matrix_of(down), down.bias, None, x.dtype)


def _is_activated_within(rows: int, matrix: Fp8Matrix) -> bool:
    return rows <= MAX_ROWS or (isinstance(matrix, Fp8Channels) and rows <= MAX_OWN_ROWS)


def rounds_rows(rows: int, w: LinearWeight) -> bool:
    """Whether a product multiplies rounded rows with the tiles that suit their number. In
    deterministic mode it does not: it rounds any number of rows, for the tile `FIXED`.
    """
    return may_round(rows, w) and not _is_streamed(rows, w)


def may_round(rows: int, w: LinearWeight) -> bool:
    """Whether some products of so many rows with weights of this format round them."""
    return rows > MAX_ROWS and not w.is_fixed and isinstance(w.form, Fp8Channels | Fp8Blocks)


def has_groups(w: LinearWeight) -> bool:
    """Whether rows for such a weight have a scale for each group of columns."""
    return isinstance(w.form, Fp8Blocks)


def supports_norm(rows: int, w: LinearWeight, lora: LoraAddition | None) -> bool:
    return lora is None and not w.is_fixed and can_take_norm(rows, w.in_features)


def normed_linear(
    x: torch.Tensor, norm: NormOfRows, w: LinearWeight, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """`weft.kernels.ops.linear.gpu.normed_linear`, in one launch."""
    check_operands(x, w, None)
    columns = w.out_features // 2 if w.gated else w.out_features
    out = torch.empty((x.shape[0], columns), dtype=out_dtype or x.dtype, device=x.device)
    few_rows(x, matrix_of(w), out, FewRows(w.bias, None, w.gated, norm))
    return out


def add_product(
    stream: torch.Tensor, x: torch.Tensor, w: LinearWeight, tap: torch.Tensor | None
) -> None:
    """`weft.kernels.ops.linear.gpu.add_product`, in one launch."""
    check_operands(x, w, stream)
    _multiply_few(x, w, stream, FewRows(w.bias, stream, tap=tap))


def matrix_of(w: LinearWeight) -> Fp8Matrix:
    assert isinstance(w.form, Fp8Channels | Fp8Blocks)
    return w.form


def _rounded(x: torch.Tensor, w: LinearWeight) -> Fp8Rows:
    return quantise_rows(x, has_groups=has_groups(w))


def _multiply_rounded(
    x: Fp8Rows,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    if dtype == torch.bfloat16 and is_faster_in_torch(x.rows, matrix):
        out = torch_product(x, matrix)
        for term in (bias, residual):
            if term is not None:
                out += term
        return out
    out = torch.empty((x.rows, matrix.shape[0]), dtype=dtype, device=x.data.device)
    multiply_fp8(x, matrix, out, bias, residual)
    return out


def is_faster_in_torch(rows: int, matrix: Fp8Matrix) -> bool:
    """Whether torch can multiply so many rounded rows, and is faster than our own kernel."""
    if isinstance(matrix, Fp8Channels):
        return rows > MAX_OWN_ROWS and not any(size % 16 for size in matrix.shape)
    columns, k = matrix.shape
    if any(rows <= most_rows and columns <= most for most_rows, most in _OWN_BLOCKS):
        return False
    # cuBLAS reads the scales of 4 blocks along K at once.
    return matrix.rows == FP8_GROUP and not columns % FP8_GROUP and not k % (4 * FP8_GROUP)


def torch_product(x: Fp8Rows, matrix: Fp8Matrix) -> torch.Tensor:
    """[M, N] bfloat16: the product by cuBLAS."""
    weight = matrix.data.t()
    if isinstance(matrix, Fp8Channels):
        return torch._scaled_mm(
            x.data,
            weight,
            x.scales[:, None],
            matrix.scales[None, :],
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    recipes = (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    scales = (x.scales.t(), matrix.scales.t())
    found = F.scaled_mm(x.data, weight, scales[0], recipes[0], scales[1], recipes[1])
    return found[: x.rows]
