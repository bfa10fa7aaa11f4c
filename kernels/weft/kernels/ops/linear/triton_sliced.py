"""Linear layers of 3 to 16 rows on a GPU, by tensor cores with sliced K.

A program owns a few columns and walks all of K, with a slice of it for each warp. All warps load
and multiply at once, and their parts are summed at the end (sliced-K, as in CUTLASS). So even few
columns keep many loads running. A row's result does not depend on the other rows, and repeats.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_epilogue import residual_of, store_product
from weft.kernels.ops.lora.triton_product import (
    NOTHING,
    ProductAddition,
    ToColumns,
    added_to_columns,
    wait_for_ranks,
)
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

MAX_ROWS = 16
"""Rows of a tensor core instruction; `tiled_linear` or cuBLAS take more."""
_TILE = 256
_MANY_COLUMNS = 4096
"""Columns from which on a program takes twice as many."""
_LONG = 2048
"""K from which on there are eight slices, unless the slices of a gated pair share the memory."""


class SlicedLaunchConfig(NamedTuple):
    columns: int
    """Output columns of a program."""
    slices: int
    """Number of slices and of warps."""
    tile: int
    """Elements of a slice taken at once."""


def launch_config(columns: int, k: int, *, is_gated: bool) -> SlicedLaunchConfig:
    """The launch of a product (measured on an H200, at 6 and 16 rows, K of 576 to 3,072)."""
    slices = 8 if k >= _LONG and not is_gated else 4
    slices = min(slices, next_power_of_2(cdiv(k, _TILE)))
    is_wide = columns >= _MANY_COLUMNS and not is_gated and slices <= 4
    return SlicedLaunchConfig(32 if is_wide else 16, slices, _TILE)


def sliced_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    *,
    gated: bool,
    launch: SlicedLaunchConfig | None = None,
    added: ProductAddition | None = None,
) -> None:
    """`small_linear` into `out`, for 1 <= M <= MAX_ROWS.

    Args:
        x: [M, K].
        weight: [N, K].
        bias: [N], or None.
        residual: [M, N], or None.
        out: [M, N], where gated [M, N / 2].
        added: What adapters add, where gated before the activation; or None.
    """
    (rows, k), columns = x.shape, out.shape[1]
    launch = launch or launch_config(columns, k, is_gated=gated)
    _sliced_linear_kernel[(cdiv(columns, launch.columns),)](
        out,
        x,
        weight,
        bias,
        residual,
        rows,
        columns,
        K=k,
        IS_GATED=gated,
        **(NOTHING if added is None else added.arguments()),
        ROWS=MAX_ROWS if rows > MAX_ROWS // 2 else MAX_ROWS // 2,
        COLUMNS=launch.columns,
        TILE=launch.tile,
        SLICES=launch.slices,
        num_warps=launch.slices,
        **launch_options(x.device),
    )


@triton.jit(do_not_specialize=["rows", "layer"])
def _sliced_linear_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    rows: int,
    columns: int,
    added: ToColumns | None,
    layer: int,
    K: tl.constexpr,
    IS_GATED: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    SLICES: tl.constexpr,
) -> None:
    release_next()
    STEP: tl.constexpr = SLICES * TILE
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # [SLICES, 1, TILE]: the elements of K that the slices take at once.
    part = tl.arange(0, SLICES)[:, None, None] * TILE + tl.arange(0, TILE)[None, None, :]
    # Columns beyond the last one read the last one, which is cheaper than a mask on each load.
    begin = weight + tl.minimum(column, columns - 1).to(tl.int64)[None, :, None] * K
    begin_up = begin + tl.cast(columns, tl.int64) * K
    # The first tiles of the weight are loaded while the preceding kernel ends.
    tile = _tile(begin, part, 0, K, STEP)
    if IS_GATED:
        tile_up = _tile(begin_up, part, 0, K, STEP)
    row = tl.arange(0, ROWS)
    if added is not None:
        given, given_up = wait_for_ranks(added, layer, row, rows, column, columns, IS_GATED, ADDED)
    else:
        wait_for_last()
    before = residual_of(residual, row, column, rows, columns, IS_GATED)
    values = _rows_turned(x, row, rows, part, K)
    product = tl.dot(tile, values, tl.zeros([SLICES, COLUMNS, ROWS], tl.float32))
    if IS_GATED:
        up = tl.dot(tile_up, values, tl.zeros([SLICES, COLUMNS, ROWS], tl.float32))
    for start in tl.static_range(STEP, K, STEP):
        values = _rows_turned(x, row, rows, part + start, K)
        product = tl.dot(_tile(begin, part, start, K, STEP), values, product)
        if IS_GATED:
            up = tl.dot(_tile(begin_up, part, start, K, STEP), values, up)
    total = tl.sum(product, axis=0)
    total_up = total
    if IS_GATED:
        total_up = tl.sum(up, axis=0)
    if added is not None:
        total += added_to_columns(added, *given, row, rows, column, ADDED)
        if IS_GATED:
            total_up += added_to_columns(added, *given_up, row, rows, column + columns, ADDED)
    store_product(
        out, total, total_up, bias, residual, before, row, column, rows, columns, IS_GATED, True
    )  # fmt: skip


@triton.jit
def _tile(
    begin: tl.tensor, part: tl.tensor, start: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr
) -> tl.tensor:
    """[SLICES, COLUMNS, TILE] of the weight, zero beyond K."""
    if start + STEP <= K:
        tile = tl.load(begin + part + start)
    else:
        tile = tl.load(begin + part + start, mask=part + start < K, other=0.0)
    return tile


@triton.jit
def _rows_turned(
    x: tl.tensor, row: tl.tensor, rows: int, part: tl.tensor, K: tl.constexpr
) -> tl.tensor:
    """[SLICES, TILE, ROWS] of the rows, zero beyond them and beyond K."""
    mask = (row < rows)[None, :, None] & (part < K)
    values = tl.load(x + row[None, :, None] * K + part, mask=mask, other=0.0)
    return tl.permute(values, (0, 2, 1))
