"""Products of sorted pairs with FP8 weights in blocks, by rows in FP8: few pairs of a block.

The weight is the first operand of the instruction, whose second one may be as narrow as a block.
Tensor cores take both from shared memory as they are, so that a program does little but wait for
its weights. Gate and up can round their result for the second product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_fp8_rows import Fp8Rows, empty_rows, group_scale, in_fp8
from weft.kernels.ops.linear.triton_fp8_weights import GROUP
from weft.kernels.ops.moe.spec import ExpertParts, StackedWeight
from weft.kernels.ops.moe.tiles import Tile
from weft.kernels.ops.moe.triton_parts import gated, store_pairs
from weft.kernels.ops.moe.triton_sort import Blocks
from weft.kernels.shared.copied_tiles import can_copy, copied_tiles
from weft.kernels.shared.dependent_launch import LaunchOptions, release_next, wait_for_last
from weft.kernels.shared.formats.quantised import FP8_GROUP, Fp8Experts

IS_COPIED = (True, False)
"""Whether the copy engine fetches weights of gate and up, and of down."""


def can_multiply_rounded(
    x: torch.Tensor, w13: StackedWeight, w2: StackedWeight, more: ExpertParts
) -> bool:
    """Whether the products below take these experts and x, [T, H]."""
    return (
        isinstance(w13, Fp8Experts)
        and isinstance(w2, Fp8Experts)
        and x.element_size() == 2
        and more.biases is None
        and not any(size % FP8_GROUP for size in w2.shape[1:])
        and w13.rows == w2.rows == FP8_GROUP
    )


def gate_up_rounded(
    x: Fp8Rows,
    weight: Fp8Experts,
    blocks: Blocks,
    rows: int,
    tile: Tile,
    top_k: int,
    options: LaunchOptions,
    dtype: torch.dtype,
    more: ExpertParts,
) -> torch.Tensor | Fp8Rows:
    """Gate and up of sorted pairs, combined: [P, I] in `dtype`, or rounded if a program has whole
    groups of columns.

    Args:
        x: Rows of [T, H] with scales of groups.
        weight: [E, 2 * I, H], rows of gate first.
        rows: Pairs of a block, a power of two from 8 on.
        top_k: Pairs of each row of `x`.
    """
    pairs, width, device = blocks.order.shape[0], weight.shape[1] // 2, x.data.device
    if tile.columns == FP8_GROUP:
        inner = empty_rows(pairs, width, device, has_groups=True)
        _launch(inner, x, weight, None, blocks, rows, tile, top_k, options, more)
        return inner
    out = torch.empty((pairs, width), dtype=dtype, device=device)
    _launch(out, x, weight, None, blocks, rows, tile, top_k, options, more)
    return out


def down_rounded(
    inner: Fp8Rows,
    weight: Fp8Experts,
    shares: torch.Tensor,
    blocks: Blocks,
    rows: int,
    tile: Tile,
    options: LaunchOptions,
    dtype: torch.dtype,
    more: ExpertParts,
) -> torch.Tensor:
    """[P, H]: products of pairs' rows with their experts' [E, H, I], times the pairs' shares."""
    pairs, hidden = blocks.order.shape[0], weight.shape[1]
    out = torch.empty((pairs, hidden), dtype=dtype, device=inner.data.device)
    _launch(out, inner, weight, shares, blocks, rows, tile, 1, options, more)
    return out


def _launch(
    out: torch.Tensor | Fp8Rows,
    x: Fp8Rows,
    weight: Fp8Experts,
    shares: torch.Tensor | None,
    blocks: Blocks,
    rows: int,
    tile: Tile,
    top_k: int,
    options: LaunchOptions,
    more: ExpertParts,
) -> None:
    experts, weight_rows, k = weight.shape
    is_gated = shares is None
    columns = weight_rows // 2 if is_gated else weight_rows
    flat, weight_tiles = weight.data.view(-1, k), None
    if IS_COPIED[not is_gated] and can_copy(flat):
        weight_tiles = copied_tiles(flat, tile.columns, FP8_GROUP)
    target: tuple[torch.Tensor, torch.Tensor | None, int]
    if isinstance(out, Fp8Rows):
        target = out.data, out.scales, out.scales.shape[1]
    else:
        target = out, None, 0
    # Programs that run at the same time share a block's rows and an expert's weights in the cache.
    _rounded_kernel[(columns // tile.columns, blocks.expert.shape[0])](
        *target, x.data, x.scales, x.scales.shape[1], weight.data, weight_tiles,
        weight.scales, shares, blocks, columns, experts, GATING=more.gating.in_kernels,
        K=k, TOP_K=top_k, ROWS=rows, COLUMNS=tile.columns,
        num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip


@triton.jit(do_not_specialize=["places", "x_places"])
def _rounded_kernel(
    out: tl.tensor,
    out_scales: tl.tensor,
    places: int,
    x: tl.tensor,
    x_scales: tl.tensor,
    x_places: int,
    weight: tl.tensor,
    weight_tiles: tl.tensor_descriptor,
    scales: tl.tensor,
    shares: tl.tensor,
    blocks: Blocks,
    columns: int,
    experts: int,
    GATING: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One block of pairs by COLUMNS columns, of gate and up both where there are no shares. Pair p
    reads row p // TOP_K of x.
    """
    IS_GATED: tl.constexpr = shares is None
    GROUPS: tl.constexpr = K // GROUP
    release_next()
    block = tl.program_id(1)
    wait_for_last()
    expert = tl.load(blocks.expert + block)
    if expert >= experts:
        return
    place = tl.load(blocks.begin + block) + tl.arange(0, ROWS)
    is_pair = place < tl.load(blocks.end + block)
    pair = tl.load(blocks.order + place, mask=is_pair, other=0)
    of_pair = pair // TOP_K
    part = tl.arange(0, GROUP)
    row_at = x + (of_pair.to(tl.int64) * K)[:, None] + part[None, :]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weight_rows = columns * 2 if IS_GATED else columns
    first = expert * weight_rows + tl.program_id(0) * COLUMNS
    begin = weight + ((expert.to(tl.int64) * weight_rows + column) * K)[:, None] + part[None, :]
    up_at = begin + tl.cast(columns, tl.int64) * K
    # A program's columns share their scales.
    at_scale = scales + (first // GROUP).to(tl.int64) * GROUPS
    at_scale_up = at_scale + columns // GROUP * GROUPS
    at_row_scale = x_scales + of_pair
    product = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = product
    # Scales are loaded a group ahead: they are not copied as tiles are.
    of_rows = tl.load(at_row_scale, mask=is_pair, other=0.0)
    of_gate, of_up = tl.load(at_scale), 0.0
    if IS_GATED:
        of_up = tl.load(at_scale_up)
    for group in range(GROUPS):
        later = tl.minimum(group + 1, GROUPS - 1)
        later_rows = tl.load(at_row_scale + later * x_places, mask=is_pair, other=0.0)
        later_gate = tl.load(at_scale + later)
        start = group * GROUP
        values = tl.trans(tl.load(row_at + start, mask=is_pair[:, None], other=0.0))
        if weight_tiles is not None:
            tile = weight_tiles.load([first, start])
        else:
            tile = tl.load(begin + start)
        found = tl.dot(tile, values)
        if IS_GATED:
            later_up = tl.load(at_scale_up + later)
            if weight_tiles is not None:
                tile = weight_tiles.load([first + columns, start])
            else:
                tile = tl.load(up_at + start)
            up += tl.dot(tile, values) * (of_rows * of_up)[None, :]
            of_up = later_up
        product += found * (of_rows * of_gate)[None, :]
        of_rows, of_gate = later_rows, later_gate
    if out_scales is None:
        store_pairs(
            out, product, up, None, None, shares, pair.to(tl.int64), is_pair, column, columns,
            expert, GATING, IS_GATED, False, True,
        )  # fmt: skip
    else:
        inner = gated(product, up, GATING)
        scale, inverse = group_scale(tl.max(tl.abs(inner), axis=0))
        tl.store(out_scales + tl.program_id(0) * places + pair, scale, mask=is_pair)
        to = out + pair.to(tl.int64)[None, :] * columns + column[:, None]
        tl.store(to, in_fp8(inner, inverse[None, :], out.dtype.element_ty), mask=is_pair[None, :])
