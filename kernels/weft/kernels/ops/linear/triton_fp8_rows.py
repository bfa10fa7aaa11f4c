"""Rows rounded to FP8 for products with FP8 weights on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.activation.triton_activation import silu_and
from weft.kernels.ops.linear.triton_fp8_weights import GROUP
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.formats.fp8 import FP8, FP8_MAX
from weft.kernels.shared.formats.quantised import FP8_GROUP
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

ROWS_OF_GROUPS = 16
"""Rows with scales by group are padded in memory to a multiple of this."""
_ELEMENTS_PER_WARP = 1024
_MAX = tl.constexpr(FP8_MAX)
_LEAST = tl.constexpr(1e-30)
"""Smallest divisor; rows whose largest magnitude is below it become zeros."""


class Fp8Rows(NamedTuple):
    """Rows in FP8 with their scales."""

    data: torch.Tensor
    """[M, K] float8_e4m3fn, M rounded up to ROWS_OF_GROUPS where groups have scales."""
    scales: torch.Tensor
    """[M] float32, or [K / FP8_GROUP, M] where each group of a row has one."""
    rows: int
    """M, without padding."""

    @property
    def has_groups(self) -> bool:
        """Whether each group of a row has a scale."""
        return self.scales.dim() == 2


def quantise_rows(x: torch.Tensor, *, has_groups: bool, is_gated: bool = False) -> Fp8Rows:
    """Rounds rows to FP8, so that the largest magnitude of a row, or of a group of it, becomes
    FP8_MAX.

    Args:
        x: [M, K], contiguous, 16-bit floats; M at least 1; where gated [M, 2 * K].
        has_groups: Whether groups of FP8_GROUP columns have scales of their own.
        is_gated: Whether to round silu of the first half times the second half.
    """
    rows, k = x.shape[0], x.shape[1] // 2 if is_gated else x.shape[1]
    groups = cdiv(k, FP8_GROUP)
    found = empty_rows(rows, k, x.device, has_groups=has_groups)
    block = next_power_of_2(groups)
    # Groups are independent of each other: more programs share a row of many.
    at_once = min(block, 8) if has_groups else block
    _fp8_rows_kernel[(rows, cdiv(groups, at_once))](
        found.data, found.scales, x, found.data.shape[0], groups, K=k, IS_GATED=is_gated,
        HAS_GROUPS=has_groups, GROUPS=at_once,
        num_warps=max(1, min(16, at_once * FP8_GROUP // _ELEMENTS_PER_WARP)),
        **launch_options(x.device),
    )  # fmt: skip
    return found


def empty_rows(rows: int, k: int, device: torch.device, *, has_groups: bool) -> Fp8Rows:
    """Memory for `rows` rows of `k` numbers, and their scales."""
    # torch's product of groups takes whole tiles of rows; the rows of padding are ignored.
    whole = cdiv(rows, ROWS_OF_GROUPS) * ROWS_OF_GROUPS if has_groups else rows
    data = torch.empty((whole, k), dtype=FP8, device=device)
    shape = (cdiv(k, FP8_GROUP), whole) if has_groups else (rows,)
    return Fp8Rows(data, torch.empty(shape, dtype=torch.float32, device=device), rows)


@triton.jit(do_not_specialize=["rows"])
def _fp8_rows_kernel(
    data: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    rows: int,
    groups: int,
    K: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = at < K
    if IS_GATED:
        gate = tl.load(x + row * 2 * K + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * K + K + at, mask=mask, other=0.0).to(tl.float32)
        values = silu_and(gate, up)
    else:
        values = tl.load(x + row * K + at, mask=mask, other=0.0).to(tl.float32)
    store_fp8_row(data, scales, values, row, rows, group, groups, at, mask, K, HAS_GROUPS)


@triton.jit
def store_fp8_row(
    data: tl.tensor,
    scales: tl.tensor,
    values: tl.tensor,
    row: tl.tensor,
    rows: int,
    group: tl.tensor,
    groups: int,
    at: tl.tensor,
    mask: tl.tensor,
    k: int,
    HAS_GROUPS: tl.constexpr,
) -> None:
    """Rounds `values` [GROUPS, GROUP] float32 of a row, zero beyond k, and stores them."""
    largest = tl.max(tl.abs(values), axis=1)
    if HAS_GROUPS:
        tl.store(scales + group.to(tl.int64) * rows + row, largest / _MAX, mask=group < groups)
        inverse = (1.0 / tl.maximum(largest, _LEAST))[:, None]
    else:
        most = tl.max(largest, axis=0)
        tl.store(scales + row, most / _MAX)
        inverse = 1.0 / tl.maximum(most, _LEAST)
    rounded = in_fp8(values, inverse, data.dtype.element_ty)
    tl.store(data + row * k + at, rounded, mask=mask)


@triton.jit
def in_fp8(values: tl.tensor, inverse: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Values in float32 as FP8, so that 1 / `inverse` becomes FP8_MAX."""
    return tl.clamp(values * inverse * _MAX, -_MAX, _MAX).to(dtype)


@triton.jit
def group_scale(largest: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """From the largest magnitude of a group its scale, and `inverse` of `in_fp8`."""
    return largest / _MAX, 1.0 / tl.maximum(largest, _LEAST)
