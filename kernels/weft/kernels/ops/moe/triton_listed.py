"""The second product of few rows with experts on a GPU, for rows whose experts are too large to be
loaded at once.

Each program finds which of its row's experts are on this rank and multiplies them one after
another, loading the next weights meanwhile. `triton_direct` chooses between this kernel and its
own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_fp8_weights import GROUP, data_of, scales_of_expert
from weft.kernels.ops.moe.spec import ExpertParts
from weft.kernels.ops.moe.triton_parts import once, with_row_parts
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.formats.quantised import Fp8Experts
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_COLUMNS = 8
"""Columns that a program takes."""
_MAX_TILE = 512
"""Most elements of K that are taken at once."""
_WARPS = 2
"""Measured on an H100 with experts in FP8, K of 1,536 and 2,048."""


def listed_down(
    out: torch.Tensor,
    inner: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w2: torch.Tensor | Fp8Experts,
    residual: torch.Tensor | None,
    more: ExpertParts,
) -> None:
    """out[row] = residual[row] + share * down of inner, over the row's experts on this rank.

    Args:
        out: [T, H]: receives the sums, rounded once.
        inner: [T * k, I], contiguous.
        ids: [T, k] int32.
        shares: [T, k] float32.
        w2: [E, H, I].
        residual: [T, H] or None.
    """
    (rows, hidden), width = out.shape, inner.shape[1]
    data, scaling = data_of(w2)
    # Columns of a program share their scales.
    columns = min(_COLUMNS, scaling["SCALE_ROWS"] or _COLUMNS)
    _listed_out_kernel[(rows, cdiv(hidden, columns))](
        out, inner, data, ids, shares, residual, more.down_bias, hidden, data.shape[0], K=width,
        TOP_K=ids.shape[1], IS_SHARE=more.is_share, PAIRS=next_power_of_2(ids.shape[1]),
        COLUMNS=columns, TILE=min(_MAX_TILE, next_power_of_2(width)), num_warps=_WARPS, **scaling,
        **launch_options(out.device),
    )  # fmt: skip


@triton.jit
def _places(is_here: tl.tensor) -> tl.tensor:
    """The index of each pair among those whose experts are here; -1 for the others."""
    return tl.where(is_here, tl.cumsum(is_here.to(tl.int32), axis=0) - 1, -1)


@triton.jit
def _pair_at(
    place: tl.tensor, expert_of: tl.tensor, at: tl.tensor, PAIRS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The pair in a place and its expert, both 0 for a place without a pair."""
    is_its = place == at
    pair = tl.sum(tl.where(is_its, tl.arange(0, PAIRS), 0), axis=0)
    return pair, tl.sum(tl.where(is_its, expert_of, 0), axis=0).to(tl.int64)


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
    SCALE_ROWS: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_SHARE: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Each thread has elements of K in all of the program's columns; the threads' parts are summed
    at the end. The first weights are loaded before `inner` is complete.
    """
    SIZE: tl.constexpr = min(GROUP, TILE)
    GROUPS: tl.constexpr = TILE // SIZE
    STEPS: tl.constexpr = (K + TILE - 1) // TILE
    release_next()
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
    # Eight numbers a thread, both of the weight and of the rows, so that neither moves between
    # threads.
    in_group = tl.max_contiguous(tl.arange(0, SIZE), 8)
    part = group[:, None] * SIZE + in_group[None, :]
    pair, expert = _pair_at(place, expert_of, 0, PAIRS)
    tile = once(
        of_column + expert * hidden * K + part[None], (part < tl.where(end > 0, K, 0))[None]
    )
    wait_for_last()
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
    result = with_row_parts(
        result, bias, residual, ids, shares, row, column, mask, hidden, experts, TOP_K, IS_SHARE
    )
    tl.store(out + row * hidden + column, result.to(out.dtype.element_ty), mask=mask)
