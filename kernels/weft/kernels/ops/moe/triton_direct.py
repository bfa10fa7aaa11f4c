"""The experts of few rows on a GPU.

A program takes some columns of one pair of a row and an expert, or of all pairs of a row, and
streams its part of the weights. Pairs are not sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_fp8_weights import (
    data_of,
    scaled,
    scaled_experts,
    scales_of_expert,
    summed_row,
)
from weft.kernels.ops.lora.spec import ExpertAddition
from weft.kernels.ops.moe.spec import PLAIN_EXPERTS, ExpertParts, SharedExpert
from weft.kernels.ops.moe.triton_listed import listed_down
from weft.kernels.ops.moe.triton_lora import down_additions, gate_up_additions
from weft.kernels.ops.moe.triton_parts import once, store_inner, with_row_parts
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.formats.quantised import Fp8Experts
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2
from weft.kernels.shared.multiprocessors import num_multiprocessors

MAX_DIRECT_ROWS = 8
"""Most rows of floats; up to here rows rarely share an expert, so that sorting gains nothing."""
_MAX_TILE = 1 << 13
"""Elements of K up to which a program of gate and up takes whole columns, one after another."""
_ELEMENTS_PER_WARP = 1024
_WARPS_PER_SM = 16
"""Warps of such programs on each multiprocessor, as many as their registers allow."""
_PART = 2048
"""Elements of longer columns that are taken at once."""
_OUT_COLUMNS = 2
"""Columns of the second product that a program takes."""
_OUT_ELEMENTS_PER_WARP = 256
"""Elements of a column of the second product for each warp. With fewer, warps wait for one another:
on an H200 both products of experts of 384 elements take 20.6 us with 4 warps and 11.7 us with 2.
"""
_MAX_AT_ONCE = 1 << 13
"""Number of a row's experts times elements of K up to which a program loads all of its columns at
once. Beyond it, experts are taken one after another (`triton_listed`).
"""

_MAX_JOINED_ROWS = 2
"""Most rows whose shared expert is computed in the launches of the routed ones. On an H100 a layer
of Qwen3-Next's experts takes 41.4 us for one row and 69.4 us for two; with separate launches 49.0
and 75.1 us. For four rows it takes 131.5 us, and 130.1 us with separate launches.
"""


def joins_shared(x: torch.Tensor, top_k: int, inner_size: int) -> bool:
    """Whether `direct_moe` takes a shared expert together with the routed ones of x, [T, H]."""
    is_whole = next_power_of_2(top_k + 1) * next_power_of_2(inner_size) <= _MAX_AT_ONCE
    return 0 < x.shape[0] <= _MAX_JOINED_ROWS and x.dtype.itemsize == 2 and is_whole


def direct_moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w13: torch.Tensor | Fp8Experts,
    w2: torch.Tensor | Fp8Experts,
    residual: torch.Tensor | None,
    lora: ExpertAddition | None,
    more: ExpertParts = PLAIN_EXPERTS,
    shared: SharedExpert | None = None,
) -> torch.Tensor:
    """`weft.kernels.ops.moe.gpu.moe` for at most MAX_DIRECT_ROWS rows, in two launches.

    `shared` is added only where `joins_shared` holds and without other parts, adapters and scales.
    Its pairs follow those of the routed experts.
    """
    (rows, hidden), width, (pairs, top_k) = x.shape, w2.shape[2], (ids.numel(), ids.shape[1])
    num_shared, (gate_up, down, gate) = (0, (None,) * 3) if shared is None else (rows, shared)
    inner = torch.empty((pairs + num_shared, width), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    experts, is_share = w2.shape[0], more.placement is not None
    options, added = launch_options(x.device), None
    if lora is not None:
        added = gate_up_additions(x, ids, width, experts, lora, options, is_share=is_share)
    tile, parts, warps = _PART, width, 4
    if hidden <= _MAX_TILE:
        tile = next_power_of_2(hidden)
        warps = max(2, tile // _ELEMENTS_PER_WARP)
        programs = _WARPS_PER_SM // warps * num_multiprocessors(x.device)
        # The average number of pairs whose experts are on this rank.
        own_pairs = max(1, pairs * experts // more.num_routed(experts))
        parts = min(width, max(1, programs // (own_pairs + num_shared)))
    data, scaling = data_of(w13)
    _direct_inner_kernel[(pairs + num_shared, parts)](
        inner, x, data, gate_up, ids, added, more.gate_up_bias, width, experts, pairs, K=hidden,
        TOP_K=top_k, TILE=tile, IS_SHARE=is_share, num_warps=warps, GATING=more.gating.in_kernels,
        **scaling, **options,
    )  # fmt: skip
    tile, at_once = next_power_of_2(width), next_power_of_2(top_k + (num_shared > 0))
    if x.dtype.itemsize == 2 and at_once * tile <= _MAX_AT_ONCE:
        data, scaling = data_of(w2)
        _direct_out_kernel[(rows, cdiv(hidden, _OUT_COLUMNS))](
            out, inner, x, data, down, gate, ids, shares, residual, more.down_bias, hidden, experts,
            pairs, K=width, TOP_K=top_k, IS_SHARE=is_share, BLOCK_K=at_once, COLUMNS=_OUT_COLUMNS,
            TILE=tile, BLOCK_HIDDEN=next_power_of_2(hidden),
            num_warps=min(4, max(1, tile // _OUT_ELEMENTS_PER_WARP)), **scaling, **options,
        )  # fmt: skip
    else:
        listed_down(out, inner, ids, shares, w2, residual, more)
    if lora is not None:
        down_additions(inner, ids, shares, hidden, experts, lora, options, out, is_share=is_share)
    return out


@triton.jit
def _direct_inner_kernel(
    inner: tl.tensor,
    x: tl.tensor,
    w13: tl.tensor,
    shared: tl.tensor,
    ids: tl.tensor,
    added: tl.tensor,
    bias: tl.tensor,
    width: int,
    experts: int,
    pairs: int,
    scales: tl.tensor,
    SCALE_ROWS: tl.constexpr,
    GATING: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    IS_SHARE: tl.constexpr,
) -> None:
    """inner[pair] = gate and up of x[row], combined, for some columns.

    While a column is summed, the weights of the next one are loaded. Weights are read once and
    bypass the cache, which keeps data that is read again.
    """
    wait_for_last()
    # Released only now, since `_direct_out_kernel` reads ids and shares before its own wait.
    release_next()
    pair = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, TILE)
    own_row = pair // TOP_K
    if shared is None:
        expert = tl.load(ids + pair).to(tl.int64)
    else:
        is_shared = pair >= pairs
        expert = tl.load(ids + pair, mask=pair < pairs, other=0).to(tl.int64)
        own_row = tl.where(is_shared, pair - pairs, own_row)
    if IS_SHARE:  # noqa: SIM102 - known when compiled, unlike the other
        if expert >= experts:
            return
    gate_at = w13 + expert * 2 * width * K
    if shared is not None:
        gate_at = tl.where(is_shared, shared, gate_at)
    of_expert = scales_of_expert(scales, expert, 2 * width, K, SCALE_ROWS)
    up_at = gate_at + tl.cast(width, tl.int64) * K
    if bias is not None:
        bias += expert * 2 * width
    row = x + own_row * K
    begin = tl.program_id(1)
    step = tl.num_programs(1)
    if TILE >= K:
        values = tl.load(row + part, mask=part < K, other=0.0).to(tl.float32)
        gate = once(gate_at + begin * K + part, part < K)
        up = once(up_at + begin * K + part, part < K)
        for column in range(begin, width, step):
            gate_sum = summed_row(gate, values, of_expert, column, K, SCALE_ROWS)
            up_sum = summed_row(up, values, of_expert, column + width, K, SCALE_ROWS)
            later = column + step
            # The last column has no next one to load.
            is_next = part < tl.minimum(K, (width - later) * K)
            gate = once(gate_at + later * K + part, is_next)
            up = once(up_at + later * K + part, is_next)
            store_inner(inner, gate_sum, up_sum, added, bias, pair, column, width, GATING)
    else:
        for column in range(begin, width, step):
            gate_total = tl.zeros([TILE], tl.float32)
            up_total = tl.zeros([TILE], tl.float32)
            for start in tl.static_range(0, K, TILE):
                at = start + part
                values = tl.load(row + at, mask=at < K, other=0.0).to(tl.float32)
                gate = once(gate_at + column * K + at, at < K)
                up = once(up_at + column * K + at, at < K)
                gate_total += values * scaled(gate, of_expert, column, at, K, SCALE_ROWS)
                up_total += values * scaled(up, of_expert, column + width, at, K, SCALE_ROWS)
            gate_sum, up_sum = tl.sum(gate_total, axis=0), tl.sum(up_total, axis=0)
            store_inner(inner, gate_sum, up_sum, added, bias, pair, column, width, GATING)


@triton.jit
def _direct_out_kernel(
    out: tl.tensor,
    inner: tl.tensor,
    x: tl.tensor,
    w2: tl.tensor,
    shared: tl.tensor,
    shared_gate: tl.tensor,
    ids: tl.tensor,
    shares: tl.tensor,
    residual: tl.tensor,
    bias: tl.tensor,
    hidden: int,
    experts: int,
    pairs: int,
    scales: tl.tensor,
    SCALE_ROWS: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    IS_SHARE: tl.constexpr,
) -> None:
    """out[row] = residual[row] + share * down of inner, over the row's experts. All their weights
    are loaded before `inner` is complete.
    """
    release_next()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    last = tl.minimum(column, hidden - 1)
    part = tl.arange(0, TILE)
    number = tl.arange(0, BLOCK_K)
    pair = row * TOP_K + number
    expert = tl.load(ids + pair, mask=number < TOP_K, other=0).to(tl.int64)
    share = tl.load(shares + pair, mask=number < TOP_K, other=0.0)
    is_pair = number < TOP_K
    if shared is not None:
        is_shared, is_pair = number == TOP_K, number <= TOP_K
        pair = tl.where(is_shared, pairs + row, pair)
    mask = (is_pair[:, None] & (part < K)[None, :])[:, None, :]
    if IS_SHARE:
        is_here = expert < experts
        mask = mask & is_here[:, None, None]
        expert = tl.where(is_here, expert, 0)
    begin = w2 + (expert[:, None] * hidden + last[None, :]) * K
    if shared is not None:
        of_shared = shared + last[None, :] * K + expert[:, None] * 0
        begin = tl.where(is_shared[:, None], of_shared, begin)
    tiles = once(begin[:, :, None] + part[None, None, :], mask)
    if shared is not None:
        # Rows, like ids and shares, were complete before `_direct_inner_kernel` released this
        # kernel.
        element = tl.arange(0, BLOCK_HIDDEN)
        is_there = element < hidden
        given = tl.load(x + row * hidden + element, mask=is_there, other=0.0).to(tl.float32)
        given *= tl.load(shared_gate + element, mask=is_there, other=0.0).to(tl.float32)
        share = tl.where(is_shared, tl.sigmoid(tl.sum(given, axis=0)), share)
    wait_for_last()
    at = (pair[:, None] * K + part[None, :])[:, None, :]
    values = tl.load(inner + at, mask=mask, other=0.0).to(tl.float32)
    products = tiles.to(tl.float32) * (values * share[:, None, None])
    if scales is not None:
        of_expert = scales_of_expert(scales, expert, hidden, K, SCALE_ROWS)
        products = scaled_experts(products, of_expert, last, K, SCALE_ROWS)
    total = tl.sum(products, axis=0)
    result = tl.sum(total, axis=1)
    mask = column < hidden
    result = with_row_parts(
        result, bias, residual, ids, shares, row, column, mask, hidden, experts, TOP_K, IS_SHARE
    )
    tl.store(out + row * hidden + column, result.to(out.dtype.element_ty), mask=mask)
