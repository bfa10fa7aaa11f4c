"""Attention over paged latents in eager torch, on any device."""

from __future__ import annotations

from itertools import pairwise

import torch
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.latent_attention.scaled import scaled_latents
from weft.kernels.ops.latent_attention.spec import NOTHING, LatentSpec
from weft.kernels.ops.pages.scaled_kv import is_scaled

_MAX_SCORES = 1 << 24
"""Most scores that are held at once."""


def own_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q_lens: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, sums = v.new_zeros(v.shape), q.new_zeros(q.shape[:2], dtype=torch.float32)
    for first, end in pairwise(cu_q_lens.tolist()):
        scores = torch.einsum("thd,shd->hts", q[first:end].float(), k[first:end].float()) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(hidden, float("-inf"))
        sums[first:end] = scores.logsumexp(dim=-1).t()
        out[first:end] = torch.einsum("hts,shv->thv", scores.softmax(-1), v[first:end].float())
    return out, sums


def earlier_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = v.new_zeros((*q.shape[:2], v.shape[2]))
    sums = q.new_full(q.shape[:2], NOTHING, dtype=torch.float32)
    keys = pairwise(cu_kv_lens.tolist())
    for (first, end), (begin, stop) in zip(pairwise(cu_q_lens.tolist()), keys, strict=True):
        if first == end or begin == stop:
            continue
        scores = torch.einsum("thd,shd->hts", q[first:end].float(), k[begin:stop].float()) * scale
        sums[first:end] = scores.logsumexp(dim=-1).t()
        out[first:end] = torch.einsum("hts,shv->thv", scores.softmax(-1), v[begin:stop].float())
    return out, sums


def latent_attention_reference(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    spec: LatentSpec,
    step: AttentionMetadata,
    sums_before: torch.Tensor | None = None,
) -> torch.Tensor:
    """`latent_attention` in eager torch, on any device: gathers each request's pages.

    With `sums_before`, [T, H] float32, it is `attention_before`, which writes them.
    """
    page_size, out = pool.shape[-2], q.new_zeros((*q.shape[:2], spec.value_dim))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    starts = step.cu_q_lens.tolist()
    for request, kv_len in enumerate(step.kv_lens.tolist()):
        first, end = starts[request], starts[request + 1]
        if sums_before is not None:
            kv_len -= end - first
        if first == end or kv_len == 0:
            continue
        pages = step.page_table[request, : -(-kv_len // page_size)].long()
        kept = pool[pages, 0, layer, 0]
        if is_scaled(pool):
            kept = scaled_latents(kept, spec.value_dim, wide)
        keys = kept.flatten(0, 1)[:kv_len].to(wide)
        keys[: spec.first_position] = 0.0  # These rows may never have been written.
        root = kv_len if sums_before is not None else kv_len - (end - first)
        at_once = max(1, _MAX_SCORES // (spec.heads * max(1, kv_len)))
        for begin in range(first, end, at_once):
            rows = slice(begin, min(begin + at_once, end))
            number = torch.arange(rows.start - first, rows.stop - first, device=q.device)
            words = None if step.ancestors is None else step.ancestors[rows]
            seen = _seen(number, root, kv_len, words)
            seen[:, : spec.first_position] = False
            scores = torch.matmul(q[rows].to(wide), keys.t()) * spec.scale
            scores.masked_fill_(~seen.unsqueeze(1), float("-inf"))
            if sums_before is not None:
                sums_before[rows] = scores.logsumexp(dim=-1).clamp(min=NOTHING)
            scores.masked_fill_(~seen.any(dim=1)[:, None, None], 0.0)
            shares = scores.softmax(dim=-1).masked_fill_(~seen.unsqueeze(1), 0.0)
            mixed = torch.matmul(shares, keys[:, : spec.value_dim])
            out[rows] = mixed.to(q.dtype)
    return out


def _seen(number: torch.Tensor, root: int, kv_len: int, words: torch.Tensor | None) -> torch.Tensor:
    """[N, kv_len] bool."""
    positions = torch.arange(kv_len, device=number.device)
    seen = positions <= (root + number).unsqueeze(1)
    if words is None:
        return seen
    bits = words.unsqueeze(1) >> (positions - root).clamp(0, 63)
    return seen & ((positions < root) | (bits & 1 == 1))
