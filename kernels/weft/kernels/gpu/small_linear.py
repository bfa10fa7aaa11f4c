"""Linear layers of few rows on a GPU: bound by reading the weight, which each program streams.

A program owns some columns of the output and walks K, or a part of K where the columns are too few
to keep the memory busy. Parts are summed in their order, by the program that comes last, so results
repeat, and a row's does not depend on the other rows' values.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.gpu.dependent_launch import launch_options, release_next, wait_for_last

MAX_ROWS = 16
"""Beyond, the rows themselves are worth tiling: that is cuBLAS's."""
_MIN_SPLIT_K = 1024
"""Below, parts are too short to be worth their sum."""
_MAX_BLOCKS = 256
"""Most blocks of a split product: fewer than 4,096 columns in blocks of 16."""
MAX_SPREAD_ROWS = 2
"""Most rows for plain multiplication: up to here it keeps up with memory, and tensor cores start
slower.
"""
_MAX_SPREAD_ROWS_OF_SMALL = 4
_SMALL_WEIGHT, _SMALL_GATED_WEIGHT = 1 << 22, 1 << 23
"""Elements up to which it does so at a few rows more (measured on an H200)."""


class SmallLinearShape(NamedTuple):
    """How a program iterates over its part of the weight."""

    columns: int
    """Output columns per program."""
    tile: int
    """Elements of K taken at once."""
    warps: int
    stages: int
    """Tiles whose loads are under way."""
    splits: int
    """Number of parts into which K is split."""


_FIXED = SmallLinearShape(columns=64, tile=128, warps=4, stages=5, splits=1)
"""Shape for many columns, and where K must not be split."""


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    gated: bool = False,
    shape: SmallLinearShape | None = None,
    is_fixed: bool = False,
) -> torch.Tensor:
    """x @ weight^T + bias + residual, or silu(gate) * up of a gated MLP's two projections.

    Args:
        x: [M, K], contiguous, 16-bit floats, 1 <= M <= MAX_ROWS.
        weight: [N, K], contiguous, dtype of `x`; where gated the rows of gate come first.
        bias: [N], dtype of `x`, or None.
        residual: [M, N], contiguous, or None; where gated added before the activation.
        out_dtype: dtype of the result.
        gated: apply the activation.
        shape: how to launch; None: what suits.
        is_fixed: each element is one chain of tensor core instructions over K for any number of
            rows, and rounded before `residual` is added (`weft.kernels.gpu.fixed_linear`).

    Returns:
        [M, N], where gated [M, N / 2]; accumulated in float32, rounded once.
    """
    rows, k = x.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((rows, columns), dtype=out_dtype, device=x.device)
    is_spread = not is_fixed and rows <= max_spread_rows(weight, is_gated=gated)
    if is_fixed:
        shape = _FIXED
    shape = shape or launch_shape(rows, columns, k, is_gated=gated, is_spread=is_spread)
    blocks = triton.cdiv(columns, shape.columns)
    block_rows = triton.next_power_of_2(rows) if is_spread else MAX_ROWS
    parts, arrived = out, out
    if shape.splits > 1:
        size = (blocks, shape.splits, shape.columns, block_rows)
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = _counters(x.device)
    _small_linear_kernel[(blocks, shape.splits)](
        out,
        x,
        weight,
        bias,
        residual,
        parts,
        arrived,
        rows,
        columns,
        K=k,
        IS_GATED=gated,
        BLOCK_ROWS=block_rows,
        IS_SPREAD=is_spread,
        ROUNDS_FIRST=is_fixed,
        BLOCK_COLUMNS=shape.columns,
        TILE=shape.tile,
        STAGES=shape.stages,
        SPLITS=shape.splits,
        num_warps=shape.warps,
        **launch_options(x.device),
    )
    return out


def max_spread_rows(weight: torch.Tensor, *, is_gated: bool) -> int:
    """Rows up to which a product with it is plain multiplication."""
    small = _SMALL_GATED_WEIGHT if is_gated else _SMALL_WEIGHT
    return _MAX_SPREAD_ROWS_OF_SMALL if weight.numel() <= small else MAX_SPREAD_ROWS


def launch_shape(
    rows: int, columns: int, k: int, *, is_gated: bool, is_spread: bool
) -> SmallLinearShape:
    """The launch shape of a product: enough programs for all multiprocessors, with many loads in
    flight each.
    """
    if not is_spread:
        # Measured on an H200 at 4 and 16 rows.
        if columns >= 4096 and not is_gated:
            return _FIXED
        if is_gated or k < _MIN_SPLIT_K:
            return SmallLinearShape(columns=32, tile=128, warps=2, stages=4, splits=1)
        if columns < 512:
            return SmallLinearShape(columns=16, tile=128, warps=2, stages=4, splits=8)
        if k <= 3072:
            return SmallLinearShape(columns=32, tile=128, warps=2, stages=3, splits=4)
        return SmallLinearShape(columns=16, tile=256, warps=2, stages=4, splits=4)
    largest = 2048 if rows <= 2 else 1024
    fitting = [tile for tile in (2048, 1024, 512) if tile <= largest and k % tile == 0]
    tile = fitting[0] if fitting else min(largest, triton.next_power_of_2(k))
    return SmallLinearShape(columns=2, tile=tile, warps=4, stages=1, splits=1)


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros, which a launch leaves as zeros: how many programs of a block have arrived.

    Launches that follow each other share them; those of two streams must not.
    """
    return torch.zeros(_MAX_BLOCKS, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["rows"])
def _small_linear_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    parts: tl.tensor,
    arrived: tl.tensor,
    rows: int,
    columns: int,
    IS_DEPENDENT: tl.constexpr,
    K: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    IS_SPREAD: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    release_next(IS_DEPENDENT)
    # Of K, what this program walks; tiles beyond K are zero.
    PART: tl.constexpr = ((K + SPLITS * TILE - 1) // (SPLITS * TILE)) * TILE
    first = tl.program_id(1) * PART
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    in_out = column < columns
    # Columns that do not exist read those of the last: cheaper than a mask on each load.
    begin = weight + tl.minimum(column, columns - 1).to(tl.int64) * K
    # The first tile of the weight is on its way while the last kernel ends.
    tile = _weight_tile(begin, first, K, TILE, SPLITS > 1)
    wait_for_last(IS_DEPENDENT)
    product = _product(
        tile, x, begin, first, PART, rows, K, BLOCK_ROWS, IS_SPREAD, BLOCK_COLUMNS, TILE, STAGES
    )
    if SPLITS > 1:
        # Only the last program of a block goes on, with the sum of all parts.
        block = tl.program_id(0)
        places = tl.arange(0, BLOCK_COLUMNS)[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        SIZE: tl.constexpr = BLOCK_COLUMNS * BLOCK_ROWS
        mine = parts + (block * SPLITS + tl.program_id(1)) * SIZE
        tl.store(mine + places, product)
        tl.debug_barrier()
        if tl.atomic_add(arrived + block, 1) != SPLITS - 1:
            return
        product = tl.zeros([BLOCK_COLUMNS, BLOCK_ROWS], tl.float32)
        for number in tl.static_range(SPLITS):
            product += tl.load(parts + (block * SPLITS + number) * SIZE + places, volatile=True)
        tl.store(arrived + block, 0)
    if bias is not None:
        product += tl.load(bias + column, mask=in_out, other=0.0).to(tl.float32)[:, None]
    row = tl.arange(0, BLOCK_ROWS)
    mask = in_out[:, None] & (row < rows)[None, :]
    if IS_GATED:
        added_at = row[None, :].to(tl.int64) * 2 * columns + column[:, None]
        if residual is not None:
            product += tl.load(residual + added_at, mask=mask, other=0.0).to(tl.float32)
        begin += tl.cast(columns, tl.int64) * K
        tile = _weight_tile(begin, 0, K, TILE, False)
        up = _product(
            tile, x, begin, 0, K, rows, K, BLOCK_ROWS, IS_SPREAD, BLOCK_COLUMNS, TILE, STAGES
        )
        if bias is not None:
            up += tl.load(bias + columns + column, mask=in_out, other=0.0).to(tl.float32)[:, None]
        if residual is not None:
            up_at = residual + added_at + columns
            up += tl.load(up_at, mask=mask, other=0.0).to(tl.float32)
        product = product / (1.0 + tl.exp(-product)) * up
    at = row[None, :].to(tl.int64) * columns + column[:, None]
    if residual is not None and not IS_GATED:
        if ROUNDS_FIRST:
            product = product.to(residual.dtype.element_ty).to(tl.float32)
        product += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, product.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _product(
    tile: tl.tensor,
    x: tl.tensor,
    begin: tl.tensor,
    first: int,
    PART: tl.constexpr,
    rows: int,
    K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    IS_SPREAD: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_COLUMNS, BLOCK_ROWS] float32 over K from `first` on, PART of it.

    `tile` is the weight's first, from `begin` + `first`.
    """
    part = tl.arange(0, TILE)
    if BLOCK_ROWS == 1:
        values = tl.load(x + first + part, mask=first + part < K, other=0.0)
        spread = tile.to(tl.float32) * values.to(tl.float32)[None, :]
        for start in tl.range(first + TILE, first + PART, TILE, num_stages=STAGES):
            tile = _weight_tile(begin, start, K, TILE, PART < K)
            values = tl.load(x + start + part, mask=start + part < K, other=0.0)
            spread += tile.to(tl.float32) * values.to(tl.float32)[None, :]
        total = tl.sum(spread, axis=1)[:, None]
    elif IS_SPREAD:
        # [BLOCK_ROWS, BLOCK_COLUMNS, TILE]
        spread = tile.to(tl.float32)[None, :, :] * _row_tile(x, first, rows, K, BLOCK_ROWS, TILE)
        for start in tl.range(first + TILE, first + PART, TILE, num_stages=STAGES):
            tile = _weight_tile(begin, start, K, TILE, PART < K)
            values = _row_tile(x, start, rows, K, BLOCK_ROWS, TILE)
            spread += tile.to(tl.float32)[None, :, :] * values
        total = tl.trans(tl.sum(spread, axis=2))
    else:
        row = tl.arange(0, BLOCK_ROWS)
        total = tl.zeros([BLOCK_COLUMNS, BLOCK_ROWS], tl.float32)
        for start in tl.range(first, first + PART, TILE, num_stages=STAGES):
            tile = _weight_tile(begin, start, K, TILE, PART < K)
            mask = (row < rows)[:, None] & (start + part < K)[None, :]
            values = tl.load(x + row[:, None] * K + (start + part)[None, :], mask=mask, other=0.0)
            total = tl.dot(tile, tl.trans(values), total)
    return total


@triton.jit
def _weight_tile(
    begin: tl.tensor, start: int, K: tl.constexpr, TILE: tl.constexpr, MAY_PASS: tl.constexpr
) -> tl.tensor:
    """[BLOCK_COLUMNS, TILE], zero beyond K; `MAY_PASS`: whole tiles may lie beyond."""
    part = start + tl.arange(0, TILE)
    if (K % TILE != 0) or MAY_PASS:
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
