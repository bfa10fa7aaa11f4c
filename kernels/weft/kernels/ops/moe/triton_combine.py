"""Sums each row's experts on a GPU, with what adapters add and the norm that follows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_fp8_rows import Fp8Rows, store_fp8_row
from weft.kernels.ops.linear.triton_fp8_weights import GROUP
from weft.kernels.ops.lora.triton_fold import ranks_at_once
from weft.kernels.ops.lora.triton_parts import AdapterRows
from weft.kernels.ops.moe.triton_lora_pairs import (
    FOLDED,
    NOTHING,
    Folded,
    rows_of,
    summed_ranks,
    times_unit,
    unit_of,
)
from weft.kernels.shared.dependent_launch import LaunchOptions, release_next, wait_for_last
from weft.kernels.shared.formats.quantised import FP8_GROUP
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2


class NormAfter(NamedTuple):
    """The norm that follows an addition to the stream."""

    stream: torch.Tensor
    """[T, H], contiguous; becomes the sum."""
    weight: torch.Tensor
    """[H]: weight of the norm."""
    eps: float
    rounded: Fp8Rows | None = None
    """Receives the norm's result in FP8 as well."""


def combine(
    products: torch.Tensor,
    added: torch.Tensor | None,
    folded: Folded | None,
    options: LaunchOptions,
    top_k: int,
    residual: torch.Tensor | None,
    after: NormAfter | None,
    *,
    is_fixed: bool,
    share: tuple[torch.Tensor, int] | None = None,
) -> torch.Tensor:
    """Sums the products of each row's pairs.

    Args:
        products: [T * k, H], each times its pair's share.
        added: Added too: [T, H] float32, or [T * k, H] in the dtype of `products`; or None.
        folded: What adapters add in addition, or None. The slots that it reads must be complete
            before the preceding launch begins.
        top_k: k.
        residual: [T, H] or None.
        after: The norm that follows, whose result is then returned, or None; not with `residual`.
        is_fixed: Whether a residual is added to the rounded sum, as a following norm does.
        share: Experts of all pairs, [T, k], and the number of experts on this rank, if it does not
            have all: experts of other ranks have no products.

    Returns:
        [T, H], dtype of `products`.
    """
    pairs, hidden = products.shape
    out = torch.empty((pairs // top_k, hidden), dtype=products.dtype, device=products.device)
    whole = next_power_of_2(hidden)
    block = whole if after is not None else min(1024, whole)
    stream, gain, eps, rounded = after or (None, None, 0.0, None)
    if rounded is not None:
        block = max(block, FP8_GROUP)
    ids, experts = share or (None, 0)
    sums = 1 if folded is None else top_k * folded.down.sums
    _combine_kernel[(pairs // top_k, cdiv(hidden, block))](
        out, products, residual, added, stream, gain, ids, hidden, experts, eps,
        *((None, None, 0) if rounded is None else (*rounded[:2], rounded.data.shape[0])),
        *(NOTHING if folded is None else folded.arguments()), TOP_K=top_k, BLOCK=block,
        IS_ADDED_BY_PAIR=added is not None and added.shape[0] == pairs,
        IS_FIXED=is_fixed, HAS_GROUPS=rounded is not None and rounded.has_groups,
        SUMS=sums, BLOCK_SUMS=next_power_of_2(sums),
        UNIT=ranks_at_once(block, products.element_size()),
        num_warps=max(1, min(16, block // 256)), **options,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=[*FOLDED, "whole_rows"])
def _combine_kernel(
    out: tl.tensor,
    products: tl.tensor,
    residual: tl.tensor,
    added: tl.tensor,
    stream: tl.tensor,
    gain: tl.tensor,
    ids: tl.tensor,
    hidden: int,
    experts: int,
    eps: float,
    rounded: tl.tensor,
    rounded_scales: tl.tensor,
    whole_rows: int,
    ranks: tl.tensor,
    token_slots: tl.tensor,
    of_b: AdapterRows,
    most: int,
    layer: int,
    slots: int,
    rank_width: int,
    places: int,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_ADDED_BY_PAIR: tl.constexpr,
    IS_FIXED: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """out[row] = the products of its pairs, in order, + added[row] + residual[row]. Also adds a
    token's ranks, the sum of SUMS parts, times B. With a stream, the sum is added to the stream as
    the norms' kernel does it, and `out` is the norm of the result.
    """
    release_next()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    if ranks is not None:
        # Complete before the preceding launch began.
        slot = tl.load(token_slots + row)
        group = layer * slots + slot * places
        count = rows_of(of_b.counts, group, slot)
        rows = of_b.pool, of_b.table + group * most, count, most, hidden
        tile = unit_of(rows, 0, column, mask, UNIT)
    wait_for_last()
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(TOP_K):
        at = (row * TOP_K + number) * hidden + column
        has_product = mask
        if ids is not None:
            is_here = tl.load(ids + row * TOP_K + number) < experts
            has_product = column < tl.where(is_here, hidden, 0)
        total += tl.load(products + at, mask=has_product, other=0.0).to(tl.float32)
        if IS_ADDED_BY_PAIR:
            total += tl.load(added + at, mask=has_product, other=0.0).to(tl.float32)
    if added is not None and not IS_ADDED_BY_PAIR:
        total += tl.load(added + row * hidden + column, mask=mask, other=0.0)
    if ranks is not None:
        ranks += row * SUMS * rank_width
        given = summed_ranks(ranks, count, 0, rank_width, SUMS, BLOCK_SUMS, UNIT)
        total += times_unit(given, tile)
        for start in range(UNIT, 8 * count, UNIT):
            tile = unit_of(rows, start, column, mask, UNIT)
            given = summed_ranks(ranks, count, start, rank_width, SUMS, BLOCK_SUMS, UNIT)
            total += times_unit(given, tile)
    if residual is not None:
        if IS_FIXED:
            total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(residual + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
    if stream is not None:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(stream + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
        summed = total.to(stream.dtype.element_ty)
        tl.store(stream + row * hidden + column, summed, mask=mask)
        total = summed.to(tl.float32)
        total *= tl.rsqrt(tl.sum(total * total, axis=0) / hidden + eps)
        total *= tl.load(gain + column, mask=mask, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    tl.store(out + row * hidden + column, result, mask=mask)
    if rounded is not None:
        group = tl.arange(0, BLOCK // GROUP)
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        values = tl.reshape(tl.where(mask, result.to(tl.float32), 0.0), [BLOCK // GROUP, GROUP])
        store_fp8_row(
            rounded, rounded_scales, values, row, whole_rows, group, tl.cdiv(hidden, GROUP), at,
            at < hidden, hidden, HAS_GROUPS,
        )  # fmt: skip
