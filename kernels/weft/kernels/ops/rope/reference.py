"""The rotation and the write of K and V in eager torch, on any device."""

from __future__ import annotations

import torch
from weft.kernels.ops.norm.reference import rms_norm_reference
from weft.kernels.ops.pages.scaled_kv import head_dim, is_scaled, parts_of, quantised


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
        num_adjacent: Pairs of adjacent elements, up to D/2; the others are halves.
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
