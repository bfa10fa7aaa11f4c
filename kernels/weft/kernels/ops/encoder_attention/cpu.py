"""Attention in both directions by a native operation on a CPU (csrc/encoder.h)."""

from __future__ import annotations

import ctypes
import math

import torch
from weft.kernels.ops.encoder_attention.spec import Bounds
from weft.kernels.shared import cpu


def native_for(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None
) -> cpu.NativeCpu | None:
    """Native operations need heads that follow one another, and V at the same distance from K in
    all rows, as one fused product computes them.
    """
    native = cpu.native_cpu_for(q)
    heads, dim = q.shape[1:]
    if native is None or slopes is not None or not q.numel():
        return None
    if dim % 2 or dim > native.max_dim or heads // k.shape[1] > native.max_group:
        return None
    are_dense = all(x.stride(2) == 1 and x.stride(1) == dim for x in (q, k, v))
    behind = v.storage_offset() - k.storage_offset()
    is_one = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    is_fit = is_one and k.stride(0) == v.stride(0) and behind > 0 and behind % dim == 0
    return native if are_dense and is_fit and q.dtype == k.dtype == v.dtype else None


def native_attention(
    native: cpu.NativeCpu,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Bounds,
    reach: int | None,
    scale: float | None,
) -> torch.Tensor:
    heads, dim = q.shape[1:]
    cu_lens = bounds.on_device.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    given = cpu.BothWaysStruct(
        q=q.data_ptr(),
        k=k.data_ptr(),
        out=out.data_ptr(),
        cu_lens=cu_lens.data_ptr(),
        q_row=q.stride(0),
        k_row=k.stride(0),
        to_value=v.storage_offset() - k.storage_offset(),
        sequences=len(cu_lens) - 1,
        heads=heads,
        kv_heads=k.shape[1],
        dim=dim,
        reach=-1 if reach is None else reach,
        scale=1 / math.sqrt(dim) if scale is None else scale,
        is_bf16=q.dtype == torch.bfloat16,
    )
    status = native.both_ways(ctypes.addressof(given))
    cpu.check_status(status, "encoder_attention")
    return out
