"""The experts of few rows with FP8 weights, whose weights go straight from memory to the registers
of tensor cores (`linear.triton_streamed`). Pairs are not sorted.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from weft.kernels.ops.activation.spec import SILU
from weft.kernels.ops.linear.triton_fp8_weights import data_of
from weft.kernels.ops.linear.triton_groups_tensor_cores import has_kernel
from weft.kernels.ops.linear.triton_streamed import (
    groups_at_once,
    in_group,
    num_parts,
    numbers_layout,
    of_rows,
    of_warps,
    products,
    read_groups,
    release_next,
    sums_layout,
    wait_for_last,
)
from weft.kernels.ops.moe.spec import ExpertParts
from weft.kernels.shared.dependent_launch import launch_options
from weft.kernels.shared.formats.quantised import FP8_GROUP, Fp8Experts

_MAX_TOP_K = 8
"""Most experts of a row, one a warp."""
_AHEAD, _OUT_AHEAD = 4, 6
"""Most groups of the weights of each product that a warp reads ahead."""


def can_multiply(
    x: torch.Tensor, top_k: int, w13: Fp8Experts, w2: Fp8Experts, more: ExpertParts
) -> bool:
    """Whether `direct_fp8_moe` takes x, [T, H], on its device."""
    hidden, width = w2.shape[1:]
    return (
        has_kernel(x.device)
        and x.dtype == torch.bfloat16
        and more.gating == SILU
        and more.biases is None
        and top_k <= _MAX_TOP_K
        and hidden % FP8_GROUP == 0
        and width % FP8_GROUP == 0
        and all(one.rows % 16 == 0 for one in (w13, w2))
    )


def direct_fp8_moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w13: Fp8Experts,
    w2: Fp8Experts,
    residual: torch.Tensor | None,
    more: ExpertParts,
) -> torch.Tensor:
    """`weft.kernels.ops.moe.gpu.moe` in two launches, for what `can_multiply` accepts."""
    (rows, hidden), (experts, _, width), top_k = x.shape, w2.shape, ids.shape[1]
    pairs = ids.numel()
    inner = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    options = launch_options(x.device)
    is_share = more.placement is not None
    parts = num_parts(hidden // FP8_GROUP)
    data, scaling = data_of(w13)
    _fp8_inner_kernel[(pairs, width // 8)](
        inner, x.view(torch.int32), data.view(torch.int16), scaling["scales"], ids, width, experts,
        SCALE_ROWS=w13.rows, K=hidden, TOP_K=top_k, PARTS=parts, IS_SHARE=is_share,
        AT_ONCE=groups_at_once(hidden // FP8_GROUP // parts, _AHEAD), num_warps=parts, **options,
    )  # fmt: skip
    parts = 1 << (top_k - 1).bit_length()
    data, scaling = data_of(w2)
    _fp8_out_kernel[(rows, hidden // 16)](
        out, inner.view(torch.int32), data.view(torch.int16), scaling["scales"], ids, shares,
        residual, hidden, experts, SCALE_ROWS=w2.rows, K=width, TOP_K=top_k, PARTS=parts,
        IS_SHARE=is_share, AT_ONCE=groups_at_once(width // FP8_GROUP, _OUT_AHEAD), num_warps=parts,
        **options,
    )  # fmt: skip
    return out


@gluon.jit
def _first_vector(found: gl.tensor) -> gl.tensor:
    """The products, [PARTS, 16], of each warp's first vector; all of them are the same."""
    sums_of: gl.constexpr = found.type.layout
    vector = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, sums_of)))
    return gl.sum(gl.where((vector == 0)[None, None, :], found, 0.0), axis=2)


@gluon.jit
def _fp8_inner_kernel(
    inner: gl.tensor,
    x: gl.tensor,
    w13: gl.tensor,
    scales: gl.tensor,
    ids: gl.tensor,
    width: int,
    experts: int,
    SCALE_ROWS: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    PARTS: gl.constexpr,
    IS_SHARE: gl.constexpr,
    AT_ONCE: gl.constexpr,
) -> None:
    """inner[pair] = gate and up of x[row], combined, for 8 columns. Warps share K, and a warp's 16
    rows of the weight are 8 of gate and 8 of up.
    """
    GROUPS: gl.constexpr = K // 128 // PARTS
    weights_of: gl.constexpr = numbers_layout(PARTS, 16)
    vectors_of: gl.constexpr = numbers_layout(PARTS, 8)
    sums_of: gl.constexpr = sums_layout(PARTS)
    wait_for_last()
    # Released only now, since `_fp8_out_kernel` reads ids and shares before its own wait.
    release_next()
    pair = gl.program_id(0)
    column = gl.program_id(1) * 8
    expert = gl.load(ids + pair).to(gl.int64)
    if IS_SHARE:  # noqa: SIM102 - known when compiled, unlike the other
        if expert >= experts:
            return
    its = of_rows(weights_of, 16)
    at = (column + its % 8 + gl.where(its < 8, 0, width)) * (K // 2)
    at += of_warps(weights_of, PARTS) * (GROUPS * 64)
    at = w13 + expert * (width * K) + (at + in_group(weights_of))
    weights = read_groups(at, AT_ONCE)
    begin = pair // TOP_K * (K // 2) + of_warps(vectors_of, PARTS) * (GROUPS * 64)
    at_vector = x + (begin + in_group(vectors_of) + of_rows(vectors_of, 8) * 0)
    warp = gl.arange(0, PARTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, sums_of)))[:, None]
    its = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, sums_of)))[None, :]
    its = column + its % 8 + gl.where(its < 8, 0, width)
    if SCALE_ROWS > 0:
        at_scale = its // SCALE_ROWS * (K // 128) + warp * GROUPS
        at_scale = scales + expert * (gl.cdiv(2 * width, SCALE_ROWS) * (K // 128)) + at_scale
    else:
        at_scale = scales + expert * (2 * width) + (its + warp * 0)
    found = products(at, weights, at_vector, at_scale, GROUPS, AT_ONCE, SCALE_ROWS)
    both = gl.reshape(gl.sum(_first_vector(found), axis=0), [2, 8])
    gate, up = gl.split(gl.permute(both, (1, 0)))
    product = gl.fdiv(gate, 1.0 + gl.exp(-gate)) * up
    to = inner + pair * width + column + gl.arange(0, 8, layout=product.type.layout)
    gl.store(to, product.to(inner.dtype.element_ty))


@gluon.jit
def _fp8_out_kernel(
    out: gl.tensor,
    inner: gl.tensor,
    w2: gl.tensor,
    scales: gl.tensor,
    ids: gl.tensor,
    shares: gl.tensor,
    residual: gl.tensor,
    hidden: int,
    experts: int,
    SCALE_ROWS: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    PARTS: gl.constexpr,
    IS_SHARE: gl.constexpr,
    AT_ONCE: gl.constexpr,
) -> None:
    """out[row] = residual[row] + share * down of inner, over the row's experts, for 16 columns. A
    warp has one expert. The first of its weights are loaded before `inner` is complete.
    """
    GROUPS: gl.constexpr = K // 128
    weights_of: gl.constexpr = numbers_layout(PARTS, 16)
    vectors_of: gl.constexpr = numbers_layout(PARTS, 8)
    sums_of: gl.constexpr = sums_layout(PARTS)
    release_next()
    of_token = gl.program_id(0) * TOP_K
    column = gl.program_id(1) * 16
    expert = gl.load(ids + of_token + gl.minimum(of_warps(weights_of, PARTS), TOP_K - 1))
    if IS_SHARE:
        expert = gl.where(expert < experts, expert, 0)
    at = (expert.to(gl.int64) * hidden + (column + of_rows(weights_of, 16))) * (K // 2)
    at = w2 + (at + in_group(weights_of))
    weights = read_groups(at, AT_ONCE)
    warp = gl.arange(0, PARTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, sums_of)))[:, None]
    its = column + gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, sums_of)))[None, :]
    pair = of_token + gl.minimum(warp, TOP_K - 1)
    expert = gl.load(ids + pair)
    is_here = warp < TOP_K
    if IS_SHARE:
        is_here = is_here & (expert < experts)
        expert = gl.where(is_here, expert, 0)
    share = gl.load(shares + pair)
    if SCALE_ROWS > 0:
        begin = expert.to(gl.int64) * (gl.cdiv(hidden, SCALE_ROWS) * GROUPS)
        at_scale = scales + (begin + its // SCALE_ROWS * GROUPS)
    else:
        at_scale = scales + (expert.to(gl.int64) * hidden + its)
    begin = (of_token + gl.minimum(of_warps(vectors_of, PARTS), TOP_K - 1)) * (K // 2)
    at_vector = inner + (begin + in_group(vectors_of) + of_rows(vectors_of, 8) * 0)
    wait_for_last()
    found = products(at, weights, at_vector, at_scale, GROUPS, AT_ONCE, SCALE_ROWS)
    # `inner` has undefined numbers for experts of other ranks.
    found = gl.where(is_here, _first_vector(found) * share, 0.0)
    total = gl.sum(found, axis=0)
    to = gl.program_id(0) * hidden + column + gl.arange(0, 16, layout=total.type.layout)
    if residual is not None:
        total += gl.load(residual + to).to(gl.float32)
    gl.store(out + to, total.to(out.dtype.element_ty))
