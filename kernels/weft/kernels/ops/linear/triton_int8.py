"""Linear layers with int8 weights of channels on a GPU.

One or two rows are multiplied as they are by numbers that are widened in registers. More rows are
rounded to int8, each with a scale of its own, and multiplied on int8 tensor cores. Sums are exact,
so that a row's result does not depend on the other rows.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from weft.kernels.ops.activation.triton_activation import activate
from weft.kernels.ops.linear.gpu_common import check_operands, with_adapters
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.linear.triton_fp8_few_rows import MAX_ROWS, FewRows, few_rows
from weft.kernels.ops.linear.triton_groups_product import sum_parts
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.formats.quantised import INT8_MAX, Int8Channels
from weft.kernels.shared.launch_sizes import next_power_of_2

_LEAST_ROWS = 32
"""Fewer rows are padded with zeros to this number: `torch._int_mm` takes no fewer than 17."""
_MOST = tl.constexpr(INT8_MAX)


def linear(
    x: torch.Tensor,
    w: LinearWeight,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lora: LoraAddition | None = None,
) -> torch.Tensor:
    """`weft.kernels.ops.linear.linear` for int8 weights on a GPU; adapters read `x` before it is
    rounded.
    """
    matrix = _matrix_of(x, w, residual)
    return with_adapters(x, w, partial(_product, x, w, matrix), residual, out_dtype, lora)


def gate_up_silu(x: torch.Tensor, w: LinearWeight, lora: LoraAddition | None) -> torch.Tensor:
    """`weft.kernels.ops.linear.gate_up_silu` for int8 weights on a GPU."""
    return activate(linear(x, w, lora=lora), "silu", is_gated=True)


def _product(
    x: torch.Tensor,
    w: LinearWeight,
    matrix: Int8Channels,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows = x.shape[0]
    out = torch.empty((rows, w.out_features), dtype=dtype, device=x.device)
    if rows == 0:
        return out
    if rows <= MAX_ROWS and not w.is_fixed:
        few_rows(x, matrix, out, FewRows(w.bias, residual))
        return out
    data, scales = round_rows(x, max(rows, _LEAST_ROWS))
    sums = torch._int_mm(data, matrix.data.t())
    sum_parts(out, sums[None], w.bias, residual, (scales, matrix.scales))
    return out


def round_rows(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds rows to int8, so that the largest magnitude of each becomes INT8_MAX.

    Args:
        x: [M, K], contiguous, floats.
        count: Rows of the result, M or more.

    Returns:
        [count, K] int8, zeros after row M, and scales [count] float32.
    """
    rows, k = x.shape
    data = torch.empty((count, k), dtype=torch.int8, device=x.device)
    scales = torch.empty(count, dtype=torch.float32, device=x.device)
    _round_kernel[(count,)](
        data, scales, x, rows, K=k, TILE=min(4096, next_power_of_2(k)), num_warps=4,
        **launch_options(x.device),
    )  # fmt: skip
    return data, scales


@triton.jit(do_not_specialize=["rows"])
def _round_kernel(
    data: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    rows: int,
    K: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, TILE)
    length = tl.where(row < rows, K, 0)
    most = tl.zeros([TILE], tl.float32)
    for start in range(0, K, TILE):
        at = start + part
        values = tl.load(x + row * K + at, mask=at < length, other=0.0)
        most = tl.maximum(most, tl.abs(values.to(tl.float32)))
    largest = tl.max(most, axis=0)
    tl.store(scales + row, largest / _MOST)
    inverse = tl.where(largest > 1e-30, _MOST / largest, 0.0)
    for start in range(0, K, TILE):
        at = start + part
        values = tl.load(x + row * K + at, mask=at < length, other=0.0)
        # Halves are added away from 0, since a conversion to integers truncates.
        scaled = values.to(tl.float32) * inverse
        rounded = scaled + tl.where(scaled < 0, -0.5, 0.5)
        tl.store(data + row * K + at, rounded.to(tl.int8), mask=at < K)


def _matrix_of(x: torch.Tensor, w: LinearWeight, residual: torch.Tensor | None) -> Int8Channels:
    check_operands(x, w, residual)
    assert isinstance(w.form, Int8Channels)
    return w.form
