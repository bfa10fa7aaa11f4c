"""The rotation and the write of K and V by a native operation on a CPU."""

from __future__ import annotations

import ctypes

import torch
from weft.kernels.ops.pages.cpu import describe_pool
from weft.kernels.ops.pages.scaled_kv import SCALED_MULTIPLE, head_dim, is_scaled
from weft.kernels.shared import cpu


def native_for(qkv: torch.Tensor, pool: torch.Tensor) -> cpu.NativeCpu | None:
    """The native operations if they handle such rows and this pool."""
    native, dim = cpu.native_cpu_for(qkv), head_dim(pool)
    if native is not None and is_scaled(pool) and (dim % SCALED_MULTIPLE or dim > native.max_dim):
        return None
    return native


def native_rope(
    native: cpu.NativeCpu,
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
    num_adjacent: int,
) -> torch.Tensor:
    """`weft.kernels.ops.rope.rope_and_cache` for arguments that have been checked."""
    norms = [norm for norm in (q_norm, k_norm) if norm is not None]
    described = describe_pool(pool, qkv.dtype)
    q = torch.empty((qkv.shape[0], num_heads, head_dim(pool)), dtype=qkv.dtype)
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
        qkv.shape[0],
        num_heads,
        num_adjacent,
        q.data_ptr(),
    )
    if status:
        cpu.check_status(status, "rope_and_cache")
    return q
