"""Rotation, head norms and the write of K and V into their pages, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.pages.scaled_kv import head_dim
from weft.kernels.ops.pages.triton_entries import FP8_MOST, INT8_MOST, SCALE_BYTES, bytes_of
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_BLOCK_HEADS = 16


def rope_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    k_out: torch.Tensor | None = None,
    *,
    num_adjacent: int = 0,
    is_settled: bool = False,
) -> torch.Tensor:
    """`weft.kernels.ops.rope.rope_and_cache` for CUDA tensors, whose arguments have been checked.

    `k_out`, [T, Hkv, D], receives K as it is stored. `is_settled`: positions and slots were written
    before a launch that was not dependent, and may be read ahead.
    """
    rows = qkv.shape[0]
    _, num_kv_heads, layers, _, page_size, _ = pool.shape
    dim = head_dim(pool)
    q = torch.empty((rows, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    if rows == 0:
        return q
    heads = num_heads + 2 * num_kv_heads
    _rope_and_cache_kernel[(rows, cdiv(heads, _BLOCK_HEADS))](
        q,
        k_out,
        qkv,
        positions,
        cos_sin,
        pool,
        slots,
        q_norm,
        k_norm,
        layer,
        eps,
        IS_SETTLED=is_settled,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        LAYERS=layers,
        PAGE_SIZE=page_size,
        PAGE_STRIDE=pool.stride(0),
        HALF=dim // 2,
        NUM_ADJACENT=num_adjacent,
        BLOCK_HALF=next_power_of_2(dim // 2),
        BLOCK_HEADS=_BLOCK_HEADS,
        num_warps=4,
        **launch_options(qkv.device),
    )
    return q


@triton.jit(do_not_specialize=["layer"])
def _rope_and_cache_kernel(
    q_out: tl.tensor,
    k_out: tl.tensor,
    qkv: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    pool: tl.tensor,
    slots: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    layer: int,
    eps: float,
    IS_SETTLED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    NUM_ADJACENT: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    release_next()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_HALF)
    in_half = column < HALF
    if not IS_SETTLED:
        wait_for_last()
    turn_at = cos_sin + tl.load(positions + row) * (2 * HALF) + column
    cos = tl.load(turn_at, mask=in_half, other=0.0)[None, :]
    sin = tl.load(turn_at + HALF, mask=in_half, other=0.0)[None, :]
    slot = tl.load(slots + row)
    if IS_SETTLED:
        wait_for_last()
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_half[None, :]
    is_q = head < NUM_HEADS
    is_v = head >= NUM_HEADS + NUM_KV_HEADS

    # Places of the two elements of each pair in a head.
    first = column
    second = HALF + column
    if NUM_ADJACENT > 0:
        is_apart = column < HALF - NUM_ADJACENT
        first = tl.where(is_apart, column, 2 * column)
        second = tl.where(is_apart, HALF - NUM_ADJACENT + column, 2 * column + 1)
    at = (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head)[:, None] * (2 * HALF)
    low = tl.load(qkv + at + first[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(qkv + at + second[None, :], mask=mask, other=0.0).to(tl.float32)

    scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF) + eps)
    normed_low = low
    normed_high = high
    if q_norm is not None:
        gain = tl.load(q_norm + first, mask=in_half, other=0.0).to(tl.float32)
        normed_low = tl.where(is_q[:, None], low * scale[:, None] * gain[None, :], normed_low)
        gain = tl.load(q_norm + second, mask=in_half, other=0.0).to(tl.float32)
        normed_high = tl.where(is_q[:, None], high * scale[:, None] * gain[None, :], normed_high)
    if k_norm is not None:
        gain = tl.load(k_norm + first, mask=in_half, other=0.0).to(tl.float32)
        normed_low = tl.where(is_q[:, None], normed_low, low * scale[:, None] * gain[None, :])
        gain = tl.load(k_norm + second, mask=in_half, other=0.0).to(tl.float32)
        normed_high = tl.where(is_q[:, None], normed_high, high * scale[:, None] * gain[None, :])

    # V is stored as it is, without norm and rotation.
    low = tl.where(is_v[:, None], low, normed_low * cos - normed_high * sin)
    high = tl.where(is_v[:, None], high, normed_high * cos + normed_low * sin)
    low = low.to(q_out.dtype.element_ty)
    high = high.to(q_out.dtype.element_ty)

    q_at = q_out + (row * NUM_HEADS + head)[:, None] * (2 * HALF)
    tl.store(q_at + first[None, :], low, mask=mask & is_q[:, None])
    tl.store(q_at + second[None, :], high, mask=mask & is_q[:, None])

    kv_head = head - NUM_HEADS - tl.where(is_v, NUM_KV_HEADS, 0)
    of_head = (kv_head * LAYERS + layer) * 2 + is_v.to(tl.int32)
    is_kv = mask & (is_q[:, None] == 0)
    page_at = pool + slot // PAGE_SIZE * PAGE_STRIDE
    if pool.dtype.element_ty.is_int():
        IS_INT8: tl.constexpr = pool.dtype.element_ty == tl.int8
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(wide_low), axis=1), tl.max(tl.abs(wide_high), axis=1))
        of_rows: tl.constexpr = PAGE_SIZE * (2 * HALF + SCALE_BYTES)
        kv_at = page_at + of_head[:, None] * of_rows + slot % PAGE_SIZE * (2 * HALF)
        tl.store(kv_at + first[None, :], bytes_of(wide_low, most, IS_INT8), mask=is_kv)
        tl.store(kv_at + second[None, :], bytes_of(wide_high, most, IS_INT8), mask=is_kv)
        to_scales = of_head * of_rows + PAGE_SIZE * (2 * HALF) + slot % PAGE_SIZE * SCALE_BYTES
        is_one = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (is_q == 0)
        scale_at = (page_at + to_scales).to(tl.pointer_type(tl.float32))
        # 0, or NaN where a value is not finite, since the largest magnitude ignores NaN.
        strange = tl.sum((wide_low - wide_low) + (wide_high - wide_high), axis=1)
        tl.store(scale_at, most / (INT8_MOST if IS_INT8 else FP8_MOST) + strange, mask=is_one)
    else:
        kv_row = of_head * PAGE_SIZE + slot % PAGE_SIZE
        kv_at = page_at + kv_row[:, None] * (2 * HALF)
        tl.store(kv_at + first[None, :], low, mask=is_kv)
        tl.store(kv_at + second[None, :], high, mask=is_kv)
    if k_out is not None:
        k_at = k_out + (row * NUM_KV_HEADS + kv_head)[:, None] * (2 * HALF)
        is_k = (is_q == 0) & (is_v == 0)
        tl.store(k_at + first[None, :], low, mask=mask & is_k[:, None])
        tl.store(k_at + second[None, :], high, mask=mask & is_k[:, None])


def rotate_heads(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    rows, heads, dim = x.shape
    if x.stride(2) != 1 or x.stride(1) != dim or cos_sin.shape[1] != dim:
        raise ValueError(f"x {tuple(x.shape)} does not fit turns {tuple(cos_sin.shape)}")
    if rows:
        _rotate_kernel[(rows, cdiv(heads, _BLOCK_HEADS))](
            x,
            positions,
            cos_sin,
            x.stride(0),
            HEADS=heads,
            HALF=dim // 2,
            BLOCK_HALF=next_power_of_2(dim // 2),
            BLOCK_HEADS=_BLOCK_HEADS,
            num_warps=4,
            **launch_options(x.device),
        )


@triton.jit
def _rotate_kernel(
    x: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    row_stride: int,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_HALF)
    in_half = column < HALF
    turn = cos_sin + tl.load(positions + row) * (2 * HALF) + column
    cos = tl.load(turn, mask=in_half, other=0.0)[None, :]
    sin = tl.load(turn + HALF, mask=in_half, other=0.0)[None, :]
    at = x + row * row_stride + head[:, None] * (2 * HALF) + column[None, :]
    mask = (head < HEADS)[:, None] & in_half[None, :]
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (low * cos - high * sin).to(x.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (high * cos + low * sin).to(x.dtype.element_ty), mask=mask)
