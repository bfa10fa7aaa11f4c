"""Attention in both directions in torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from weft.kernels.ops.encoder_attention.spec import Bounds


def encoder_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Bounds,
    reach: int | None,
    slopes: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """`encoder_attention` where the host knows the bounds: one call for sequences of one length."""
    by_length: dict[int, list[int]] = {}
    for first, end in pairwise(bounds.on_host):
        if end > first:
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
