"""Rotary position embedding (Su et al. 2021) with the write of K and V into their pages."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.norm import rms_norm_reference
from weft.kernels.ops.pages.pool import check_rows, has_dense_pages
from weft.kernels.ops.pages.scaled_kv import (
    SCALED_MULTIPLE,
    head_dim,
    holds,
    is_scaled,
    parts_of,
    quantised,
)
from weft.kernels.shared import cpu
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.rope import triton_rope as _triton_rope
else:
    _triton_rope = deferred(__name__, "weft.kernels.ops.rope.triton_rope")


def rope_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_out: torch.Tensor | None = None,
    *,
    num_adjacent: int = 0,
    is_settled: bool = False,
) -> torch.Tensor:
    """Splits q, k and v, normalises and rotates q and k, stores k and v.

    The rotation turns pairs of elements. With H = D/2 - num_adjacent, the first 2 H elements form
    the pairs i and i + H for i below H ("neox" halves, as in Hugging Face's Llama). The elements
    after them form adjacent pairs 2 i and 2 i + 1 (as in GPT-J). A whole head may have either form.
    If only a part of a head is rotated, its other elements are adjacent pairs with cosine 1 and
    sine 0.

    Args:
        qkv: [T, (Hq + 2 * Hkv) * D], contiguous; not changed.
        positions: [T] int64, rows of `cos_sin`.
        cos_sin: [max_positions, D] float32: cosines of the D/2 pairs, then sines.
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page; in 8 bits, or
            dtype of `qkv`; written.
        slots: [T] int64: page * page_size + offset, all different.
        num_heads: Hq; 0: `qkv` has no q, and only K and V are stored.
        q_norm: [D] weight of an RMS norm over each head of q before the rotation, or None; dtype of
            `qkv` or float32.
        k_norm: [D], the same for k; if both norms are given, they have one dtype.
        k_out: [T, Hkv, D] or None: receives K as it is stored; on a GPU only.
        num_adjacent: Pairs of adjacent elements, up to D/2.
        is_settled: On a GPU: the caller has checked the arguments (`check_rope`), and positions and
            slots were written before a launch that was not dependent.

    Returns:
        Rotated q [T, Hq, D], dtype of `qkv`.

    Raises:
        IndexError: `layer`, a position or a slot points outside.
    """
    if is_settled:
        given = (qkv, positions, cos_sin, pool, layer, slots, num_heads, q_norm, k_norm, eps)
        return _triton_rope.rope_and_cache(
            *given, k_out, num_adjacent=num_adjacent, is_settled=True
        )
    native, dim = cpu.native_cpu_for(qkv), head_dim(pool)
    if native is not None and is_scaled(pool) and (dim % SCALED_MULTIPLE or dim > native.max_dim):
        native = None
    if (native is None and not qkv.is_cuda) or dim % 2:
        return rope_and_cache_reference(
            qkv,
            positions,
            cos_sin,
            pool,
            layer,
            slots,
            num_heads,
            num_kv_heads,
            q_norm,
            k_norm,
            eps,
            num_adjacent=num_adjacent,
        )
    rows = qkv.shape[0]
    if not 0 <= num_adjacent <= dim // 2:
        raise ValueError(f"{num_adjacent} adjacent pairs of {dim // 2}")
    check_rope(qkv.shape, qkv.dtype, positions, cos_sin, pool, slots, (num_heads, num_kv_heads))
    if not qkv.is_contiguous():
        raise ValueError("qkv must be contiguous")
    norms = [norm for norm in (q_norm, k_norm) if norm is not None]
    if any(norm.shape != (dim,) or norm.dtype != norms[0].dtype for norm in norms) or (
        norms and norms[0].dtype not in (qkv.dtype, torch.float32)
    ):
        raise ValueError(f"a head norm's weight must be [{dim}] {qkv.dtype} or float32")
    if not 0 <= layer < pool.shape[2]:
        raise IndexError(f"layer {layer} of a pool with {pool.shape[2]}")
    if native is None:
        given = (qkv, positions, cos_sin, pool, layer, slots, num_heads, q_norm, k_norm, eps)
        return _triton_rope.rope_and_cache(*given, k_out, num_adjacent=num_adjacent)
    described = cpu.describe_pool(pool, qkv.dtype)
    q = torch.empty((rows, num_heads, dim), dtype=qkv.dtype)
    status = native.rope_and_cache(
        ctypes.byref(described),
        layer,
        qkv.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.shape[0],
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        bool(norms) and norms[0].dtype == torch.float32,
        eps,
        rows,
        num_heads,
        num_adjacent,
        q.data_ptr(),
    )
    if status:
        cpu.check_status(status, "rope_and_cache")
    return q


def rope_and_cache_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    num_adjacent: int = 0,
) -> torch.Tensor:
    dim, page_size = head_dim(pool), pool.shape[-2]
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q = rms_norm_reference(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm_reference(k, k_norm, eps)
    turns = cos_sin[positions]
    pages, offsets = slots // page_size, slots % page_size
    for part, vectors in enumerate((rotated(k, turns, num_adjacent), v)):
        if is_scaled(pool):
            numbers, scales = parts_of(pool)
            rounded, own = quantised(vectors, numbers.dtype)
            numbers.view(torch.uint8)[pages, :, layer, part, offsets] = rounded.view(torch.uint8)
            scales[pages, :, layer, part, offsets] = own
        else:
            pool[pages, :, layer, part, offsets] = vectors
    return rotated(q, turns, num_adjacent)


def rotated(
    x: torch.Tensor, turns: torch.Tensor, num_adjacent: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The rotation alone, in eager torch on any device, computed in float32 and rounded once.

    Args:
        x: [T, heads, D].
        turns: [T, D] float32: rows of `cos_sin`.
        num_adjacent: As in `rope_and_cache`.
        out: Where the result goes, of any strides, which may be `x` itself; None: new memory.

    Returns:
        [T, heads, D], dtype of `x`.
    """
    out = x.new_empty(x.shape) if out is None else out
    half = x.shape[-1] // 2 - num_adjacent
    halves = slice(half), slice(half, 2 * half), slice(half)
    adjacent = slice(2 * half, None, 2), slice(2 * half + 1, None, 2), slice(half, None)
    # Operations convert dtypes while they read and write, which saves launches.
    for first, second, pairs in (halves, adjacent):
        low, high = x[..., first], x[..., second]
        if low.shape[-1]:
            cos, sin = (each[..., pairs] for each in turns.unsqueeze(1).chunk(2, dim=-1))
            products = low * cos, high * sin, high * cos, low * sin
            torch.sub(products[0], products[1], out=out[..., first])
            torch.add(products[2], products[3], out=out[..., second])
    return out


def rotate_heads(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotates the halves of heads in place, computed in float32.

    Args:
        x: [T, heads, D], heads contiguous, any stride between rows.
        positions: [T] int64, rows of `cos_sin`.
        cos_sin: [max_positions, D] float32: cosines of the D/2 pairs, then sines.
    """
    if x.is_cuda:
        _triton_rope.rotate_heads(x, positions, cos_sin)
    else:
        x.copy_(rotated(x, cos_sin[positions]))


def check_rope(
    qkv_shape: Sequence[int],
    dtype: torch.dtype,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    heads: tuple[int, int],
) -> None:
    """Raises ValueError unless shapes and dtypes are as `rope_and_cache` says.

    `heads` are those of q and of K.
    """
    rows, width = qkv_shape
    check_rope_pool(width, dtype, cos_sin, pool, heads)
    check_rows(rows, positions, slots)


def check_rope_pool(
    width: int,
    dtype: torch.dtype,
    cos_sin: torch.Tensor,
    pool: torch.Tensor,
    heads: tuple[int, int],
) -> None:
    """The part of `check_rope` that holds for all steps alike; `width` is that of a row of qkv."""
    dim = head_dim(pool)
    fits = width == (heads[0] + 2 * heads[1]) * dim and pool.shape[1] == heads[1]
    if not fits or not holds(pool, dtype):
        raise ValueError(
            f"qkv [T, {width}] {dtype} does not fit {heads[0]} + 2 * {heads[1]} heads and "
            f"a pool {tuple(pool.shape)} {pool.dtype}"
        )
    if not has_dense_pages(pool):
        raise ValueError(f"a pool with strides {pool.stride()} is not contiguous within a page")
    if cos_sin.dtype != torch.float32 or cos_sin.shape[1] != dim or not cos_sin.is_contiguous():
        raise ValueError(f"cos_sin must be contiguous [max_positions, {dim}] float32")
