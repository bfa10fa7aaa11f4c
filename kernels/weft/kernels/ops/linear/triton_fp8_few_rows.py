"""Products of one or two rows with FP8 or int8 weights on a GPU. Reading the weight is the limit:
each program streams its part and widens it in registers. Rows are not rounded, and a row's result
does not depend on the other row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_epilogue import residual_of, store_product
from weft.kernels.ops.linear.triton_fp8_weights import GROUP, WeightScales
from weft.kernels.ops.lora.triton_rows import NormOfRows
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.formats.quantised import FP8_GROUP, Fp8Matrix, Int8Channels
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2
from weft.kernels.shared.sm90 import on_sm90

MAX_ROWS = 2
"""Most rows; from three on, rounded rows and tensor cores are faster."""
_MAX_NORMED_ELEMENTS = 1152
"""Most elements of the rows for which a product computes the norm itself, as in
`weft.kernels.ops.linear.triton_small`.
"""


class SpreadLaunchConfig(NamedTuple):
    """How a program of the multiplication without tensor cores covers its part of the weight."""

    columns: int
    """Output columns of a program: a power of two, at most the rows of a block of scales."""
    groups: int
    """Groups of K taken at once, a power of two."""
    warps: int


class FewRows(NamedTuple):
    """Optional operands of a product, as `small_linear` has them."""

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    is_gated: bool = False
    norm: NormOfRows | None = None
    tap: torch.Tensor | None = None


def spread_launch_config(
    columns: int, k: int, *, is_gated: bool, is_blocks: bool
) -> SpreadLaunchConfig:
    """The launch of a product (measured on an H100 with Llama-3.1-8B's products, whole and divided
    between two ranks).
    """
    groups = next_power_of_2(cdiv(k, FP8_GROUP))
    if groups <= 8:
        return SpreadLaunchConfig(4, groups, warps=2 if groups <= 4 else 4)
    if k <= _MAX_NORMED_ELEMENTS:
        return SpreadLaunchConfig(4, groups, 4)  # A norm takes all of K at once.
    is_long = k > 8192
    if is_blocks:
        return SpreadLaunchConfig(4, 8, 2) if is_long else SpreadLaunchConfig(8, 8, 4)
    if is_long:
        return SpreadLaunchConfig(8, 16, 8)
    if is_gated:
        return SpreadLaunchConfig(2, min(groups, 32), 4)
    if groups <= 16:
        return SpreadLaunchConfig(4, groups, 4)
    if k > 4096:
        return SpreadLaunchConfig(4, 8, 2)
    return SpreadLaunchConfig(8, 8, 4) if columns < 4096 else SpreadLaunchConfig(4, 32, 8)


def can_take_norm(rows: int, k: int) -> bool:
    """Whether `few_rows` of [rows, k] can compute the norm of its input."""
    return 0 < rows <= MAX_ROWS and rows * k <= _MAX_NORMED_ELEMENTS


def few_rows(
    x: torch.Tensor,
    matrix: Fp8Matrix | Int8Channels,
    out: torch.Tensor,
    given: FewRows,
    launch: SpreadLaunchConfig | None = None,
) -> None:
    """x @ weight^T + bias + residual, or silu(gate) * up of a gated MLP's two projections.

    Args:
        x: [M, K], contiguous, 16-bit floats, 1 <= M <= MAX_ROWS.
        matrix: [N, K]; where gated the rows of gate come first.
        out: [M, N], where gated [M, N / 2], contiguous: receives the result, accumulated in float32
            and rounded once; may be the residual.
        given: A norm only if `can_take_norm` holds.

    Raises:
        ValueError: Rows are too long for a norm.
    """
    (rows, k), columns = x.shape, out.shape[1]
    scales, gated = WeightScales.of(matrix), given.is_gated
    launch = launch or spread_launch_config(columns, k, is_gated=gated, is_blocks=scales.rows > 0)
    if given.norm is not None and k > launch.groups * FP8_GROUP:
        raise ValueError(f"products of {rows} rows of {k} take no norm")
    if scales.rows:
        # Columns of a program share their scales.
        launch = launch._replace(columns=min(launch.columns, scales.rows))
    _fp8_spread_kernel[(cdiv(columns, launch.columns),)](
        out,
        x,
        matrix.data,
        given.bias,
        given.residual,
        *(given.norm or (None, 0.0)),
        given.tap,
        0 if given.tap is None else given.tap.stride(0),
        rows,
        columns,
        K=k,
        IS_GATED=gated,
        ROWS=rows,
        COLUMNS=launch.columns,
        GROUPS=launch.groups,
        num_warps=launch.warps,
        **scales.arguments(),
        **launch_options(x.device),
    )


@triton.jit(do_not_specialize=["rows"])
def _fp8_spread_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    gain: tl.tensor,
    eps: float,
    tap: tl.tensor,
    tap_stride: int,
    rows: int,
    columns: int,
    scales: tl.tensor,
    SCALE_ROWS: tl.constexpr,
    K: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Each thread has elements of K in all of the program's columns; the threads' parts are summed
    at the end.
    """
    release_next()
    STEP: tl.constexpr = GROUPS * GROUP
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Columns that do not exist read those of the last: cheaper than a mask on each load.
    last = tl.minimum(column, columns - 1)
    begin = weight + last.to(tl.int64)[:, None, None] * K
    begin_up = begin + tl.cast(columns, tl.int64) * K
    group = tl.arange(0, GROUPS)
    # Eight numbers a thread, both of the weight and of the rows, so that neither moves between
    # threads.
    in_group = tl.arange(0, GROUP)
    if on_sm90():
        in_group = tl.max_contiguous(in_group, 8)
    part = group[:, None] * GROUP + in_group[None, :]
    row = tl.arange(0, ROWS)
    # The first tile of the weight is loaded while the preceding kernel ends.
    tile = _groups(begin, part, 0, K, STEP)
    tile_up = tile
    if IS_GATED:
        tile_up = _groups(begin_up, part, 0, K, STEP)
    at_scale = scales
    at_scale_up = scales
    if SCALE_ROWS > 0:
        first = tl.program_id(0) * COLUMNS
        at_scale = scales + first // SCALE_ROWS * NUM_GROUPS
        at_scale_up = scales + (first + columns) // SCALE_ROWS * NUM_GROUPS
    wait_for_last()
    before = residual_of(residual, row, column, rows, columns, IS_GATED)
    spread, spread_second, spread_up, spread_second_up = 0.0, 0.0, 0.0, 0.0
    for start in tl.static_range(0, K, STEP):
        if start > 0:
            tile = _groups(begin, part, start, K, STEP)
            if IS_GATED:
                tile_up = _groups(begin_up, part, start, K, STEP)
        at = start + part
        first_row = _row(x, at, K)
        if ROWS > 1:
            # A row that does not exist reads the first again, and is not stored.
            second_row = _row(x + tl.where(rows > 1, K, 0), at, K)
        if gain is not None:
            # With a norm, K is a single step.
            weights = tl.load(gain + at, mask=at < K, other=0.0).to(tl.float32)
            first_row = _normed(first_row, weights, eps, K)
            if ROWS > 1:
                second_row = _normed(second_row, weights, eps, K)
        scale = _scales_of(at_scale, group + start // GROUP, NUM_GROUPS, SCALE_ROWS)
        wide = tile.to(tl.float32)
        spread = _with(spread, wide, first_row * scale, start)
        if ROWS > 1:
            spread_second = _with(spread_second, wide, second_row * scale, start)
        if IS_GATED:
            scale = _scales_of(at_scale_up, group + start // GROUP, NUM_GROUPS, SCALE_ROWS)
            wide = tile_up.to(tl.float32)
            spread_up = _with(spread_up, wide, first_row * scale, start)
            if ROWS > 1:
                spread_second_up = _with(spread_second_up, wide, second_row * scale, start)
    product = _summed(spread, spread_second, row)
    up = product
    if IS_GATED:
        up = _summed(spread_up, spread_second_up, row)
    if SCALE_ROWS == 0:
        product *= tl.load(scales + last)[:, None]
        if IS_GATED:
            up *= tl.load(scales + last + columns)[:, None]
    store_product(
        out, product, up, bias, residual, before, row, column, rows, columns, IS_GATED, True, False,
        tap, tap_stride,
    )  # fmt: skip


@triton.jit
def _row(x: tl.tensor, at: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """[GROUPS, GROUP] of a row, zero beyond K."""
    return tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)


@triton.jit
def _scales_of(
    at_scale: tl.tensor, in_groups: tl.tensor, NUM_GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr
) -> tl.tensor:
    """[GROUPS, 1]; 1 where scales are not in blocks."""
    if SCALE_ROWS > 0:
        scale = tl.load(at_scale + in_groups, mask=in_groups < NUM_GROUPS, other=0.0)
    else:
        scale = tl.full([in_groups.shape[0]], 1.0, tl.float32)
    return scale[:, None]


@triton.jit
def _normed(row: tl.tensor, weights: tl.tensor, eps: float, K: tl.constexpr) -> tl.tensor:
    return row * (weights * tl.rsqrt(tl.sum(tl.sum(row * row, axis=1), axis=0) / K + eps))


@triton.jit
def _with(spread: tl.tensor, wide: tl.tensor, row: tl.tensor, start: tl.constexpr) -> tl.tensor:
    """`spread` and the products of the elements from `start` on; `spread` counts from the second
    step on.
    """
    products = wide * row[None, :, :]
    return products if start == 0 else spread + products


@triton.jit
def _summed(spread: tl.tensor, spread_second: tl.tensor, row: tl.tensor) -> tl.tensor:
    """[COLUMNS, ROWS] of [COLUMNS, GROUPS, GROUP] of each row."""
    product = tl.sum(tl.sum(spread, axis=2), axis=1)[:, None]
    if row.shape[0] > 1:
        second = tl.sum(tl.sum(spread_second, axis=2), axis=1)[:, None]
        product = tl.where((row == 0)[None, :], product, second)
    return product


@triton.jit
def _groups(
    begin: tl.tensor, part: tl.tensor, start: int, K: tl.constexpr, STEP: tl.constexpr
) -> tl.tensor:
    """[COLUMNS, GROUPS, GROUP] of the weight, zero beyond K."""
    at = (start + part)[None, :, :]
    if K // STEP * STEP == K:
        tile = tl.load(begin + at, eviction_policy="evict_first")
    else:
        tile = tl.load(begin + at, mask=at < K, other=0.0, eviction_policy="evict_first")
    return tile
