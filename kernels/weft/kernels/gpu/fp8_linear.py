"""Linear layers with FP8 weights on a GPU.

Few rows are multiplied as they are by weights that are widened in registers; more rows are rounded
to FP8 first, each with a scale of its own, or each group of 128 of its columns where the weight's
scales lie in blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.kernels.gpu.activation import silu_and_mul
from weft.kernels.gpu.fp8_few_rows import FewRows, can_take_norm, few_rows
from weft.kernels.gpu.fp8_rows import Fp8Rows, quantise_rows
from weft.kernels.gpu.fp8_tiles import multiply_fp8
from weft.kernels.gpu.lora import Ranks
from weft.kernels.gpu.lora_rows import NormOfRows
from weft.kernels.lora import LoraAddition, check_addition
from weft.kernels.quantised import Fp8Blocks, Fp8Channels, Fp8Matrix

if TYPE_CHECKING:
    from weft.kernels.linear import LinearWeight

MAX_FEW_ROWS = 16
"""Most rows that are multiplied as they are."""


def linear(
    x: torch.Tensor,
    w: LinearWeight,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lora: LoraAddition | None = None,
) -> torch.Tensor:
    """`weft.kernels.linear.linear` for FP8 weights on a GPU; what adapters add is computed of `x`
    as it is.
    """
    _check(x, w, residual)
    if lora is not None:
        check_addition((x.shape[0], w.out_features), x.shape, x.dtype, lora)
    out = torch.empty((x.shape[0], w.out_features), dtype=out_dtype or x.dtype, device=x.device)
    ranks = None if lora is None else Ranks(x, lora, is_ahead=True)
    _multiply(x, w, out, FewRows(w.bias, residual))
    if ranks is not None:
        ranks.add_to(out)
    return out


def gate_up_silu(x: torch.Tensor, w: LinearWeight, lora: LoraAddition | None) -> torch.Tensor:
    """`weft.kernels.linear.gate_up_silu` for FP8 weights on a GPU."""
    _check(x, w, None)
    if lora is None and 0 < x.shape[0] <= MAX_FEW_ROWS:
        out = torch.empty((x.shape[0], w.out_features // 2), dtype=x.dtype, device=x.device)
        few_rows(x, matrix_of(w), out, FewRows(w.bias, is_gated=True))
        return out
    return silu_and_mul(linear(x, w, lora=lora))


def gated_mlp(
    x: torch.Tensor, gate_up: LinearWeight, down: LinearWeight, lora: LoraAddition | None = None
) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) of more than MAX_FEW_ROWS; `lora`: to gate and up.

    The activation rounds its result, which is then not kept in other floats.
    """
    both = linear(x, gate_up, lora=lora)
    matrix = matrix_of(down)
    inner = quantise_rows(both, has_groups=isinstance(matrix, Fp8Blocks), is_gated=True)
    out = torch.empty((x.shape[0], down.out_features), dtype=x.dtype, device=x.device)
    _multiply_rounded(inner, matrix, out, down.bias, None)
    return out


def rounds_rows(rows: int, w: LinearWeight) -> bool:
    """Whether products of so many rows round them."""
    return rows > MAX_FEW_ROWS and isinstance(w.form, Fp8Channels | Fp8Blocks)


def takes_norm(rows: int, w: LinearWeight, lora: LoraAddition | None) -> bool:
    """See `weft.kernels.gpu.linear.takes_norm`."""
    return lora is None and can_take_norm(rows, w.in_features)


def normed_linear(
    x: torch.Tensor, norm: NormOfRows, w: LinearWeight, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """`weft.kernels.gpu.linear.normed_linear`, in one launch."""
    _check(x, w, None)
    columns = w.out_features // 2 if w.gated else w.out_features
    out = torch.empty((x.shape[0], columns), dtype=out_dtype or x.dtype, device=x.device)
    few_rows(x, matrix_of(w), out, FewRows(w.bias, None, w.gated, norm))
    return out


def add_product(
    stream: torch.Tensor, x: torch.Tensor, w: LinearWeight, tap: torch.Tensor | None
) -> None:
    """`weft.kernels.gpu.linear.add_product`, in one launch."""
    _check(x, w, stream)
    few_rows(x, matrix_of(w), stream, FewRows(w.bias, stream, tap=tap))


def matrix_of(w: LinearWeight) -> Fp8Matrix:
    """The weight of a layer in FP8."""
    assert isinstance(w.form, Fp8Channels | Fp8Blocks)
    return w.form


def _multiply(x: torch.Tensor, w: LinearWeight, out: torch.Tensor, given: FewRows) -> None:
    rows, matrix = x.shape[0], matrix_of(w)
    if rows == 0:
        return
    if rows <= MAX_FEW_ROWS:
        few_rows(x, matrix, out, given)
        return
    rounded = quantise_rows(x, has_groups=isinstance(matrix, Fp8Blocks))
    _multiply_rounded(rounded, matrix, out, given.bias, given.residual)


def _multiply_rounded(
    x: Fp8Rows,
    matrix: Fp8Matrix,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    multiply_fp8(x, matrix, out, bias, residual)


def _check(x: torch.Tensor, w: LinearWeight, residual: torch.Tensor | None) -> None:
    if x.shape[1] != w.in_features or x.dtype != w.dtype or not x.is_contiguous():
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} contiguous={x.is_contiguous()} does not fit FP8 weights "
            f"of {w.in_features} columns in a {w.dtype} layer"
        )
    if residual is not None and (
        residual.shape != (x.shape[0], w.out_features) or not residual.is_contiguous()
    ):
        raise ValueError(f"residual {tuple(residual.shape)} does not fit, or is not contiguous")
