"""Linear layers of 17 to 64 rows on a GPU: all rows are one tile of tensor cores.

A program owns a few columns and walks all of K. It can begin while the preceding kernel ends, and
computes the activation of a gated pair itself, which saves a launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_epilogue import store_product
from weft.kernels.ops.linear.triton_sliced import MAX_ROWS as MAX_SLICED_ROWS
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv

MAX_ROWS = 64
"""Rows of a tensor core instruction of four warps."""
_MIN_TILE = 64
_MAX_PLAIN_K = 1024
"""K up to which products without a gate are faster than cuBLAS's, which cut a longer K into
parts.
"""
_MIN_PLAIN_COLUMNS = 2048
"""Least columns of such products; fewer leave most multiprocessors without work."""
_WIDE_GATED = 4096
"""Columns of a gated pair from which on a program takes 64 of each."""


class TiledLaunchConfig(NamedTuple):
    columns: int
    """Output columns of a program; of a gated pair, columns of each."""
    tile: int
    """Elements of K taken at once; a divisor of K."""
    stages: int
    """Tiles that are being loaded."""


def is_faster(rows: int, weight: torch.Tensor, *, gated: bool) -> bool:
    """Whether `tiled_linear` is faster than cuBLAS for `weight`, [N, K] (measured on an H200, at
    20, 32 and 64 rows).
    """
    columns, k = weight.shape
    is_taken = weight.dtype.itemsize == 2 and weight.is_contiguous() and k % _MIN_TILE == 0
    if not is_taken or not MAX_SLICED_ROWS < rows <= MAX_ROWS:
        return False
    return gated or (k <= _MAX_PLAIN_K and columns >= _MIN_PLAIN_COLUMNS)


def launch_config(columns: int, k: int, *, is_gated: bool) -> TiledLaunchConfig:
    """The launch configuration of a product (measured on an H200, K of 576, 1,024 and 4,096)."""
    if is_gated and (columns >= _WIDE_GATED or k < 1024):
        return TiledLaunchConfig(64, _MIN_TILE, 6)
    return TiledLaunchConfig(32, 128, 5) if k % 128 == 0 else TiledLaunchConfig(32, _MIN_TILE, 6)


def tiled_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool
) -> torch.Tensor:
    """x @ weight^T + bias, or silu(gate) * up of a gated MLP's two projections.

    Args:
        x: [M, K], contiguous, 16-bit floats, 1 <= M <= MAX_ROWS; K a multiple of 64.
        weight: [N, K], contiguous, dtype of `x`; where gated the rows of gate come first.
        bias: [N], dtype of `x`, or None.

    Returns:
        [M, N], where gated [M, N / 2]; accumulated in float32, rounded once.
    """
    rows, k = x.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    launch = launch_config(columns, k, is_gated=gated)
    _tiled_linear_kernel[(cdiv(columns, launch.columns),)](
        out, x, weight, bias, rows, columns, K=k, IS_GATED=gated, ROWS=MAX_ROWS,
        COLUMNS=launch.columns, TILE=launch.tile, num_warps=4, num_stages=launch.stages,
        **launch_options(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _tiled_linear_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    rows: int,
    columns: int,
    K: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    release_next()
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, TILE)
    is_row = (row < rows)[:, None]
    row_at = x + row[:, None] * K + part[None, :]
    # Columns that do not exist read those of the last: cheaper than a mask on each load.
    begin = weight + tl.minimum(column, columns - 1).to(tl.int64)[:, None] * K + part[None, :]
    begin_up = begin + tl.cast(columns, tl.int64) * K
    wait_for_last()
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, TILE):
        values = tl.load(row_at + start, mask=is_row, other=0.0)
        product = tl.dot(values, tl.trans(tl.load(begin + start)), product)
        if IS_GATED:
            up = tl.dot(values, tl.trans(tl.load(begin_up + start)), up)
    store_product(out, product, up, bias, None, None, row, column, rows, columns, IS_GATED, False)
