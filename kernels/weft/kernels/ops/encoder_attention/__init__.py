"""Attention in both directions over a ragged batch, without padding."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from weft.kernels.ops.encoder_attention.spec import Bounds
from weft.kernels.shared import cpu
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.encoder_attention import triton_ragged as _triton_ragged
else:
    _triton_ragged = deferred(__name__, "weft.kernels.ops.encoder_attention.triton_ragged")


def encoder_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Bounds,
    reach: int | None = None,
    slopes: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of each row to all rows of its sequence.

    On a CPU the native operations compute it if there are no slopes; else sequences of equal length
    are one call to torch. The other sequences of a batch change no bit of a result.

    Args:
        q: [T, H, D].
        k: [T, Hkv, D], Hkv a divisor of H.
        v: [T, Hkv, D].
        bounds: On a GPU rows from the last bound on are padding, whose results are undefined.
        reach: Rows that a row sees to each side; None: all.
        slopes: [H] float32: how much each head's scores fall with each row of distance (ALiBi,
            arXiv 2108.12409); None: not at all.
        scale: Factor on the scores; None: 1 / sqrt(D).

    Returns:
        [T, H, D], contiguous.

    Raises:
        ValueError: On a CPU: the bounds are not those of T rows.
    """
    if q.is_cuda:
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        return _triton_ragged.encoder_attention(q, k, v, bounds.on_device, reach, slopes, factor)
    _check_bounds(bounds, len(q))
    if (native := _native(q, k, v, slopes)) is not None:
        return _attend_natively(native, q, k, v, bounds, reach, scale)
    by_length: dict[int, list[int]] = {}
    for first, end in pairwise(bounds.on_host):
        by_length.setdefault(end - first, []).append(first)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for length, firsts in by_length.items():
        mask = _mask(length, reach, slopes, q)
        rows = _rows(firsts, length, q.device)
        own_q, own_k, own_v = (_sequences(x, rows, len(firsts), length) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(
            own_q, own_k, own_v, mask, scale=scale, enable_gqa=k.shape[1] < q.shape[1]
        )
        out[rows] = mixed.transpose(1, 2).reshape(-1, *q.shape[1:])
    return out


def _check_bounds(bounds: Bounds, tokens: int) -> None:
    given, on_host = bounds.on_device, bounds.on_host
    if given.dtype != torch.int32 or given.shape != (len(on_host),) or not on_host:
        raise ValueError(
            f"bounds of sequences are {given.dtype} {tuple(given.shape)}, not int32 "
            f"[{len(on_host)}] as on the host"
        )
    if on_host[0] != 0 or on_host[-1] != tokens:
        raise ValueError(f"sequences have rows {on_host[0]} to {on_host[-1]} of {tokens}")
    if any(end < first for first, end in pairwise(on_host)):
        raise ValueError("a sequence ends before it begins")


def _native(
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


def _attend_natively(
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


def _mask(
    length: int, reach: int | None, slopes: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor | None:
    """Numbers added to a sequence's scores, or a mask of the scores that count; None: neither."""
    if reach is not None and length <= reach + 1:
        reach = None
    if reach is None and slopes is None:
        return None
    at = torch.arange(length, device=like.device)
    distances = (at[:, None] - at[None, :]).abs()
    if slopes is None:
        return distances <= (length if reach is None else reach)
    added = distances * -slopes[:, None, None]
    if reach is not None:
        added.masked_fill_(distances > reach, float("-inf"))
    return added.to(like.dtype)


def _rows(firsts: Sequence[int], length: int, device: torch.device) -> slice | torch.Tensor:
    """A slice where the sequences follow one another, else row numbers."""
    if all(b - a == length for a, b in pairwise(firsts)):
        return slice(firsts[0], firsts[-1] + length)
    starts = torch.tensor(firsts, device=device)
    return (starts[:, None] + torch.arange(length, device=device)).reshape(-1)


def _sequences(
    x: torch.Tensor, rows: slice | torch.Tensor, count: int, length: int
) -> torch.Tensor:
    """[count, H, length, D]."""
    return x[rows].reshape(count, length, *x.shape[1:]).transpose(1, 2)
