"""Rotary position embedding (Su et al. 2021) with the write of K and V into their pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.pages.pool import check_rows, has_dense_pages
from weft.kernels.ops.pages.scaled_kv import head_dim, holds
from weft.kernels.ops.rope.cpu import native_for, native_rope
from weft.kernels.ops.rope.reference import rope_and_cache_reference, rotated
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
    native, dim = None if qkv.is_cuda else native_for(qkv, pool), head_dim(pool)
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
    given = (qkv, positions, cos_sin, pool, layer, slots, num_heads, q_norm, k_norm, eps)
    if native is None:
        return _triton_rope.rope_and_cache(*given, k_out, num_adjacent=num_adjacent)
    return native_rope(native, *given, num_adjacent)


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
