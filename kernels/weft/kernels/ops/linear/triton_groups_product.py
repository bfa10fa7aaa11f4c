"""Products of floats with weights of 4 bits in groups, on a GPU: dense, or of sorted experts.

Numbers become 16-bit floats in registers, exactly, and are the first operand of tensor cores. Each
group is multiplied separately, and scales and offsets are applied to its sums in float32, so that
neither weights nor activations are rounded. For many rows, weights are first multiplied by their
scales and rounded to 16 bits. With `is_fixed` they never are, and only then is a row's result
independent of the other rows. Numbers of NVFP4 are always multiplied by their scales, which rounds
nothing; the factors of rows are applied to sums.

For few rows, warps walk slices of K whose sums are added at the end, as in `sliced_linear`. For
more rows, programs compute tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_groups_unpack import (
    GroupsTensors,
    begin_of_expert,
    groups_arguments,
    power_of_two,
    stored_scales,
    unpacked,
    unpacked_scaled,
)
from weft.kernels.ops.moe.spec import PLAIN_EXPERTS, ExpertParts
from weft.kernels.ops.moe.triton_parts import store_pairs
from weft.kernels.ops.moe.triton_sort import Blocks
from weft.kernels.shared.dependent_launch import (
    LaunchOptions,
    launch_options,
    release_next,
    wait_for_last,
)
from weft.kernels.shared.formats.packed_groups import PackedExperts, PackedGroups
from weft.kernels.shared.sm90 import on_sm90


class GroupsLaunchConfig(NamedTuple):
    """What a program computes, and how it covers K."""

    rows: int
    columns: int
    """Output columns of a program; of a gated pair so many of each."""
    slices: int
    """Slices of K, with a warp each; 0: the program's warps share tiles."""
    warps: int
    stages: int
    """Parts of K that are being loaded."""
    splits: int = 1
    """Number of programs that share K; a further launch sums their parts. 1 for experts and where
    gated.
    """
    is_rounded: bool = False
    """Whether weights are rounded to 16-bit floats in registers; only without slices."""


_SUMMED = 1024
"""Columns whose parts a program sums."""
_FEW_COLUMNS = 8192
"""Columns up to which few programs would have a tile each."""
MAX_SLICED_ROWS = 16
"""Most rows for which warps take slices of K."""
MAX_GATED_ROWS = 128
"""Most rows for which the product should also gate."""


def product_launch_config(
    rows: int,
    columns: int,
    half: int,
    *,
    is_gated: bool,
    is_fixed: bool,
    can_split: bool = True,
    is_nvfp4: bool = False,
) -> GroupsLaunchConfig:
    """The launch configuration of a product (measured on an H100, K of 4,096 and 14,336; NVFP4's
    experts on an H200).

    Args:
        rows: Rows; of experts, rows of a block.
        half: Half the columns of a block of the weight.
        is_fixed: Whether each sum must be one chain over K, the same for any number of rows.
        is_nvfp4: Whether the weight is in NVFP4, whose slices of K are slow.
    """
    is_short, splits = half < 64, can_split and not is_fixed and columns <= _FEW_COLUMNS
    if rows <= MAX_SLICED_ROWS and not is_fixed:
        few = 8 if rows <= 8 else 16
        if is_nvfp4 and not can_split:
            return GroupsLaunchConfig(16, 64, 0, 4, 4)
        if is_short and not can_split:
            return (
                GroupsLaunchConfig(few, 32, 4, 4, 4)
                if few == 8
                else GroupsLaunchConfig(few, 128, 0, 4, 3)
            )
        if is_gated:
            few_shape = (16, 4, 4, 6 if is_short else 4) if few == 8 else (64, 4, 4, 3)
            return GroupsLaunchConfig(few, *few_shape)
        if is_short:
            return (
                GroupsLaunchConfig(few, 16, 4, 4, 6, 4)
                if splits
                else GroupsLaunchConfig(few, 16, 8, 8, 4)
            )
        if few == 8:
            return GroupsLaunchConfig(8, 16, 4, 4, 6)
        return GroupsLaunchConfig(16, 32, 4, 4, *((4, 2) if splits else (5, 1)))
    if rows <= 64 and splits and not is_gated:
        return GroupsLaunchConfig(max(16, triton.next_power_of_2(rows)), 128, 0, 8, 4, 8)
    if rows <= 64 or is_gated or is_short:
        few = min(64, max(16, triton.next_power_of_2(rows)))
        return GroupsLaunchConfig(few, 64, 0, 4, 4 if is_gated or not can_split else 6)
    if splits:
        return GroupsLaunchConfig(128, 128, 0, 8, 3, 2)
    if rows > MAX_GATED_ROWS and not is_fixed:
        return GroupsLaunchConfig(256, 128, 0, 8, 2, is_rounded=True)
    return GroupsLaunchConfig(128, 64, 0, 4, 4)


class Experts(NamedTuple):
    """The expert by whose weights each row is multiplied."""

    blocks: Blocks
    """Pairs in blocks of the launch's rows."""
    shares: torch.Tensor | None
    """[T, k] float32; None for gate and up."""
    top_k: int
    """Pairs of each row of the input."""
    more: ExpertParts
    is_raw: bool = False
    """Whether gate and up are written side by side, not combined; without biases."""


def multiply_groups(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: PackedGroups | PackedExperts,
    launch: GroupsLaunchConfig,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    is_gated: bool = False,
    experts: Experts | None = None,
    options: LaunchOptions | None = None,
) -> None:
    """x @ weight^T + bias + residual, or the gated product of a pair of matrices.

    Args:
        out: [M, N], where gated [M, N / 2], contiguous: receives the result, rounded once; may be
            the residual. Of experts [P, ...], a row for each pair, times its share unless gated.
        x: [M, K], contiguous, 16-bit floats.
        weight: Where gated the rows of gate come first.
        bias: [N], of experts [E, N], or None.
        residual: [M, N] or None; of a gated pair of experts [P, N], added before the activation.
        experts: The expert of each row; None: the weight is a single matrix.
    """
    first = weight.first if isinstance(weight, PackedExperts) else weight
    columns, k = (out.shape[1], first.columns)
    given: dict[str, Any]
    if experts is None:
        many, more = triton.cdiv(x.shape[0], launch.rows), PLAIN_EXPERTS
        given = {"blocks": None, "shares": None, "experts": 1, "TOP_K": 1, "IS_RAW": False}
    else:
        blocks, more = experts.blocks, experts.more
        many = blocks.expert.shape[0]
        given = {"blocks": blocks, "shares": experts.shares, "experts": weight.shape[0]}
        given |= {"TOP_K": experts.top_k, "IS_RAW": experts.is_raw}
        if experts.is_raw:
            columns //= 2
    is_split = launch.splits > 1
    assert not (is_split and is_gated)
    parts, target = (launch.splits, x.shape[0], first.rows), out
    if is_split:
        target = torch.empty(parts, dtype=torch.float32, device=x.device)
    _groups_kernel[(triton.cdiv(columns, launch.columns), many, launch.splits)](
        target,
        x,
        bias=None if is_split else bias,
        residual=None if is_split else residual,
        rows=x.shape[0],
        columns=columns,
        K=k,
        IS_GATED=is_gated,
        **groups_arguments(weight),
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        SLICES=launch.slices,
        STAGES=launch.stages,
        SPLITS=launch.splits,
        IS_ROUNDED=launch.is_rounded,
        num_warps=launch.warps,
        **given,
        GATING=more.gating.in_kernels,
        **(launch_options(x.device) if options is None else options),
    )
    if is_split:
        sum_parts(out, target, bias, residual)


def sum_parts(
    out: torch.Tensor,
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Sums the parts of a product in order, multiplies them by scales, adds a bias and a residual,
    and rounds once.

    Args:
        out: [M, N]: receives the result; may be the residual.
        parts: [splits, at least M, N] float32, or a single part in int32, which has scales.
        bias: [N] or None.
        residual: [M, N] or None.
        scales: [M] and [N] float32, of the rows and of the columns; or None.
    """
    splits, _, columns = parts.shape
    assert scales is None or splits == 1
    _sum_kernel[(out.shape[0], triton.cdiv(columns, _SUMMED))](
        out,
        parts,
        bias,
        residual,
        *(scales or (None, None)),
        columns,
        parts.stride(0),
        SPLITS=splits,
        TILE=_SUMMED,
        num_warps=4,
        **launch_options(out.device),
    )


@triton.jit(do_not_specialize=["rows"])
def _groups_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: GroupsTensors,
    bias: tl.tensor,
    residual: tl.tensor,
    blocks: Blocks | None,
    shares: tl.tensor,
    rows: int,
    columns: int,
    width: int,
    experts: int,
    GATING: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_RAW: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
) -> None:
    """Parts of a split product are written as they are, to [SPLITS, M, N] float32."""
    release_next()
    wait_for_last()
    BLOCKS: tl.constexpr = (K + 2 * FORM.half - 1) // (2 * FORM.half)
    weight_rows = columns * 2 if IS_GATED else columns
    block = tl.program_id(1)
    data, scales, offsets = weight.data, weight.scales, weight.offsets
    if blocks is None:
        row = block * ROWS + tl.arange(0, ROWS)
        exists = row < rows
        first_row = 0
    else:
        expert = tl.load(blocks.expert + block)
        if expert >= experts:
            return
        place = tl.load(blocks.begin + block) + tl.arange(0, ROWS)
        exists = place < tl.load(blocks.end + block)
        row = tl.load(blocks.order + place, mask=exists, other=0)
        first_row = expert * weight_rows
        at_data, at_scale = begin_of_expert(expert, weight_rows, width, BLOCKS, FORM)
        data += at_data
        scales += at_scale
        if offsets is not None:
            offsets += at_scale
    row = row.to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Columns that do not exist read those of the last: cheaper than a mask on each load.
    last = tl.minimum(column, columns - 1)
    row_at = x + row // TOP_K * K
    STEP: tl.constexpr = SLICES if SLICES > 0 else 1
    OWN: tl.constexpr = (BLOCKS + STEP * SPLITS - 1) // (STEP * SPLITS) * STEP
    begin = tl.program_id(2) * OWN
    end = tl.minimum(begin + OWN, BLOCKS)
    product, up = _walk(
        row_at, exists, data, scales, offsets, last, columns, width, begin, end, K, IS_GATED, FORM,
        SLICES, STAGES, IS_ROUNDED,
    )  # fmt: skip
    if weight.factors is not None:
        product *= tl.load(weight.factors + first_row + last)[:, None]
        if IS_GATED:
            up *= tl.load(weight.factors + first_row + columns + last)[:, None]
    if SPLITS > 1:
        row += tl.program_id(2) * rows
    store_pairs(
        out, product, up, bias, residual, shares, row, exists, column, columns, first_row, GATING,
        IS_GATED, IS_RAW, True,
    )  # fmt: skip


@triton.jit
def _walk(
    row_at: tl.tensor,
    exists: tl.tensor,
    data: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    column: tl.tensor,
    columns: int,
    width: int,
    first_block: int,
    end: int,
    K: tl.constexpr,
    IS_GATED: tl.constexpr,
    FORM: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """[COLUMNS, ROWS] of one projection, and of the second one of a gated pair, over some blocks.

    With SLICES tiles have a dimension more, the first one, of a block for each slice.
    """
    HALF: tl.constexpr = FORM.half
    BLOCKS: tl.constexpr = (K + 2 * HALF - 1) // (2 * HALF)
    STEP: tl.constexpr = SLICES if SLICES > 0 else 1
    IS_WHOLE: tl.constexpr = K % (2 * HALF * STEP) == 0
    PER_BLOCK: tl.constexpr = 2 * HALF // FORM.unit
    ROWS: tl.constexpr = row_at.shape[0]
    COLUMNS: tl.constexpr = column.shape[0]
    part = tl.arange(0, HALF)[None, :]
    begin = data + column.to(tl.int64)[:, None] * (BLOCKS * HALF) + part
    row_at = row_at[:, None] + part
    is_row = exists[:, None]
    if SLICES > 0:
        slice_ = tl.arange(0, SLICES)
        begin, row_at, is_row, part = begin[None], row_at[None], is_row[None], part[None]
        product = tl.zeros([SLICES, COLUMNS, ROWS], tl.float32)
        block = first_block + slice_
        at_scale = (block * PER_BLOCK)[:, None] * width + column[None, :]
        is_block = (block < BLOCKS)[:, None]
    else:
        product = tl.zeros([COLUMNS, ROWS], tl.float32)
        # Some programs that share K may have no block; they read the first scales nevertheless.
        at_scale = tl.minimum(first_block, BLOCKS - 1) * PER_BLOCK * width + column
        is_block = True
    up = product
    begin_up = begin + tl.cast(columns, tl.int64) * (BLOCKS * HALF)
    given = stored_scales(scales, offsets, at_scale, is_block, width, FORM)
    given_up = given
    if IS_GATED:
        given_up = stored_scales(scales, offsets, at_scale + columns, is_block, width, FORM)
    for first in tl.range(first_block, end, STEP, num_stages=STAGES):
        if SLICES > 0:
            block = first + slice_
            at = (block * HALF)[:, None, None]
            is_tile = (block < BLOCKS)[:, None, None]
            is_next = (block + SLICES < BLOCKS)[:, None]
        else:
            at = first * HALF
            is_tile = True
            is_next = first + 1 < BLOCKS
        low, high = _rows(row_at, 2 * at, part, is_row, K, HALF, IS_WHOLE)
        # Scales of the next blocks are loaded by hand: the compiler does not load them ahead.
        at_scale += STEP * PER_BLOCK * width
        tile = _bytes(begin + at, is_tile, IS_WHOLE or SLICES == 0)
        following = stored_scales(scales, offsets, at_scale, is_next, width, FORM)
        product = _add_block(product, tile, low, high, given, offsets is not None, IS_ROUNDED, FORM)
        given = following
        if IS_GATED:
            following = stored_scales(scales, offsets, at_scale + columns, is_next, width, FORM)
            tile = _bytes(begin_up + at, is_tile, IS_WHOLE or SLICES == 0)
            up = _add_block(up, tile, low, high, given_up, offsets is not None, IS_ROUNDED, FORM)
            given_up = following
    if SLICES > 0:
        product, up = tl.sum(product, axis=0), tl.sum(up, axis=0)
    return product, up


@triton.jit
def _rows(
    row_at: tl.tensor,
    start: tl.tensor,
    part: tl.tensor,
    is_row: tl.tensor,
    K: tl.constexpr,
    HALF: tl.constexpr,
    IS_WHOLE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Columns of the rows that belong to the two halves of a block, turned; zero beyond the rows
    and beyond K.
    """
    if IS_WHOLE:
        low = tl.load(row_at + start, mask=is_row, other=0.0)
        high = tl.load(row_at + (start + HALF), mask=is_row, other=0.0)
    else:
        low = tl.load(row_at + start, mask=is_row & (start + part < K), other=0.0)
        high = tl.load(row_at + (start + HALF), mask=is_row & (start + HALF + part < K), other=0.0)
    if len(low.shape) == 3:
        low, high = tl.permute(low, (0, 2, 1)), tl.permute(high, (0, 2, 1))
    else:
        low, high = tl.trans(low), tl.trans(high)
    return low, high


@triton.jit
def _bytes(at: tl.tensor, exists: tl.tensor, IS_WHOLE: tl.constexpr) -> tl.tensor:
    return tl.load(at) if IS_WHOLE else tl.load(at, mask=exists, other=0)


@triton.jit
def _add_block(
    total: tl.tensor,
    tile: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    given: tl.tuple,
    HAS_OFFSETS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Adds a block's product with its columns of the rows to `total`. With IS_ROUNDED weights are
    scaled and rounded first. `given` is from `stored_scales`.
    """
    scale, offset, scale_high, offset_high = given
    IS_E2M1: tl.constexpr = FORM.is_e2m1
    if IS_E2M1 and scale.dtype == tl.int32:
        lower, upper = unpacked_scaled(tile, scale, low.dtype)
        return tl.dot(upper, high, tl.dot(lower, low, total))
    lower, upper = unpacked(tile, low.dtype, IS_E2M1)
    zeros = tl.zeros(total.shape, tl.float32)
    if IS_ROUNDED:
        if IS_E2M1 and on_sm90() and low.dtype == tl.bfloat16:
            # Exact: a power of two changes the exponent alone.
            lower *= _wide(scale, IS_E2M1).to(tl.bfloat16)
            upper *= _wide(scale_high, IS_E2M1).to(tl.bfloat16)
        else:
            lower = lower.to(tl.float32) * _wide(scale, IS_E2M1)
            upper = upper.to(tl.float32) * _wide(scale_high, IS_E2M1)
        if HAS_OFFSETS:
            lower += _moved(offset, scale)
            upper += _moved(offset_high, scale_high)
        total = tl.dot(lower.to(low.dtype), low, total)
        total = tl.dot(upper.to(low.dtype), high, total)
    elif FORM.unit == FORM.half:
        # Each half of a block has a scale of its own.
        total += tl.dot(lower, low, zeros) * _wide(scale, IS_E2M1)
        total += tl.dot(upper, high, zeros) * _wide(scale_high, IS_E2M1)
        if HAS_OFFSETS:
            ones = tl.full(tile.shape, 1.0, low.dtype)
            total += tl.dot(ones, low, zeros) * _moved(offset, scale)
            total += tl.dot(ones, high, zeros) * _moved(offset_high, scale_high)
    else:
        total += tl.dot(upper, high, tl.dot(lower, low, zeros)) * _wide(scale, IS_E2M1)
        if HAS_OFFSETS:
            ones = tl.full(tile.shape, 1.0, low.dtype)
            sums = tl.dot(ones, high, tl.dot(ones, low, zeros))
            total += sums * _moved(offset, scale)
    return total


@triton.jit
def _wide(scale: tl.tensor, IS_E2M1: tl.constexpr) -> tl.tensor:
    """[..., COLUMNS, 1] float32."""
    wide = power_of_two(scale) if IS_E2M1 else scale.to(tl.float32)
    return tl.expand_dims(wide, -1)


@triton.jit
def _moved(offset: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """The offset plus 8 scales, since numbers here are 8 less than they are stored."""
    return tl.expand_dims(offset.to(tl.float32) + 8.0 * scale.to(tl.float32), -1)


@triton.jit
def _sum_kernel(
    out: tl.tensor,
    parts: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    row_scales: tl.tensor,
    scales: tl.tensor,
    columns: int,
    stride: int,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Sums the parts of a row's product in order, or scales the only one, and adds bias and
    residual.
    """
    release_next()
    wait_for_last()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < columns
    at = row * columns + column
    if scales is not None:
        scale = tl.load(row_scales + row) * tl.load(scales + column, mask=mask, other=0.0)
        total = tl.load(parts + at, mask=mask, other=0).to(tl.float32) * scale
    else:
        total = tl.zeros([TILE], tl.float32)
        for split in tl.static_range(SPLITS):
            part = parts + tl.cast(split, tl.int64) * stride + at
            total += tl.load(part, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
