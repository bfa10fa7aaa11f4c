"""Products of few rows with experts on a GPU, by programs that list their pairs of a row and an
expert, and take one after the other those whose experts are here.

While a pair's weights are multiplied, the next one's are being loaded. `moe_direct` says when.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from weft.kernels.gpu.dependent_launch import LaunchOptions, release_next, wait_for_last
from weft.kernels.gpu.fp8_weights import GROUP, data_of, scales_of_expert, summed_row
from weft.kernels.gpu.launch_sizes import cdiv, next_power_of_2
from weft.kernels.gpu.moe_parts import ExpertParts, once, store_inner
from weft.kernels.quantised import Fp8Experts

MAX_LISTED_PAIRS = 32
"""Most pairs in a list: a warp finds one of so many by itself."""
_COLUMNS = 4
"""Columns of the second product that a program takes."""
_MAX_TILE = 2048
"""Most elements of its K that are taken at once."""


def scaled_data(weight: torch.Tensor | Fp8Experts) -> tuple[torch.Tensor, dict[str, Any]]:
    """The numbers of experts' weights, and the arguments of a kernel that say their scales."""
    data, scaling = data_of(weight)
    return data, {name: scaling[name] for name in ("scales", "SCALE_ROWS")}


def listed_gate_up(
    inner: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    w13: torch.Tensor | Fp8Experts,
    added: torch.Tensor | None,
    more: ExpertParts,
    programs: int,
    warps: int,
    options: LaunchOptions,
) -> None:
    """Writes gate and up, made one, of all pairs whose experts are here.

    Args:
        inner: [pairs, I], receives the result; rows of other pairs are left as they are.
        x: [T, H], contiguous, T * k <= MAX_LISTED_PAIRS.
        ids: [T, k] int32.
        w13: [E, 2 * I, H], rows of gate first.
        added: [pairs, 2 * I] of adapters, or None.
        more: Biases and gating.
        programs: That share all columns.
        warps: Of each.
        options: Launch options.
    """
    (pairs, width), hidden = inner.shape, x.shape[1]
    data, scaling = scaled_data(w13)
    _listed_inner_kernel[(min(programs, pairs * width),)](
        inner, x, data, ids, added, more.gate_up_bias, width, data.shape[0], pairs, K=hidden,
        TOP_K=ids.shape[1], TILE=next_power_of_2(hidden), PAIRS=next_power_of_2(pairs),
        num_warps=warps, **more.gating_arguments(), **scaling, **options,
    )  # fmt: skip


def listed_down(
    out: torch.Tensor,
    inner: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w2: torch.Tensor | Fp8Experts,
    residual: torch.Tensor | None,
    more: ExpertParts,
    options: LaunchOptions,
) -> None:
    """out[row] = residual[row] + share * down of inner, over the row's experts that are here.

    Args:
        out: [T, H], receives the sums, rounded once.
        inner: [T * k, I], contiguous.
        ids: [T, k] int32.
        shares: [T, k] float32.
        w2: [E, H, I].
        residual: [T, H] or None.
        more: Biases and placement.
        options: Launch options.
    """
    (rows, hidden), width = out.shape, inner.shape[1]
    data, scaling = scaled_data(w2)
    # Columns of a program have their scales in common.
    columns = min(_COLUMNS, scaling["SCALE_ROWS"] or _COLUMNS)
    _listed_out_kernel[(rows, cdiv(hidden, columns))](
        out, inner, data, ids, shares, residual, more.down_bias, hidden, data.shape[0], K=width,
        TOP_K=ids.shape[1], IS_SHARE=more.is_share, PAIRS=next_power_of_2(ids.shape[1]),
        COLUMNS=columns, TILE=min(_MAX_TILE, next_power_of_2(width)), num_warps=4, **scaling,
        **options,
    )  # fmt: skip


@triton.jit
def _places(is_here: tl.tensor) -> tl.tensor:
    """The place of each pair among those that are here, else -1."""
    return tl.where(is_here, tl.cumsum(is_here.to(tl.int32), axis=0) - 1, -1)


@triton.jit
def _pair_at(
    place: tl.tensor, expert_of: tl.tensor, at: tl.tensor, PAIRS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The pair in a place and its expert; of a place without a pair both are 0."""
    is_its = place == at
    pair = tl.sum(tl.where(is_its, tl.arange(0, PAIRS), 0), axis=0)
    return pair, tl.sum(tl.where(is_its, expert_of, 0), axis=0).to(tl.int64)


@triton.jit
def _listed_inner_kernel(
    inner: tl.tensor,
    x: tl.tensor,
    w13: tl.tensor,
    ids: tl.tensor,
    added: tl.tensor,
    bias: tl.tensor,
    width: int,
    experts: int,
    pairs: int,
    scales: tl.tensor,
    IS_DEPENDENT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    CUBIC: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Programs take the columns of all pairs in turns, so that each has as many, whatever the
    number of pairs that are here.
    """
    wait_for_last(IS_DEPENDENT)
    # Only now: the second product's kernel reads ids and shares before its own wait.
    release_next(IS_DEPENDENT)
    number = tl.arange(0, PAIRS)
    expert_of = tl.load(ids + number, mask=number < pairs, other=experts)
    place = _places(expert_of < experts)
    end = (tl.max(place, axis=0) + 1) * width
    part = tl.arange(0, TILE)
    is_in = part < K
    up_at = tl.cast(width, tl.int64) * K
    step = tl.num_programs(0)
    begin = tl.program_id(0)
    pair, expert = _pair_at(place, expert_of, begin // width, PAIRS)
    at = w13 + (expert * 2 * width + begin % width) * K + part
    is_there = part < tl.where(begin < end, K, 0)
    gate = once(at, is_there)
    up = once(at + up_at, is_there)
    values = tl.load(x + pair // TOP_K * K + part, mask=is_in, other=0.0)
    for item in range(begin, end, step):
        later = item + step
        next_pair, next_expert = _pair_at(place, expert_of, later // width, PAIRS)
        at = w13 + (next_expert * 2 * width + later % width) * K + part
        is_there = part < tl.where(later < end, K, 0)
        next_gate = once(at, is_there)
        next_up = once(at + up_at, is_there)
        next_values = tl.load(x + next_pair // TOP_K * K + part, mask=is_in, other=0.0)
        column = item % width
        of_expert = scales_of_expert(scales, expert, 2 * width, K, SCALE_ROWS)
        wide = values.to(tl.float32)
        gate_sum = summed_row(gate, wide, of_expert, column, K, SCALE_ROWS)
        up_sum = summed_row(up, wide, of_expert, column + width, K, SCALE_ROWS)
        its_bias = bias
        if bias is not None:
            its_bias = bias + expert * 2 * width
        store_inner(
            inner,
            gate_sum,
            up_sum,
            added,
            its_bias,
            pair.to(tl.int64),
            column,
            width,
            ALPHA,
            LIMIT,
            OFFSET,
            GATE_LIMIT,
            CUBIC,
        )
        pair, expert, gate, up, values = next_pair, next_expert, next_gate, next_up, next_values


@triton.jit
def _listed_out_kernel(
    out: tl.tensor,
    inner: tl.tensor,
    w2: tl.tensor,
    ids: tl.tensor,
    shares: tl.tensor,
    residual: tl.tensor,
    bias: tl.tensor,
    hidden: int,
    experts: int,
    scales: tl.tensor,
    IS_DEPENDENT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_SHARE: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Each thread has elements of K of all the program's columns; they are summed in the end. The
    first weights are on their way before `inner` is there.
    """
    SIZE: tl.constexpr = min(GROUP, TILE)
    GROUPS: tl.constexpr = TILE // SIZE
    STEPS: tl.constexpr = (K + TILE - 1) // TILE
    release_next(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    last = tl.minimum(column, hidden - 1)
    of_column = w2 + (last.to(tl.int64) * K)[:, None, None]
    number = tl.arange(0, PAIRS)
    expert_of = tl.load(ids + row * TOP_K + number, mask=number < TOP_K, other=0)
    share_of = tl.load(shares + row * TOP_K + number, mask=number < TOP_K, other=0.0)
    is_here = number < TOP_K
    if IS_SHARE:
        is_here = is_here & (expert_of < experts)
    place = _places(is_here)
    end = (tl.max(place, axis=0) + 1) * STEPS
    group = tl.arange(0, GROUPS)
    part = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    pair, expert = _pair_at(place, expert_of, 0, PAIRS)
    tile = once(
        of_column + expert * hidden * K + part[None], (part < tl.where(end > 0, K, 0))[None]
    )
    wait_for_last(IS_DEPENDENT)
    values = tl.load(inner + (row * TOP_K + pair) * K + part, mask=part < K, other=0.0)
    total = tl.zeros([COLUMNS, GROUPS, SIZE], tl.float32)
    for step in range(end):
        later = step + 1
        next_pair, next_expert = _pair_at(place, expert_of, later // STEPS, PAIRS)
        at = later % STEPS * TILE + part
        is_next = at < tl.where(later < end, K, 0)
        next_tile = once(of_column + next_expert * hidden * K + at[None], is_next[None])
        next_values = tl.load(inner + (row * TOP_K + next_pair) * K + at, mask=is_next, other=0.0)
        share = tl.sum(tl.where(place == step // STEPS, share_of, 0.0), axis=0)
        wide = values.to(tl.float32) * share
        if scales is not None:
            of_expert = scales_of_expert(scales, expert, hidden, K, SCALE_ROWS)
            if SCALE_ROWS > 0:
                NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
                first = tl.program_id(1) * COLUMNS // SCALE_ROWS * NUM_GROUPS
                its = step % STEPS * GROUPS + group
                scale = tl.load(of_expert + first + its, mask=its < NUM_GROUPS, other=0.0)
                total += tile.to(tl.float32) * (wide * scale[:, None])[None]
            else:
                scale = tl.load(of_expert + last)
                total += tile.to(tl.float32) * wide[None] * scale[:, None, None]
        else:
            total += tile.to(tl.float32) * wide[None]
        pair, expert, tile, values = next_pair, next_expert, next_tile, next_values
    result = tl.sum(tl.sum(total, axis=2), axis=1)
    mask = column < hidden
    if bias is not None:
        for place_of_row in range(TOP_K):
            its_expert = tl.load(ids + row * TOP_K + place_of_row).to(tl.int64)
            has_bias = mask
            if IS_SHARE:
                has_bias = column < tl.where(its_expert < experts, hidden, 0)
            given = tl.load(bias + its_expert * hidden + column, mask=has_bias, other=0.0)
            result += tl.load(shares + row * TOP_K + place_of_row) * given.to(tl.float32)
    if residual is not None:
        result += tl.load(residual + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, result.to(out.dtype.element_ty), mask=mask)
