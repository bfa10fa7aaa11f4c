"""Attention in both directions over a ragged batch, without padding."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.encoder_attention.cpu import native_attention, native_for
from weft.kernels.ops.encoder_attention.reference import encoder_attention_reference
from weft.kernels.ops.encoder_attention.spec import Bounds
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
        bounds: Rows from the last bound on are padding, whose results are undefined.
        reach: Rows that a row sees to each side; None: all.
        slopes: [H] float32: how much each head's scores fall with each row of distance (ALiBi,
            arXiv 2108.12409); None: not at all.
        scale: Factor on the scores; None: 1 / sqrt(D).

    Returns:
        [T, H, D], contiguous.

    Raises:
        ValueError: On a CPU: the bounds are not those of at most T rows.
    """
    if q.is_cuda:
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        return _triton_ragged.encoder_attention(q, k, v, bounds.on_device, reach, slopes, factor)
    _check_bounds(bounds, len(q))
    if (native := native_for(q, k, v, slopes)) is not None:
        return native_attention(native, q, k, v, bounds, reach, scale)
    return encoder_attention_reference(q, k, v, bounds, reach, slopes, scale)


def _check_bounds(bounds: Bounds, tokens: int) -> None:
    given, on_host = bounds.on_device, bounds.on_host
    if given.dtype != torch.int32 or given.shape != (len(on_host),) or not on_host:
        raise ValueError(
            f"bounds of sequences are {given.dtype} {tuple(given.shape)}, not int32 "
            f"[{len(on_host)}] as on the host"
        )
    if on_host[0] != 0 or on_host[-1] > tokens:
        raise ValueError(f"sequences have rows {on_host[0]} to {on_host[-1]} of {tokens}")
    if any(end < first for first, end in pairwise(on_host)):
        raise ValueError("a sequence ends before it begins")
