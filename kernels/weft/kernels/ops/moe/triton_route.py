"""The router of a mixture of experts on a GPU: softmax, selection and order in one launch. For few
rows the same launch also sorts the pairs by expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.moe.reference import placed, route_reference
from weft.kernels.ops.moe.spec import SOFTMAX, RouterForm
from weft.kernels.ops.moe.triton_sort import Blocks, num_blocks
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import next_power_of_2

_MAX_AT_ONCE = 1 << 11
"""Rows times experts that one program holds."""


def route(
    logits: torch.Tensor,
    top_k: int,
    renormalise: bool,
    form: RouterForm = SOFTMAX,
    placement: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`weft.kernels.ops.moe.route` for CUDA tensors: ids [T, k] int32 and shares [T, k] float32."""
    rows, experts = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or not 1 <= top_k <= experts:
        raise ValueError(f"{top_k} of logits {tuple(logits.shape)} {logits.dtype}, or strided")
    if form.jitter is not None:
        found = route_reference(logits, top_k, renormalise=renormalise, form=form)
        if chosen is not None:
            chosen[:rows] = found.ids
        return placed(found.ids, placement), found.weights
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    shares = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            ids,
            shares,
            logits,
            form.correction,
            form.factors,
            placement,
            chosen,
            experts,
            TOP_K=top_k,
            RULE=Rule.of(form, experts, renormalises=renormalise),
            CYCLES=_cycles(placement),
            BLOCK=next_power_of_2(experts),
            num_warps=1 if experts <= 256 else 4,
            **launch_options(logits.device),
        )
    return ids, shares


def _cycles(placement: torch.Tensor | None) -> int:
    return 1 if placement is None or placement.dim() == 1 else placement.shape[0]


class Rule(NamedTuple):
    """How experts are chosen, a constant of kernels; fields of `RouterForm`."""

    renormalises: bool
    is_plain: bool
    is_sigmoid: bool
    groups: int
    group_size: int
    """Experts of a group."""
    kept_groups: int
    summed: int
    least_sum: float
    scale: float

    @classmethod
    def of(cls, form: RouterForm, experts: int, *, renormalises: bool) -> Rule:
        size = experts // form.groups
        return cls(
            renormalises, form.is_plain, form.is_sigmoid, form.groups, size, form.kept_groups,
            form.summed, form.least_sum, form.scale,
        )  # fmt: skip


@triton.jit
def _route_kernel(
    ids: tl.tensor,
    shares: tl.tensor,
    logits: tl.tensor,
    correction: tl.tensor,
    factors: tl.tensor,
    placement: tl.tensor,
    chosen: tl.tensor,
    experts: int,
    TOP_K: tl.constexpr,
    RULE: tl.constexpr,
    CYCLES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)[None, :]
    exists = expert < experts
    values = tl.load(logits + row * experts + expert, mask=exists, other=float("-inf"))
    if RULE.is_plain:
        share, place = choose(values, exists, TOP_K, RULE.renormalises)
    else:
        share, place = choose_by_score(values, exists, correction, factors, TOP_K, RULE)
    at_place = ids + row * TOP_K + place
    if placement is not None:
        of_row = placement
        if CYCLES > 1:
            of_row += row % CYCLES * experts
        tl.store(at_place, tl.load(of_row + expert, mask=exists, other=0), mask=place >= 0)
    else:
        tl.store(at_place, expert, mask=place >= 0)
    tl.store(shares + row * TOP_K + place, share, mask=place >= 0)
    if chosen is not None:
        tl.store(chosen + row * TOP_K + place, expert, mask=place >= 0)


@triton.jit
def choose(
    values: tl.tensor, exists: tl.tensor, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """From the logits of rows, [R, B]: the experts' shares, and each chosen expert's index among
    its row's chosen experts in ascending order, -1 for the others. A NaN logit makes its row's
    shares NaN.
    """
    chosen = best(values, exists, TOP_K)
    is_chosen = chosen == 1
    power = tl.exp(values - tl.max(tl.where(is_chosen, values, float("-inf")), axis=1)[:, None])
    counted = tl.where(is_chosen, power, 0.0) if RENORMALISE else power
    share = power / tl.sum(counted, axis=1)[:, None]
    return share, tl.where(is_chosen, tl.cumsum(chosen, axis=1) - 1, -1)


@triton.jit
def best(values: tl.tensor, exists: tl.tensor, TOP_K: tl.constexpr) -> tl.tensor:
    """1 where a row of [R, B] numbers has its largest, else 0; only the first of equal ones
    counts.
    """
    expert = tl.arange(0, values.shape[1])[None, :]
    # Converted to integers in the order of the logits, since a warp finds the largest integer with
    # one instruction. NaN sorts first; otherwise it would go unnoticed.
    bits = values.to(tl.int32, bitcast=True)
    left = tl.where(values == values, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    left = tl.where(exists, left, -0x7FFFFFFF)
    chosen = tl.zeros_like(left)
    for _ in range(TOP_K):
        is_best = left == tl.max(left, axis=1)[:, None]
        first = tl.min(tl.where(is_best, expert, 0x7FFFFFFF), axis=1)[:, None]
        chosen = tl.where(expert == first, 1, chosen)
        left = tl.where(expert == first, -0x80000000, left)
    return chosen


@triton.jit
def choose_by_score(
    values: tl.tensor,
    exists: tl.tensor,
    correction: tl.tensor,
    factors: tl.tensor,
    TOP_K: tl.constexpr,
    RULE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`choose` by the scores that a `Rule` describes."""
    GROUPS: tl.constexpr = RULE.groups
    GROUP_SIZE: tl.constexpr = RULE.group_size
    LEAST_SUM: tl.constexpr = RULE.least_sum
    expert = tl.arange(0, values.shape[1])[None, :]
    if RULE.is_sigmoid:
        score = 1.0 / (1.0 + tl.exp(-values))
    else:
        power = tl.exp(values - tl.max(values, axis=1)[:, None])
        score = power / tl.sum(power, axis=1)[:, None]
    by = score
    if correction is not None:
        is_expert = expert < GROUPS * GROUP_SIZE
        by += tl.load(correction + expert, mask=is_expert, other=0.0)
    can_be = exists
    if GROUPS > 1:
        least = float("-inf")
        worth = tl.where(by == by, by, float("inf"))
        of_group = tl.zeros_like(by)
        for group in tl.static_range(GROUPS):
            is_its = exists & (expert // GROUP_SIZE == group)
            its = tl.where(is_its, worth, least)
            first = tl.max(its, axis=1)[:, None]
            if RULE.summed == 2:
                is_first = is_its & (its == first)
                at = tl.min(tl.where(is_first, expert, 0x7FFFFFFF), axis=1)[:, None]
                first += tl.max(tl.where(expert == at, least, its), axis=1)[:, None]
            of_group = tl.where(is_its, first, of_group)
        # In the choice the first expert of a group represents the group.
        kept = best(of_group, exists & (expert % GROUP_SIZE == 0), RULE.kept_groups)
        can_be = tl.zeros_like(of_group) > 0.0
        for group in tl.static_range(GROUPS):
            is_kept = tl.sum(tl.where(expert == group * GROUP_SIZE, kept, 0), axis=1)[:, None] == 1
            can_be = can_be | (is_kept & (expert // GROUP_SIZE == group))
        can_be = can_be & exists
    chosen = best(by, can_be, TOP_K)
    is_chosen = chosen == 1
    share = score
    if RULE.renormalises:
        total = tl.sum(tl.where(is_chosen, score, 0.0), axis=1)[:, None]
        share = score / tl.where(total < LEAST_SUM, LEAST_SUM, total)
    if factors is not None:
        share *= tl.load(factors + expert, mask=expert < GROUPS * GROUP_SIZE, other=0.0)
    return share * RULE.scale, tl.where(is_chosen, tl.cumsum(chosen, axis=1) - 1, -1)


def is_sorted_at_once(rows: int, experts: int) -> bool:
    """Whether `route_and_sort` takes so many rows and experts."""
    size = next_power_of_2(rows) * next_power_of_2(experts)
    return rows > 0 and size <= _MAX_AT_ONCE


def route_and_sort(
    logits: torch.Tensor,
    top_k: int,
    block: int,
    *,
    renormalise: bool,
    form: RouterForm = SOFTMAX,
    placement: torch.Tensor | None = None,
    own: int | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Blocks]:
    """`route` and `weft.kernels.ops.moe.triton_sort.sort_pairs` in one launch.

    Args:
        logits: [T, E] float32, contiguous, where `is_sorted_at_once` holds.
        top_k: 1 to E.
        placement: As `ExpertWeights.placement`; pairs of other ranks' experts are in no block.
        own: Number of experts on this rank; None: all.
        chosen: As in `weft.kernels.ops.moe.route`.
    """
    rows, experts = logits.shape
    own = experts if own is None else own
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    shares = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    bound = num_blocks(rows * top_k, own, block)
    order = torch.empty(rows * top_k, dtype=torch.int32, device=logits.device)
    table = torch.empty((3, bound), dtype=torch.int32, device=logits.device)
    padded = next_power_of_2(rows)
    _route_and_sort_kernel[(1,)](
        ids,
        shares,
        order,
        table,
        logits,
        form.correction,
        form.factors,
        placement,
        chosen,
        rows,
        experts,
        own,
        bound,
        TOP_K=top_k,
        RULE=Rule.of(form, experts, renormalises=renormalise),
        CYCLES=_cycles(placement),
        ROWS=padded,
        BINS=next_power_of_2(experts),
        BLOCK=block,
        BOUND=next_power_of_2(bound),
        num_warps=4 if padded <= 16 else 8 if padded * next_power_of_2(experts) <= 1 << 11 else 16,
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
    correction: tl.tensor,
    factors: tl.tensor,
    placement: tl.tensor,
    chosen: tl.tensor,
    rows: int,
    experts: int,
    own: int,
    bound: int,
    TOP_K: tl.constexpr,
    RULE: tl.constexpr,
    CYCLES: tl.constexpr,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUND: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    row = tl.arange(0, ROWS)
    expert = tl.arange(0, BINS)
    is_row = (row < rows)[:, None]
    exists = (expert < experts)[None, :]
    at = row[:, None] * experts + expert[None, :]
    values = tl.load(logits + at, mask=is_row & exists, other=float("-inf"))
    values = tl.where(is_row, values, 0.0)
    if RULE.is_plain:
        share, place_of = choose(values, exists & (row >= 0)[:, None], TOP_K, RULE.renormalises)
    else:
        values = tl.where(exists, values, float("-inf"))
        share, place_of = choose_by_score(
            values, exists & (row >= 0)[:, None], correction, factors, TOP_K, RULE
        )
    is_chosen = is_row & (place_of >= 0)
    pair = row[:, None] * TOP_K + place_of
    of_pair = tl.broadcast_to(expert[None, :], [ROWS, BINS])
    if chosen is not None:
        tl.store(chosen + pair, of_pair, mask=is_chosen)
    its_place = expert
    if placement is not None:
        if CYCLES > 1:
            # A place of each pair; all pairs of an expert that stay here have the same.
            in_cycle = placement + (row % CYCLES * experts)[:, None] + expert[None, :]
            of_pair = tl.load(in_cycle, mask=exists & is_row, other=0)
            its_place = tl.max(tl.where(is_chosen & (of_pair < own), of_pair, 0), axis=0)
        else:
            its_place = tl.load(placement + expert, mask=expert < experts, other=0)
            of_pair = tl.broadcast_to(its_place[None, :], [ROWS, BINS])
    tl.store(ids + pair, of_pair, mask=is_chosen)
    tl.store(shares + pair, share, mask=is_chosen)
    if placement is not None:
        is_chosen = is_chosen & (of_pair < own)

    counted = is_chosen.to(tl.int32)
    total = tl.sum(counted, axis=0)
    begin = tl.cumsum(total, axis=0) - total
    place = begin[None, :] + tl.cumsum(counted, axis=0) - counted
    tl.store(order + place, pair, mask=is_chosen)
    # A row has an expert only once, so that an expert has at most ROWS pairs.
    blocks = (total + (BLOCK - 1)) // BLOCK
    first = tl.cumsum(blocks, axis=0) - blocks
    for number in tl.static_range((ROWS + BLOCK - 1) // BLOCK):
        is_its = number < blocks
        tl.store(table + first + number, its_place, mask=is_its)
        tl.store(table + bound + first + number, begin + number * BLOCK, mask=is_its)
        tl.store(table + 2 * bound + first + number, begin + total, mask=is_its)
    spare = tl.arange(0, BOUND)
    is_spare = (spare >= tl.sum(blocks, axis=0)) & (spare < bound)
    tl.store(table + spare, tl.zeros([BOUND], tl.int32) + own, mask=is_spare)
