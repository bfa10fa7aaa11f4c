"""Linear layers of few rows on a GPU. Reading the weight is the limit, so that each program streams
its part.

One or two rows are multiplied without tensor cores; more take tensor cores
(`weft.kernels.ops.linear.triton_sliced`). A row's result does not depend on the values of other
rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_epilogue import residual_of, store_product
from weft.kernels.ops.linear.triton_sliced import (
    MAX_ROWS,
    sliced_linear,
)
from weft.kernels.ops.linear.triton_sliced import launch_config as sliced_launch_config
from weft.kernels.ops.lora.triton_product import (
    NOTHING,
    ProductAddition,
    ToColumns,
    added_to_columns,
    wait_for_ranks,
)
from weft.kernels.ops.lora.triton_rows import NormOfRows
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

MAX_SPREAD_ROWS = 2
"""Most rows for the product without tensor cores: up to here it keeps up with memory, and tensor
cores start more slowly.
"""
_WHOLE_BELOW = 4096
"""K below which a program takes its columns whole, all loads at once."""
_NORMED_ELEMENTS = 1152
"""Elements of an input up to which each program can compute its norm in less time than a launch
costs (measured on an H200: for 1,024 elements no difference, for 2,048 4 % slower).
"""


class SmallLaunchConfig(NamedTuple):
    columns: int
    """Output columns of a program."""
    tile: int
    """Elements of K taken at once."""
    warps: int
    stages: int
    """Tiles that are being loaded."""


FIXED = SmallLaunchConfig(columns=64, tile=128, warps=4, stages=5)
"""Shape for products whose K must be one chain of instructions. K must be longer than a tile:
Triton merges a single product and a bias into one product that begins at the bias, which gives
other bits.
"""


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    gated: bool = False,
    is_fixed: bool = False,
    norm: NormOfRows | None = None,
    out: torch.Tensor | None = None,
    tap: torch.Tensor | None = None,
    added: ProductAddition | None = None,
) -> torch.Tensor:
    """x @ weight^T + bias + residual, or silu(gate) * up of a gated MLP's two projections.

    Args:
        x: [M, K], contiguous, 16-bit floats, 1 <= M <= MAX_ROWS.
        weight: [N, K], contiguous, dtype of `x`; where gated the rows of gate come first.
        bias: [N], dtype of `x`, or None.
        residual: [M, N], contiguous, or None; where gated added before the activation.
        is_fixed: Whether each element must be one chain of tensor core instructions over K for any
            number of rows, and rounded before `residual` is added
            (`weft.kernels.ops.linear.triton_fixed`). K must then be longer than a tile of `FIXED`.
        norm: Applied to `x` first, where `can_take_norm` holds; or None.
        out: Receives the result, contiguous; may be `residual`. None: new memory.
        tap: [M, N] with rows of any stride: receives the result as well, without tensor cores only;
            or None.
        added: What adapters add, where gated before the activation; or None.

    Returns:
        [M, N], where gated [M, N / 2]; accumulated in float32, rounded once.

    Raises:
        ValueError: The number or length of rows excludes `norm` or `tap`.
    """
    rows, k = x.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = torch.empty((rows, columns), dtype=out_dtype, device=x.device)
    is_spread = not is_fixed and rows <= MAX_SPREAD_ROWS
    if norm is not None and not (is_spread and k < _WHOLE_BELOW):
        raise ValueError(f"products of {rows} rows of {k} take no norm")
    if tap is not None and not is_spread:
        raise ValueError(f"products of {rows} rows leave no second copy")
    if not (is_spread or is_fixed):
        sliced_linear(x, weight, bias, residual, out, gated=gated, added=added)
        return out
    if is_fixed and added is not None:
        raise ValueError("what adapters add to products of fixed bits comes behind them")
    launch = FIXED if is_fixed else launch_config(columns, k, is_gated=gated)
    _small_linear_kernel[(cdiv(columns, launch.columns),)](
        out,
        x,
        weight,
        bias,
        residual,
        *(norm or (None, 0.0)),
        tap,
        0 if tap is None else tap.stride(0),
        rows,
        columns,
        K=k,
        IS_GATED=gated,
        **(NOTHING if added is None else added.arguments()),
        BLOCK_ROWS=next_power_of_2(rows) if is_spread else MAX_ROWS,
        IS_SPREAD=is_spread,
        ROUNDS_FIRST=is_fixed,
        BLOCK_COLUMNS=launch.columns,
        TILE=launch.tile,
        STAGES=launch.stages,
        num_warps=launch.warps,
        **launch_options(x.device),
    )
    return out


def can_take_norm(rows: int, k: int) -> bool:
    """Whether a product of [rows, k] can compute the norm of its input, in less time than a launch
    for the norm takes.
    """
    return 0 < rows <= MAX_SPREAD_ROWS and rows * k <= _NORMED_ELEMENTS


def columns_at_once(rows: int, columns: int, k: int, *, is_gated: bool) -> int:
    """Columns that a program of such a product computes; of a gated pair, columns of each half."""
    if rows <= MAX_SPREAD_ROWS:
        return launch_config(columns, k, is_gated=is_gated).columns
    return sliced_launch_config(columns, k, is_gated=is_gated).columns


def launch_config(columns: int, k: int, *, is_gated: bool) -> SmallLaunchConfig:
    """The launch of a product without tensor cores: enough programs for all multiprocessors, each
    with many loads at once. For short columns the sums over threads cost most, and one warp has the
    fewest.
    """
    if k < _WHOLE_BELOW:
        # Measured on an H200 with one and two rows, K of 576 to 3,072.
        is_wide = k >= 2048 or (columns >= 4096 and not is_gated)
        tile, warps = next_power_of_2(k), 1 if k < 2048 else 4
        return SmallLaunchConfig(4 if is_wide else 2, tile, warps, stages=1)
    fitting = [size for size in (2048, 1024, 512) if k % size == 0]
    return SmallLaunchConfig(2, fitting[0] if fitting else 2048, warps=4, stages=1)


@triton.jit(do_not_specialize=["rows", "layer"])
def _small_linear_kernel(
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
    added: ToColumns | None,
    layer: int,
    K: tl.constexpr,
    IS_GATED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    IS_SPREAD: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    release_next()
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    # Columns beyond the last one read the last one, which is cheaper than a mask on each load.
    begin = weight + tl.minimum(column, columns - 1).to(tl.int64) * K
    begin_up = begin + tl.cast(columns, tl.int64) * K
    # The first tile of the weight is loaded while the preceding kernel ends.
    tile = _weight_tile(begin, 0, K, TILE)
    if IS_GATED and K <= TILE:
        tile_up = _weight_tile(begin_up, 0, K, TILE)
    row = tl.arange(0, BLOCK_ROWS)
    if added is not None:
        given, given_up = wait_for_ranks(added, layer, row, rows, column, columns, IS_GATED, ADDED)
    else:
        wait_for_last()
    before = residual_of(residual, row, column, rows, columns, IS_GATED)
    product, scale = _product(
        tile, x, gain, eps, begin, rows, K, BLOCK_ROWS, IS_SPREAD, BLOCK_COLUMNS, TILE, STAGES
    )
    up = product
    if IS_GATED:
        if K > TILE:
            tile_up = _weight_tile(begin_up, 0, K, TILE)
        up, _ = _product(
            tile_up, x, gain, eps, begin_up, rows, K, BLOCK_ROWS, IS_SPREAD, BLOCK_COLUMNS, TILE,
            STAGES,
        )  # fmt: skip
    if gain is not None:
        product *= scale[None, :]
        up *= scale[None, :]
    if added is not None:
        product += added_to_columns(added, *given, row, rows, column, ADDED)
        if IS_GATED:
            up += added_to_columns(added, *given_up, row, rows, column + columns, ADDED)
    store_product(
        out, product, up, bias, residual, before, row, column, rows, columns, IS_GATED, True,
        ROUNDS_FIRST, tap, tap_stride,
    )  # fmt: skip


@triton.jit
def _product(
    tile: tl.tensor,
    x: tl.tensor,
    gain: tl.tensor,
    eps: float,
    begin: tl.tensor,
    rows: int,
    K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    IS_SPREAD: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """[BLOCK_COLUMNS, BLOCK_ROWS] float32; `tile` is the weight's first one, from `begin`.

    With a norm, the scale of each row, [BLOCK_ROWS], is still to be applied.
    """
    part = tl.arange(0, TILE)
    row = tl.arange(0, BLOCK_ROWS)
    scale = tl.zeros([BLOCK_ROWS], tl.float32)
    if IS_SPREAD and K <= TILE:
        total = tl.zeros([BLOCK_COLUMNS, BLOCK_ROWS], tl.float32)
        for number in tl.static_range(BLOCK_ROWS):
            # Rows beyond the last one read the first one, and are not stored.
            at = tl.where(number < rows, number, 0) * K + part
            values = tl.load(x + at, mask=part < K, other=0.0).to(tl.float32)
            if gain is not None:
                found = tl.rsqrt(tl.sum(values * values, axis=0) / K + eps)
                scale = tl.where(row == number, found, scale)
                values *= tl.load(gain + part, mask=part < K, other=0.0).to(tl.float32)
            found = tl.sum(tile.to(tl.float32) * values[None, :], axis=1)
            total = tl.where((row == number)[None, :], found[:, None], total)
    elif IS_SPREAD:
        # [BLOCK_ROWS, BLOCK_COLUMNS, TILE]
        spread = tile.to(tl.float32)[None, :, :] * _row_tile(x, 0, rows, K, BLOCK_ROWS, TILE)
        for start in tl.range(TILE, K, TILE, num_stages=STAGES):
            tile = _weight_tile(begin, start, K, TILE)
            values = _row_tile(x, start, rows, K, BLOCK_ROWS, TILE)
            spread += tile.to(tl.float32)[None, :, :] * values
        total = tl.trans(tl.sum(spread, axis=2))
    else:
        total = tl.zeros([BLOCK_COLUMNS, BLOCK_ROWS], tl.float32)
        for start in tl.range(0, K, TILE, num_stages=STAGES):
            tile = _weight_tile(begin, start, K, TILE)
            mask = (row < rows)[:, None] & (start + part < K)[None, :]
            values = tl.load(x + row[:, None] * K + (start + part)[None, :], mask=mask, other=0.0)
            total = tl.dot(tile, tl.trans(values), total)
    return total, scale


@triton.jit
def _weight_tile(begin: tl.tensor, start: int, K: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """[BLOCK_COLUMNS, TILE], zero beyond K."""
    part = start + tl.arange(0, TILE)
    if K % TILE != 0:
        tile = tl.load(begin[:, None] + part[None, :], mask=(part < K)[None, :], other=0.0)
    else:
        tile = tl.load(begin[:, None] + part[None, :])
    return tile


@triton.jit
def _row_tile(
    x: tl.tensor,
    start: int,
    rows: int,
    K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_ROWS, 1, TILE] float32, zero beyond the rows and beyond K."""
    row = tl.arange(0, BLOCK_ROWS)[:, None, None]
    part = start + tl.arange(0, TILE)[None, None, :]
    mask = (row < rows) & (part < K)
    return tl.load(x + row * K + part, mask=mask, other=0.0).to(tl.float32)
