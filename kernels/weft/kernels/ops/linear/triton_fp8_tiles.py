"""Products of rows and weights that are both FP8, on a GPU's FP8 tensor cores.

If scales are in groups of K, each group's product is scaled and added up in float32 (as in
DeepSeek-V3, section 3.3.2); else scales are applied at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_epilogue import of_columns, of_rows, store_product
from weft.kernels.ops.linear.triton_fp8_rows import Fp8Rows
from weft.kernels.ops.linear.triton_fp8_weights import GROUP, WeightScales
from weft.kernels.ops.linear.triton_groups_product import sum_parts
from weft.kernels.shared.copied_tiles import can_copy, copied_tiles
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.formats.quantised import FP8_GROUP, Fp8Matrix
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_LONG = 8192
"""K from which on programs compute fewer columns at once, so that all multiprocessors have work."""
_FEW_COLUMNS = 4096
"""Columns up to which programs share K, or 65 to 256 rows are cut smaller, for the same reason."""
_ROW_TILES_TOGETHER = 8
"""Tiles of rows that share the weight's tiles in the cache."""


class TileLaunchConfig(NamedTuple):
    """What a program computes, and how it iterates over K."""

    rows: int
    columns: int
    """Output columns; of a gated pair, columns of each."""
    tile: int
    """Elements of K taken at once; FP8_GROUP if scales are in groups."""
    warps: int
    stages: int
    is_turned: bool = False
    """Whether the weight is the first operand of the instruction, which wastes less for few rows.
    """
    is_copied: bool = False
    """Whether the copy engine fetches tiles."""
    splits: int = 1
    """Number of programs that share K; a further launch sums their parts. 1 where gated."""


FIXED = TileLaunchConfig(64, 64, FP8_GROUP, 4, 4, is_copied=True)
"""The shape in deterministic mode, whatever the number of rows, so that each row is summed in the
same order in any batch. Its tiles are narrow, so that few rows still make enough programs.
"""


def tile_launch_config(
    rows: int, columns: int, k: int, *, is_gated: bool, is_blocks: bool
) -> TileLaunchConfig:
    """The launch configuration of a product (measured on an H100, K of 2,048, 4,096 and 14,336)."""
    few = max(16, next_power_of_2(rows))
    if is_blocks:
        if rows <= 64:
            wanted = 1 if is_gated else (512 if few == 16 else 256) // cdiv(columns, 64)
            splits = max(1, min(wanted, 8 if few == 16 else 4, k // FP8_GROUP))
            return TileLaunchConfig(few, 64, FP8_GROUP, 4, 5, is_turned=True, splits=splits)
        return TileLaunchConfig(128, 128, FP8_GROUP, 8, 4, is_copied=True)
    if rows <= 32 or (rows <= 64 and k <= _LONG):
        splits = 2 if few == 16 and columns <= _FEW_COLUMNS and not is_gated else 1
        stages = 5 if few == 16 and splits == 1 else 4
        return TileLaunchConfig(few, 64, 256, 4, stages, is_turned=True, splits=splits)
    if rows <= 64:
        return TileLaunchConfig(64, 32, 256, 4, 5)
    if not is_gated and columns <= _FEW_COLUMNS and rows <= 256:
        return TileLaunchConfig(64, 128, 256, 4, 4, is_copied=True)
    return TileLaunchConfig(128, 128, FP8_GROUP, 8, 4, is_copied=True)


def multiply_fp8(
    x: Fp8Rows,
    matrix: Fp8Matrix,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    is_gated: bool = False,
    launch: TileLaunchConfig | None = None,
) -> None:
    """x @ weight^T + bias + residual, or silu(gate) * up of a gated MLP's two projections.

    Args:
        x: [M, K], M at least 1; with scales of groups exactly if those of the weight lie in blocks.
        matrix: [N, K]; where gated the rows of gate come first.
        out: [M, N], where gated [M, N / 2], contiguous: receives the result, accumulated in float32
            and rounded once; may be the residual.
        bias: [N], or None.
        residual: [M, N], contiguous, or None; not where gated.
    """
    rows, k, columns = x.rows, x.data.shape[1], out.shape[1]
    scales = WeightScales.of(matrix)
    if x.has_groups != (scales.rows > 0):
        raise ValueError("rows and weight must both have scales of groups, or neither")
    launch = launch or tile_launch_config(
        rows, columns, k, is_gated=is_gated, is_blocks=scales.rows > 0
    )
    if scales.rows:
        launch = launch._replace(columns=min(launch.columns, scales.rows), tile=FP8_GROUP)
    is_copied = launch.is_copied and can_copy(x.data) and can_copy(matrix.data)
    tiles = (cdiv(rows, launch.rows), cdiv(columns, launch.columns))
    is_split, target = launch.splits > 1, out
    if is_split:
        parts = (launch.splits, rows, columns)
        target = torch.empty(parts, dtype=torch.float32, device=x.data.device)
    _fp8_tiles_kernel[(tiles[0] * tiles[1], launch.splits)](
        target,
        x.data,
        matrix.data,
        copied_tiles(x.data, launch.rows, launch.tile) if is_copied else None,
        copied_tiles(matrix.data, launch.columns, launch.tile) if is_copied else None,
        x.scales,
        scales.scales,
        None if is_split else bias,
        None if is_split else residual,
        rows,
        x.data.shape[0],
        columns,
        K=k,
        IS_GATED=is_gated,
        SCALE_ROWS=scales.rows,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        TILE=launch.tile,
        IS_TURNED=launch.is_turned,
        SPLITS=launch.splits,
        TOGETHER=_ROW_TILES_TOGETHER,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **launch_options(x.data.device),
    )
    if is_split:
        sum_parts(out, target, bias, residual)


@triton.jit(do_not_specialize=["rows", "whole_rows"])
def _fp8_tiles_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    x_tiles: tl.tensor_descriptor,
    weight_tiles: tl.tensor_descriptor,
    row_scales: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    rows: int,
    whole_rows: int,
    columns: int,
    K: tl.constexpr,
    IS_GATED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    IS_TURNED: tl.constexpr,
    SPLITS: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """If programs share K, `out` is [SPLITS, M, N] float32 and receives each program's part."""
    release_next()
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    OWN: tl.constexpr = ((K + TILE - 1) // TILE + SPLITS - 1) // SPLITS * TILE
    row_tiles = tl.cdiv(rows, ROWS)
    per_set = TOGETHER * tl.cdiv(columns, COLUMNS)
    place = tl.program_id(0) % per_set
    first_set = tl.program_id(0) // per_set * TOGETHER
    set_tiles = tl.minimum(row_tiles - first_set, TOGETHER)
    first_row = (first_set + place % set_tiles) * ROWS
    first = place // set_tiles * COLUMNS
    row = first_row + tl.arange(0, ROWS)
    column = first + tl.arange(0, COLUMNS)
    part = tl.arange(0, TILE)
    last = tl.minimum(column, columns - 1)
    last_row = tl.minimum(row, rows - 1)
    row_at = x + last_row.to(tl.int64)[:, None] * K
    begin = weight + last.to(tl.int64)[:, None] * K
    begin_up = begin + tl.cast(columns, tl.int64) * K
    at_scale = scales
    at_scale_up = scales
    if SCALE_ROWS > 0:
        at_scale = scales + first // SCALE_ROWS * NUM_GROUPS
        at_scale_up = scales + (first + columns) // SCALE_ROWS * NUM_GROUPS
    wait_for_last()
    if IS_TURNED:
        product = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        product = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = product
    own = 0
    end = K
    if SPLITS > 1:
        own = tl.program_id(1) * OWN
        end = tl.minimum(own + OWN, K)
        out += tl.program_id(1).to(tl.int64) * rows * columns
    for start in range(own, end, TILE):
        at = (start + part)[None, :]
        if x_tiles is not None:
            values = x_tiles.load([first_row, start])
            tile = weight_tiles.load([first, start])
        elif K % TILE == 0:
            values = tl.load(row_at + at)
            tile = tl.load(begin + at)
        else:
            values = tl.load(row_at + at, mask=at < K, other=0.0)
            tile = tl.load(begin + at, mask=at < K, other=0.0)
        if SCALE_ROWS > 0:
            group = start // GROUP
            given = tl.load(row_scales + tl.cast(group, tl.int64) * whole_rows + last_row)
            scale = given * tl.load(at_scale + group)
            product += _dot(tile, values, None, IS_TURNED) * of_rows(scale, IS_TURNED)
        else:
            product = _dot(tile, values, product, IS_TURNED)
        if IS_GATED:
            if x_tiles is not None:
                tile = weight_tiles.load([first + columns, start])
            elif K % TILE == 0:
                tile = tl.load(begin_up + at)
            else:
                tile = tl.load(begin_up + at, mask=at < K, other=0.0)
            if SCALE_ROWS > 0:
                scale = given * tl.load(at_scale_up + group)
                up += _dot(tile, values, None, IS_TURNED) * of_rows(scale, IS_TURNED)
            else:
                up = _dot(tile, values, up, IS_TURNED)
    if SCALE_ROWS == 0:
        given = of_rows(tl.load(row_scales + last_row), IS_TURNED)
        product *= of_columns(tl.load(scales + last), IS_TURNED) * given
        if IS_GATED:
            up *= of_columns(tl.load(scales + last + columns), IS_TURNED) * given
    store_product(
        out, product, up, bias, residual, None, row, column, rows, columns, IS_GATED, IS_TURNED
    )


@triton.jit
def _dot(
    tile: tl.tensor, values: tl.tensor, total: tl.tensor | None, IS_TURNED: tl.constexpr
) -> tl.tensor:
    if IS_TURNED:
        total = tl.dot(tile, tl.trans(values), total)
    else:
        total = tl.dot(values, tl.trans(tile), total)
    return total
