"""Attention to one rank's pages in eager torch, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.latent_attention.spec import NOTHING

_MAX_SCORES = 1 << 24
"""Most scores that are held at once."""


def attention_here_reference(
    q: torch.Tensor,
    step: AttentionMetadata,
    page_size: int,
    read: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each row to the first positions of its request on this rank.

    Args:
        q: [T, H, D].
        step: As in `PagesHere`.
        read: Returns K, [M, Hkv, D], and V, [M, Hkv, V], of pages, [M / page_size] int64, in
            float32 or float64.
        softcap: As in `AttentionSpec`.

    Returns:
        [T, H, V] in the dtype of K, and [T, H] float32: the logarithm of each softmax's sum. A row
        that sees nothing gets zeros and a very negative number.
    """
    assert step.key_ends is not None, "rows say how much of this rank's pages they see"
    values, sums = None, q.new_full(q.shape[:2], NOTHING, dtype=torch.float32)
    starts = step.cu_q_lens.tolist()
    for request, kv_len in enumerate(step.kv_lens.tolist()):
        first, end = starts[request], starts[request + 1]
        pages = step.page_table[request, : max(1, -(-kv_len // page_size))].long()
        k, v = read(pages)
        if values is None:
            values = v.new_zeros((*q.shape[:2], v.shape[2]))
        if first == end or kv_len == 0:
            continue
        # [Hkv, M, D]: positions that this step's requests never wrote may hold anything.
        k, v = (x[:kv_len].transpose(0, 1) for x in (k, v))
        group = q.shape[1] // k.shape[0]
        positions = torch.arange(kv_len, device=q.device)
        at_once = max(1, _MAX_SCORES // (q.shape[1] * kv_len))
        for begin in range(first, end, at_once):
            rows = slice(begin, min(begin + at_once, end))
            seen = positions < step.key_ends[rows].unsqueeze(1)
            # [Hkv, group * N, D]
            count = rows.stop - rows.start
            asked = q[rows].to(k.dtype).view(count, -1, group, q.shape[2]).permute(1, 2, 0, 3)
            scores = asked.flatten(1, 2) @ k.transpose(1, 2) * scale
            scores = scores.view(-1, group, count, kv_len)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, float("-inf"))
            total = scores.logsumexp(dim=-1)
            sums[rows] = total.clamp(min=NOTHING).permute(2, 0, 1).flatten(1).float()
            shares = scores.sub(total.clamp(min=NOTHING).unsqueeze(-1)).exp()
            mixed = (shares.flatten(1, 2) @ v).view(-1, group, count, v.shape[2])
            values[rows] = mixed.permute(2, 0, 1, 3).flatten(1, 2)
    assert values is not None, "a step has requests"
    return values, sums


def merged_reference(
    values: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """`PageRanks.merge` of all ranks' results.

    Args:
        values: [ranks, T, H, V].
        sums: [ranks, T, H] float32.
        sinks: [H] float32, or None.

    Returns:
        [T, H, V] in the dtype of `values`, which is float32 or float64.
    """
    parts = list(sums)
    if sinks is not None:
        parts.append(sinks.expand_as(sums[0]))
    total = parts[0]
    for part in parts[1:]:
        total = torch.logaddexp(total, part)
    out = torch.zeros_like(values[0])
    for one, part in zip(values, sums, strict=True):
        out += one * (part - total).exp().unsqueeze(-1)
    return out
