"""The router of a mixture of experts on a GPU: softmax, selection and order in one launch, and for
few rows the pairs sorted by expert as well."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.gpu.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.gpu.moe_sort import Blocks, num_blocks

_MAX_AT_ONCE = 1 << 13
"""Rows times experts that one program holds."""


def route(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`weft.kernels.moe.route` for CUDA tensors: ids [T, k] int32 and shares [T, k] float32."""
    rows, experts = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or not 1 <= top_k <= experts:
        raise ValueError(f"{top_k} of logits {tuple(logits.shape)} {logits.dtype}, or strided")
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    shares = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            ids,
            shares,
            logits,
            experts,
            TOP_K=top_k,
            RENORMALISE=renormalise,
            BLOCK=triton.next_power_of_2(experts),
            num_warps=1 if experts <= 256 else 4,
            **launch_options(logits.device),
        )
    return ids, shares


@triton.jit
def _route_kernel(
    ids: tl.tensor,
    shares: tl.tensor,
    logits: tl.tensor,
    experts: int,
    IS_DEPENDENT: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    exists = expert < experts
    values = tl.load(logits + row * experts + expert, mask=exists, other=float("-inf"))
    power = tl.exp(values - tl.max(values, axis=0))
    share = power / tl.sum(power, axis=0)
    # Shares that are no numbers must not make an expert be chosen twice: places would stay empty.
    share = tl.where(share == share, share, 0.0)
    left = tl.where(exists, share, -1.0)
    chosen = tl.zeros([BLOCK], tl.int32)
    for _ in range(TOP_K):
        best = tl.argmax(left, axis=0)
        chosen = tl.where(expert == best, 1, chosen)
        left = tl.where(expert == best, -2.0, left)
    share = tl.where(chosen == 1, share, 0.0)
    if RENORMALISE:
        share = share / tl.sum(share, axis=0)
    place = row * TOP_K + tl.cumsum(chosen, axis=0) - 1
    tl.store(ids + place, expert, mask=chosen == 1)
    tl.store(shares + place, share, mask=chosen == 1)


def is_sorted_at_once(rows: int, experts: int) -> bool:
    """Whether `route_and_sort` takes so many."""
    size = triton.next_power_of_2(rows) * triton.next_power_of_2(experts)
    return rows > 0 and size <= _MAX_AT_ONCE


def route_and_sort(
    logits: torch.Tensor, top_k: int, block: int, *, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor, Blocks]:
    """`route`, and `weft.kernels.gpu.moe_sort.sort_pairs` of its pairs, in one launch.

    Args:
        logits: [T, E] float32, contiguous, of so many rows as `is_sorted_at_once` says.
        top_k: 1 to E.
        block: Pairs of a block.
        renormalise: The shares of a row's experts add up to 1.
    """
    rows, experts = logits.shape
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    shares = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    bound = num_blocks(rows * top_k, experts, block)
    order = torch.empty(rows * top_k, dtype=torch.int32, device=logits.device)
    table = torch.empty((3, bound), dtype=torch.int32, device=logits.device)
    padded = triton.next_power_of_2(rows)
    _route_and_sort_kernel[(1,)](
        ids,
        shares,
        order,
        table,
        logits,
        rows,
        experts,
        bound,
        TOP_K=top_k,
        RENORMALISE=renormalise,
        ROWS=padded,
        BINS=triton.next_power_of_2(experts),
        BLOCK=block,
        BOUND=triton.next_power_of_2(bound),
        num_warps=4 if padded <= 16 else 8,
        **launch_options(logits.device),
    )
    return ids, shares, Blocks(order, *table)


@triton.jit(do_not_specialize=["rows", "bound"])
def _route_and_sort_kernel(
    ids: tl.tensor,
    shares: tl.tensor,
    order: tl.tensor,
    table: tl.tensor,
    logits: tl.tensor,
    rows: int,
    experts: int,
    bound: int,
    IS_DEPENDENT: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUND: tl.constexpr,
) -> None:
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    row = tl.arange(0, ROWS)
    expert = tl.arange(0, BINS)
    is_row = (row < rows)[:, None]
    exists = (expert < experts)[None, :]
    at = row[:, None] * experts + expert[None, :]
    values = tl.load(logits + at, mask=is_row & exists, other=float("-inf"))
    values = tl.where(is_row, values, 0.0)
    power = tl.exp(values - tl.max(values, axis=1)[:, None])
    share = power / tl.sum(power, axis=1)[:, None]
    # As in _route_kernel.
    share = tl.where(share == share, share, 0.0)
    left = tl.where(exists, share, -1.0)
    chosen = tl.zeros([ROWS, BINS], tl.int32)
    for _ in range(TOP_K):
        is_best = expert[None, :] == tl.argmax(left, axis=1)[:, None]
        chosen = tl.where(is_best, 1, chosen)
        left = tl.where(is_best, -2.0, left)
    chosen = tl.where(is_row, chosen, 0)
    is_chosen = chosen == 1
    share = tl.where(is_chosen, share, 0.0)
    if RENORMALISE:
        share = share / tl.sum(share, axis=1)[:, None]
    pair = row[:, None] * TOP_K + tl.cumsum(chosen, axis=1) - 1
    tl.store(ids + pair, tl.broadcast_to(expert[None, :], [ROWS, BINS]), mask=is_chosen)
    tl.store(shares + pair, share, mask=is_chosen)

    total = tl.sum(chosen, axis=0)
    begin = tl.cumsum(total, axis=0) - total
    place = begin[None, :] + tl.cumsum(chosen, axis=0) - chosen
    tl.store(order + place, pair, mask=is_chosen)
    # A row has an expert once: ROWS are the most pairs of one.
    blocks = (total + (BLOCK - 1)) // BLOCK
    first = tl.cumsum(blocks, axis=0) - blocks
    for number in tl.static_range((ROWS + BLOCK - 1) // BLOCK):
        is_its = number < blocks
        tl.store(table + first + number, expert, mask=is_its)
        tl.store(table + bound + first + number, begin + number * BLOCK, mask=is_its)
        tl.store(table + 2 * bound + first + number, begin + total, mask=is_its)
    spare = tl.arange(0, BOUND)
    is_spare = (spare >= tl.sum(blocks, axis=0)) & (spare < bound)
    tl.store(table + spare, tl.zeros([BOUND], tl.int32) + experts, mask=is_spare)
