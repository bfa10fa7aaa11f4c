"""Products of pairs that are sorted by expert and cut into blocks, on a GPU.

A program multiplies one block by one tile of its expert's weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_fp8_rows import Fp8Rows, quantise_rows
from weft.kernels.ops.linear.triton_fp8_weights import GROUP, data_of, widened
from weft.kernels.ops.linear.triton_groups_product import (
    Experts,
    multiply_groups,
    product_launch_config,
)
from weft.kernels.ops.moe.spec import PLAIN_EXPERTS, ExpertParts, StackedWeight
from weft.kernels.ops.moe.tiles import Tile, Tiles
from weft.kernels.ops.moe.triton_parts import store_pairs
from weft.kernels.ops.moe.triton_sort import Blocks
from weft.kernels.shared.copied_tiles import can_copy, copied_tiles
from weft.kernels.shared.dependent_launch import LaunchOptions, release_next, wait_for_last
from weft.kernels.shared.formats.packed_groups import PackedExperts
from weft.kernels.shared.formats.quantised import FP8_GROUP, Fp8Experts
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

MIN_COPIED_ROWS = 128
"""Least pairs of a block for which the copy engine fetches weights, since loads would cost
registers.
"""
MIN_HALVED_ROWS = 128
"""Pairs of a block from which on a block with at most half as many pairs is multiplied as half a
block. For smaller blocks tensor cores would take no less time.
"""
MIN_ROUNDED_ROWS = 64
"""Pairs of a block from which on rows are rounded to FP8, as for a dense layer, if weights are FP8
in blocks. Tensor cores then multiply both as they are; widening weights would bound the rate.
"""


def multiply_sorted(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: StackedWeight,
    shares: torch.Tensor,
    blocks: Blocks,
    added: torch.Tensor | None,
    tiles: Tiles,
    top_k: int,
    options: LaunchOptions,
    *,
    is_gated: bool,
    is_raw: bool = False,
    is_fixed: bool = False,
    more: ExpertParts = PLAIN_EXPERTS,
    rounded: Fp8Rows | None = None,
) -> None:
    """Multiplies sorted pairs by their experts' weights.

    Args:
        out: [P, I] or [P, 2 * I] for gate and up, else [P, H].
        x: [T, H] for gate and up, else [P, I].
        weight: [E, 2 * I, H], rows of gate first, or [E, H, I]. Weights of 4 bits, and FP8 for
            fewer than MIN_ROUNDED_ROWS pairs a block, are widened in registers.
        shares: [T, k] float32; not read for gate and up.
        blocks: The pairs in blocks of `tiles.rows`.
        added: [P, 2 * I], added to gate and up, or None.
        top_k: Pairs of each row of `x`.
        is_raw: Whether gate and up are written side by side, not combined; without biases.
        is_fixed: Whether sums must have one order for all tiles, as they always have for weights in
            floats.
        rounded: The rows of x if they have been rounded already.
    """
    if isinstance(weight, PackedExperts):
        shape = product_launch_config(
            tiles.rows, out.shape[1], weight.first.half, is_gated=is_gated, is_fixed=is_fixed,
            can_split=False, is_nvfp4=weight.first.factors is not None,
        )  # fmt: skip
        if weight.first.is_e2m1 and not shape.slices and not is_fixed:
            # Scales that are powers of two round nothing.
            shape = shape._replace(is_rounded=True)
        given = Experts(blocks, None if is_gated else shares, top_k, more, is_raw)
        bias = more.gate_up_bias if is_gated else more.down_bias
        multiply_groups(
            out, x, weight, shape, bias=bias, residual=added, is_gated=is_gated, experts=given,
            options=options,
        )  # fmt: skip
        return
    experts, columns, depth = weight.shape
    columns = columns // 2 if is_gated else columns
    tile = tiles.up if is_gated else tiles.down
    tile = tile._replace(columns=_columns(weight, tile))
    data, scaling = data_of(weight)
    x_scales, scale_places = None, 0
    if _rounds(x, weight, tiles):
        rounded = quantise_rows(x, has_groups=True) if rounded is None else rounded
        x, x_scales, scale_places = rounded.data, rounded.scales, rounded.scales.shape[1]
        inner = FP8_GROUP
    else:
        # The tables are for elements of two bytes; a multiprocessor's memory holds fewer wider
        # ones.
        inner = min(tile.depth * 2 // x.dtype.itemsize, next_power_of_2(depth))
        if scaling["SCALE_ROWS"]:
            # Deeper tiles take fewer stages, so that the same number of bytes is being loaded.
            tile = tile._replace(stages=max(2, tile.stages * inner // FP8_GROUP))
            inner = FP8_GROUP
    weight_tiles = None
    flat = data.view(-1, depth)
    is_copied = tiles.rows >= MIN_COPIED_ROWS or (is_gated and x_scales is not None)
    if is_copied and can_copy(flat):
        weight_tiles = copied_tiles(flat, tile.columns, inner)
    form = SortedForm(
        depth, top_k, tile.columns, inner, is_gated, is_raw, x.dtype == torch.float32,
        scaling["SCALE_ROWS"],
    )  # fmt: skip
    # Programs that run at the same time share a block's rows and an expert's weights in the cache.
    _sorted_kernel[(cdiv(columns, tile.columns), blocks.expert.shape[0])](
        out, x, data, weight_tiles, shares, blocks, added,
        more.gate_up_bias if is_gated else more.down_bias, columns, experts, x_scales,
        scale_places, scaling["scales"], GATING=more.gating.in_kernels, FORM=form, ROWS=tiles.rows,
        HALF_ROWS=tiles.rows // 2 if tiles.rows >= MIN_HALVED_ROWS else 0,
        num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip


class SortedForm(NamedTuple):
    """What the kernel knows when it is compiled."""

    depth: int
    """K."""
    top_k: int
    """Pairs of each row of the input."""
    columns: int
    """Output columns of a program; of a gated pair so many of each."""
    tile: int
    """Elements of K taken at once."""
    is_gated: bool
    is_raw: bool
    """Whether gate and up are written side by side, not combined."""
    is_exact: bool
    """Whether float32 is multiplied without being rounded to TF32."""
    scale_rows: int
    """As `WeightScales.rows`."""


def _columns(weight: StackedWeight, tile: Tile) -> int:
    """All columns of a program share one block of scales."""
    rows = weight.rows if isinstance(weight, Fp8Experts) else 0
    return min(tile.columns, rows) if rows else tile.columns


def _rounds(x: torch.Tensor, weight: StackedWeight, tiles: Tiles) -> bool:
    is_in_blocks = isinstance(weight, Fp8Experts) and weight.rows > 0
    return is_in_blocks and tiles.rows >= MIN_ROUNDED_ROWS and x.element_size() == 2


@triton.jit
def _sorted_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    weight_tiles: tl.tensor_descriptor,
    shares: tl.tensor,
    blocks: Blocks,
    added: tl.tensor,
    bias: tl.tensor,
    columns: int,
    experts: int,
    x_scales: tl.tensor,
    scale_places: int,
    scales: tl.tensor,
    GATING: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    HALF_ROWS: tl.constexpr,
) -> None:
    """Multiplies one block of pairs by one tile of columns; pair p reads row p // top_k of x. What
    is not gated is multiplied by the pair's share.
    """
    release_next()
    wait_for_last()
    block = tl.program_id(1)
    expert = tl.load(blocks.expert + block).to(tl.int64)
    if expert >= experts:
        return
    begin = tl.load(blocks.begin + block)
    end = tl.load(blocks.end + block)
    rows = x, blocks.order, begin, end, x_scales, scale_places
    matrix = weight, weight_tiles, scales, expert, columns
    ends = bias, added, shares
    # An expert's last block is multiplied as half a block if it has no more pairs.
    if HALF_ROWS > 0 and end - begin <= HALF_ROWS:
        _multiply_block(out, rows, matrix, ends, GATING, FORM, HALF_ROWS)
    else:
        _multiply_block(out, rows, matrix, ends, GATING, FORM, ROWS)


@triton.jit
def _multiply_block(
    out: tl.tensor,
    rows: tl.tuple,
    matrix: tl.tuple,
    ends: tl.tuple,
    GATING: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    x, order, begin_place, end_place, x_scales, scale_places = rows
    weight, weight_tiles, scales, expert, columns = matrix
    bias, added, shares = ends
    is_fp8: tl.constexpr = scales is not None
    K: tl.constexpr = FORM.depth
    TOP_K: tl.constexpr = FORM.top_k
    COLUMNS: tl.constexpr = FORM.columns
    TILE: tl.constexpr = FORM.tile
    IS_GATED: tl.constexpr = FORM.is_gated
    SCALE_ROWS: tl.constexpr = FORM.scale_rows
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    place = begin_place + tl.arange(0, ROWS)
    is_pair = place < end_place
    pair = tl.load(order + place, mask=is_pair, other=0).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, TILE)
    row_at = x + (pair // TOP_K * K)[:, None]
    weight_rows = columns * 2 if IS_GATED else columns
    begin = weight + ((expert * weight_rows + tl.minimum(column, columns - 1)) * K)[:, None]
    up_at = begin + tl.cast(columns, tl.int64) * K
    first = expert.to(tl.int32) * weight_rows + tl.program_id(0) * COLUMNS
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    at_scale = scales
    at_scale_up = scales
    if SCALE_ROWS > 0:
        # A program's columns share their scales.
        of_expert = scales + expert * tl.cdiv(weight_rows, SCALE_ROWS) * NUM_GROUPS
        place = tl.program_id(0) * COLUMNS
        at_scale = of_expert + place // SCALE_ROWS * NUM_GROUPS
        at_scale_up = of_expert + (place + columns) // SCALE_ROWS * NUM_GROUPS
    for start in range(0, K, TILE):
        at = (start + part)[None, :]
        values = tl.load(row_at + at, mask=is_pair[:, None] & (at < K), other=0.0)
        of_rows = 1.0
        if x_scales is not None:
            # [K / GROUP, T]: each group of a row has a scale of its own.
            of_group = x_scales + start // GROUP * scale_places
            of_rows = tl.load(of_group + pair // TOP_K, mask=is_pair, other=0.0)[:, None]
        if weight_tiles is not None:
            # For columns that do not exist it fetches another expert's weights, whose results are
            # not stored.
            tile = weight_tiles.load([first, start])
        else:
            tile = tl.load(begin + at, mask=at < K, other=0.0)
        product = _dot(values, tile, product, at_scale, start // GROUP, of_rows, is_fp8, FORM)
        if IS_GATED:
            if weight_tiles is not None:
                tile = weight_tiles.load([first + columns, start])
            else:
                tile = tl.load(up_at + at, mask=at < K, other=0.0)
            up = _dot(values, tile, up, at_scale_up, start // GROUP, of_rows, is_fp8, FORM)
    if is_fp8 and SCALE_ROWS == 0:
        of_columns = scales + expert * weight_rows + tl.minimum(column, columns - 1)
        product *= tl.load(of_columns)[None, :]
        if IS_GATED:
            up *= tl.load(of_columns + columns)[None, :]
    store_pairs(
        out, product, up, bias, added, None if IS_GATED else shares, pair, is_pair, column, columns,
        expert * weight_rows, GATING, IS_GATED, FORM.is_raw, False,
    )  # fmt: skip


@triton.jit
def _dot(
    values: tl.tensor,
    tile: tl.tensor,
    total: tl.tensor,
    at_scale: tl.tensor,
    group: int,
    of_rows: tl.tensor,
    IS_FP8: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Adds a product to `total`; for FP8 in blocks, the product of one group times its scales."""
    if IS_FP8 and values.dtype != tile.dtype:
        tile = widened(tile, values.dtype)
    if FORM.scale_rows > 0:
        total += tl.dot(values, tl.trans(tile)) * (of_rows * tl.load(at_scale + group))
    elif FORM.is_exact:
        total = tl.dot(values, tl.trans(tile), total, input_precision="ieee")
    else:
        total = tl.dot(values, tl.trans(tile), total)
    return total
