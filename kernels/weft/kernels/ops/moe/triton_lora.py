"""Low-rank additions to experts on a GPU.

With few tokens hardly two pairs share an adapter's expert, so that each pair is computed
separately. With many tokens, pairs are sorted by expert and computed in tiles
(`triton_lora_tiles.py`).

Matrices that all experts of an adapter share are applied once per token: A of gate and up before
tokens are paired with experts, and B of down after the pairs' ranks are added up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.lora.spec import ExpertAddition
from weft.kernels.ops.lora.triton_parts import AdapterRows, aligned, alignment_of, max_rows
from weft.kernels.ops.lora.triton_rows import RowSlots, expand_rows, shrink_rows, slot_of, times_b
from weft.kernels.ops.moe.triton_lora_tiles import Items, expand_items, shrink_items, tokens_of
from weft.kernels.shared.dependent_launch import LaunchOptions, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv

_COLUMNS = 256


def gate_up_additions(
    x: torch.Tensor,
    ids: torch.Tensor,
    inner: int,
    experts: int,
    lora: ExpertAddition,
    options: LaunchOptions,
    items: Items | None = None,
    *,
    is_fixed: bool = False,
    is_share: bool = False,
) -> torch.Tensor | None:
    """Computes what adapters add to each pair's gate and up.

    Args:
        x: [T, H], contiguous.
        ids: [T, k] int32, each below E; if experts are a share also E, for experts of other ranks.
        inner: I.
        experts: E.
        items: The pairs in tiles; None: pair by pair.
        is_fixed: Whether a pair's sums must not depend on the number of pairs; only pair by pair.

    Returns:
        [T * k, 2 * I], dtype of `x`; None if nothing is added. In tiles it is undefined for experts
        of other ranks.
    """
    if not lora.w13:
        return None
    pairs, top_k, places = ids.numel(), ids.shape[1], experts + is_share
    is_shared = all(part.is_a_shared for part in lora.w13)
    is_whole = sum(part.out_features for part in lora.w13) == 2 * inner
    make = torch.empty if is_whole else torch.zeros
    added = make((pairs, 2 * inner), dtype=x.dtype, device=x.device)
    parts, layer, ranks_top_k = lora.w13, lora.layer, top_k if is_shared else 1
    if items is not None:
        rows = tokens_of(lora.token_slots, places) if is_shared else items
        ranks = shrink_items(x, parts, layer, rows, options, 1 if is_shared else top_k)
        expand_items(added, ranks, parts, layer, items, options, ranks_top_k=ranks_top_k)
        return added
    slots = RowSlots(lora.token_slots, ids, places, top_k)
    if is_shared:
        of_tokens = RowSlots(lora.token_slots, ids, places, are_equal=True)
        ranks = shrink_rows(x, parts, layer, of_tokens, options, is_fixed=is_fixed)
    else:
        ranks = shrink_rows(x, parts, layer, slots, options, top_k, is_fixed=is_fixed)
    expand_rows(
        added, ranks, parts, layer, slots, options, is_new=True, ranks_top_k=ranks_top_k
    )  # fmt: skip
    return added


def down_additions(
    inner: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    hidden: int,
    experts: int,
    lora: ExpertAddition,
    options: LaunchOptions,
    onto: torch.Tensor | None = None,
    items: Items | None = None,
    *,
    is_fixed: bool = False,
    is_share: bool = False,
) -> torch.Tensor | None:
    """What adapters add to down, times the pairs' shares, summed over each row's pairs.

    Args:
        inner: [T * k, I], contiguous: each pair's activation.
        ids: [T, k] int32.
        shares: [T, k] float32.
        hidden: H.
        experts: E.
        onto: [T, H], contiguous: the result is added to it; or None.
        items: The pairs in tiles; None: pair by pair. Not with `onto`.
        is_fixed: Whether a pair's sums must not depend on the number of pairs; only pair by pair.
        is_share: Whether `ids` name experts of other ranks too, by E.

    Returns:
        [T, H], float32 unless `onto` is given. For pairs in tiles whose experts each have a B of
        their own: [T * k, H] before the sum, dtype of `inner`, undefined for experts of other
        ranks. None if nothing is added.
    """
    if not lora.w2:
        return None
    (rows, top_k), (part,), out = ids.shape, lora.w2, onto
    places, are_zero = experts + is_share, is_share and part.is_b_shared
    if items is not None:
        ranks = shrink_items(inner, lora.w2, lora.layer, items, options, are_zero=are_zero)
        if part.is_b_shared:
            sums, dtype = tokens_of(lora.token_slots, places), torch.float32
        else:
            sums, dtype, shares = items, inner.dtype, shares.view(-1, 1)
        out = torch.empty((sums.num_items, hidden), dtype=dtype, device=inner.device)
        expand_items(out, ranks, lora.w2, lora.layer, sums, options, shares=shares)
        return out
    if out is None:
        out = torch.empty((rows, hidden), dtype=torch.float32, device=inner.device)
    slots = RowSlots(lora.token_slots, ids, places, top_k)
    ranks = shrink_rows(
        inner, lora.w2, lora.layer, slots, options, is_fixed=is_fixed, are_zero=are_zero
    )
    _weigh_kernel[(rows, cdiv(hidden, _COLUMNS))](
        out, ranks, lora.token_slots, ids, shares, AdapterRows.of_b(part), max_rows(part),
        lora.layer, part.table.shape[1], *ranks.shape[1:], hidden,
        EXPERTS=places, TOP_K=top_k, IS_SHARED=part.is_b_shared, IS_NEW=onto is None,
        SPLITS=ranks.shape[0], COLUMNS=_COLUMNS, ALIGNMENT=alignment_of(hidden),
        num_warps=4, **options,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["max_rows", "layer", "slots", "pairs", "width", "hidden"])
def _weigh_kernel(
    out: tl.tensor,
    ranks: tl.tensor,
    token_slots: tl.tensor,
    ids: tl.tensor,
    shares: tl.tensor,
    of_b: AdapterRows,
    max_rows: int,
    layer: int,
    slots: int,
    pairs: int,
    width: int,
    hidden: int,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_SHARED: tl.constexpr,
    IS_NEW: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> None:
    """Adds all pairs of a row, for some columns."""
    release_next()
    wait_for_last()
    hidden = aligned(hidden, ALIGNMENT)
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    to = out + row.to(tl.int64) * hidden + column
    total = tl.zeros([COLUMNS], tl.float32)
    if not IS_NEW:
        total += tl.load(to, mask=column < hidden, other=0.0).to(tl.float32)
    if tl.load(token_slots + row) > 0:
        # If all pairs share B, it is multiplied once by the sum of their weighed ranks.
        STEP: tl.constexpr = TOP_K if IS_SHARED else 1
        for number in range(0, TOP_K, STEP):
            pair = row * TOP_K + number
            slot = layer * slots + slot_of(pair, token_slots, ids, EXPERTS, TOP_K, IS_SHARED)
            for index in range(tl.load(of_b.counts + slot)):
                given = tl.zeros([8], tl.float32)
                for one in tl.static_range(STEP):
                    at = ranks + (pair + one) * width + index * 8 + tl.arange(0, 8)
                    whole = tl.zeros([8], tl.float32)
                    for split in tl.static_range(SPLITS):
                        whole += tl.load(at + split * pairs * width)
                    given += tl.load(shares + pair + one) * whole
                at_row = tl.load(of_b.table + slot * max_rows + index)
                total = times_b(total, given, of_b.pool, at_row, hidden, column)
    tl.store(to, total.to(out.dtype.element_ty), mask=column < hidden)
