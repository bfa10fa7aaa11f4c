"""Low-rank additions to experts on a GPU, pair by pair: hardly two share an adapter's expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.gpu.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.gpu.lora import (
    TokenSlots,
    direct_expand,
    direct_shrink,
    direct_splits,
    expand_row,
    slot_of,
)
from weft.kernels.lora import ExpertAddition

_COLUMNS = 256


def gate_up_additions(
    x: torch.Tensor, ids: torch.Tensor, inner: int, experts: int, lora: ExpertAddition
) -> torch.Tensor | None:
    """What is added to each pair's gate and up.

    Args:
        x: [T, H], contiguous.
        ids: [T, k] int32.
        inner: I.
        experts: E.
        lora: Of these T tokens.

    Returns:
        [T * k, 2 * I], dtype of `x`; None for nothing.
    """
    if not lora.w13:
        return None
    pairs, top_k = ids.numel(), ids.shape[1]
    slots = TokenSlots(lora.token_slots, ids, experts, top_k)
    splits = direct_splits(pairs, x.shape[1], lora.w13)
    shrunk = direct_shrink(x, lora.w13, lora.layer, slots, splits, top_k)
    added = torch.zeros((pairs, 2 * inner), dtype=x.dtype, device=x.device)
    direct_expand(added, shrunk, lora.w13, lora.layer, slots)
    return added


def add_to_down(
    out: torch.Tensor,
    inner: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    experts: int,
    lora: ExpertAddition,
) -> None:
    """out[row] += share * (what is added to down of a pair), over the row's pairs in their order.

    Args:
        out: [T, H], contiguous.
        inner: [T * k, I], contiguous: each pair's activation.
        ids: [T, k] int32.
        shares: [T, k] float32.
        experts: E.
        lora: Of these T tokens.
    """
    if not lora.w2:
        return
    (rows, hidden), (pairs, depth), top_k = out.shape, inner.shape, ids.shape[1]
    slots = TokenSlots(lora.token_slots, ids, experts, top_k)
    splits = direct_splits(pairs, depth, lora.w2)
    shrunk = direct_shrink(inner, lora.w2, lora.layer, slots, splits)
    (part,) = lora.w2
    _combine_kernel[(rows, triton.cdiv(hidden, _COLUMNS))](
        out, shrunk, lora.token_slots, ids, shares, part.b, part.rows_of_b, part.counts,
        part.table.shape[2], lora.layer, part.table.shape[1], *shrunk.shape[1:], hidden,
        EXPERTS=experts, TOP_K=top_k, SPLITS=splits, COLUMNS=_COLUMNS, num_warps=4,
        **launch_options(out.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_rows", "layer", "slots", "pairs", "width", "hidden"])
def _combine_kernel(
    out: tl.tensor,
    shrunk: tl.tensor,
    token_slots: tl.tensor,
    ids: tl.tensor,
    shares: tl.tensor,
    b: tl.tensor,
    table: tl.tensor,
    counts: tl.tensor,
    max_rows: int,
    layer: int,
    slots: int,
    pairs: int,
    width: int,
    hidden: int,
    IS_DEPENDENT: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """All pairs of a row, some columns."""
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    row = tl.program_id(0)
    if tl.load(token_slots + row) == 0:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    to = out + row.to(tl.int64) * hidden + column
    total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    for number in range(TOP_K):
        pair = row * TOP_K + number
        at = layer * slots + slot_of(pair, token_slots, ids, EXPERTS, TOP_K)
        added = expand_row(
            shrunk + pair * width,
            b,
            table + at * max_rows,
            tl.load(counts + at),
            column,
            hidden,
            pairs * width,
            SPLITS,
            COLUMNS,
        )
        total += tl.load(shares + pair) * added
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)
