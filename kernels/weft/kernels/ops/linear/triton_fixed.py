"""Products on a GPU in which a row's bits do not depend on the other rows.

cuBLAS and `small_linear` choose by the number of rows how a product is cut, and so the order in
which an element's terms are added. Here each element is one chain of tensor core instructions over
K, from beginning to end, for every number of rows. The tile that holds the element, its place in
the tile, the tile's depth, and which operand is transposed do not change that chain
(batch-invariant products: H. He et al., Defeating Nondeterminism in LLM Inference, 2025).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_epilogue import store_product
from weft.kernels.ops.linear.triton_sliced import MAX_ROWS
from weft.kernels.ops.linear.triton_small import FIXED, small_linear
from weft.kernels.shared.copied_tiles import can_copy, copied_tiles
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv

_MANY_COLUMNS = 1 << 14
"""Number of columns from which on wider tiles also fill the device."""
_GROUP = 8
"""Tiles of rows that share the weight's tiles in the cache."""


class FixedLaunchConfig(NamedTuple):
    """Tile of a program. It has a multiple of 64 rows, so that all tiles take the same
    instruction.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def fixed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """x @ weight^T + bias, rounded; then `residual` is added.

    Args:
        x: [M, K], contiguous.
        weight: [N, K], contiguous, dtype of `x`.
        bias: [N], dtype of `x`, or None.
        residual: [M, N], contiguous, dtype of `x`, or None.
        out_dtype: Dtype of the result, [M, N].
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    out = torch.empty((rows, columns), dtype=out_dtype, device=x.device)
    if rows == 0:
        return out
    if rows <= MAX_ROWS and depth > FIXED.tile:
        # With few rows, reading the weight is the limit, and `small_linear` streams it, with the
        # same chain of instructions.
        return small_linear(x, weight, bias, residual, out_dtype, is_fixed=True)
    launch = launch_config(rows, columns)
    is_copied = can_copy(x) and can_copy(weight)
    tiles = (cdiv(rows, launch.rows), cdiv(columns, launch.columns))
    _fixed_linear_kernel[(tiles[0] * tiles[1],)](
        out,
        x,
        weight,
        copied_tiles(x, launch.rows, launch.depth) if is_copied else None,
        copied_tiles(weight, launch.columns, launch.depth) if is_copied else None,
        bias,
        residual,
        rows,
        columns,
        depth,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        TILE=launch.depth,
        GROUP=_GROUP,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **launch_options(x.device),
    )
    return out


def launch_config(rows: int, columns: int) -> FixedLaunchConfig:
    """The launch for a number of rows; few rows fill a device only with narrow tiles."""
    if rows <= 64 and columns >= _MANY_COLUMNS:
        return FixedLaunchConfig(rows=64, columns=64, depth=128, warps=4, stages=3)
    if rows <= 64:
        return FixedLaunchConfig(rows=64, columns=32, depth=128, warps=4, stages=4)
    return FixedLaunchConfig(rows=128, columns=128, depth=64, warps=8, stages=4)


@triton.jit(do_not_specialize=["rows"])
def _fixed_linear_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    x_tiles: tl.tensor_descriptor,
    weight_tiles: tl.tensor_descriptor,
    bias: tl.tensor,
    residual: tl.tensor,
    rows: int,
    columns: int,
    depth: int,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    row_tiles = tl.cdiv(rows, ROWS)
    per_group = GROUP * tl.cdiv(columns, COLUMNS)
    group = tl.program_id(0) // per_group
    place = tl.program_id(0) % per_group
    group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    first_row = (group * GROUP + place % group_rows) * ROWS
    first_column = place // group_rows * COLUMNS
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    part = tl.arange(0, TILE)
    row_at = x + row.to(tl.int64)[:, None] * depth
    column_at = weight + column.to(tl.int64)[:, None] * depth
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, TILE):
        if x_tiles is not None:
            values = x_tiles.load([first_row, start])
            tile = weight_tiles.load([first_column, start])
        else:
            at = (start + part)[None, :]
            values = tl.load(row_at + at, mask=(row < rows)[:, None] & (at < depth), other=0.0)
            tile = tl.load(
                column_at + at, mask=(column < columns)[:, None] & (at < depth), other=0.0
            )
        total = tl.dot(values, tl.trans(tile), total)
    # Rounded before the residual is added, as it is if the following norm adds the residual.
    store_product(
        out, total, total, bias, residual, None, row, column, rows, columns, False, False, True
    )
