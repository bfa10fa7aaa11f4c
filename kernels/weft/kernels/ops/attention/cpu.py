"""Attention over paged K and V by native operations on a CPU (csrc/attention.h)."""

from __future__ import annotations

import ctypes

import torch
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.pages.cpu import describe_pool
from weft.kernels.ops.pages.scaled_kv import SCALED_MULTIPLE, head_dim, is_scaled
from weft.kernels.shared import cpu


def native_for(q: torch.Tensor, pool: torch.Tensor) -> cpu.NativeCpu | None:
    """The native operations if they handle q [T, Hq, D] and this pool."""
    native = cpu.native_cpu_for(q)
    return native if native is not None and fits_native(native, q.shape[1], pool) else None


def fits_native(native: cpu.NativeCpu, heads: int, pool: torch.Tensor) -> bool:
    """Whether the native operation handles these shapes."""
    dim, group = head_dim(pool), heads // pool.shape[1]
    multiple = SCALED_MULTIPLE if is_scaled(pool) else 8
    return dim % multiple == 0 and dim <= native.max_dim and group <= native.max_group


def native_attention(
    native: cpu.NativeCpu,
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    spec: AttentionSpec,
    step: AttentionMetadata,
    earlier_rows: int,
) -> torch.Tensor:
    """`weft.kernels.ops.attention.paged_attention` for arguments that have been checked."""
    described = describe_pool(pool, q.dtype)
    tokens, heads, dim = q.shape
    requests, max_pages = step.page_table.shape
    out = torch.empty((tokens, heads * dim), dtype=q.dtype)
    status = native.paged_attention(
        ctypes.byref(described),
        layer,
        q.data_ptr(),
        out.data_ptr(),
        step.page_table.data_ptr(),
        step.cu_q_lens.data_ptr(),
        step.kv_lens.data_ptr(),
        requests,
        max_pages,
        step.page_table.stride(0),
        heads,
        tokens,
        spec.scale,
        spec.first_position,
        spec.window or 0,
        spec.is_chunked,
        None if step.ancestors is None else step.ancestors.data_ptr(),
        earlier_rows,
        None if spec.sinks is None else spec.sinks.data_ptr(),
        spec.softcap or 0.0,
        None if step.key_ends is None else step.key_ends.data_ptr(),
    )
    if status:
        cpu.check_status(status, "paged_attention")
    return out
