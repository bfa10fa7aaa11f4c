"""Attention over paged K and V in eager torch, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.pages.scaled_kv import dequantised


def paged_attention_reference(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    spec: AttentionSpec,
    step: AttentionMetadata,
    *,
    earlier_rows: int = 0,
) -> torch.Tensor:
    """`paged_attention` in eager torch: gathers each request's pages, any device."""
    page_size = pool.shape[-2]
    out = torch.empty_like(q)
    window, ancestors, first_position = spec.window, step.ancestors, spec.first_position
    starts = step.cu_q_lens.tolist()
    for request, kv_len in enumerate(step.kv_lens.tolist()):
        first, end = starts[request], starts[request + 1]
        if first == end:
            continue
        if kv_len <= first_position:
            out[first:end] = 0
            continue
        first_row = kv_len - (end - first)
        rows = torch.arange(first_row, kv_len, device=q.device)
        at = rows
        if ancestors is not None:
            words, root = ancestors[first:end], first_row - earlier_rows
            at = root + depths_of(words, rows - root)
        seen = first_position
        firsts = None if window is None else first_in_window(at, window, spec.is_chunked)
        if firsts is not None:
            seen = max(first_position, int(firsts.min()))
        first_page = seen // page_size
        pages = step.page_table[request, first_page : -(-kv_len // page_size)].long()
        # [pages, Hkv, 2, P, D] -> [2, Hkv, seen, D]
        kept = dequantised(pool[pages, :, layer], q.dtype)
        kv = kept.permute(2, 1, 0, 3, 4).flatten(2, 3)
        before = first_page * page_size
        kv = kv[:, :, seen - before : kv_len - before]
        positions = torch.arange(seen, kv_len, device=q.device)
        ends = rows + 1 if step.key_ends is None else step.key_ends[first:end]
        mask = positions < ends.unsqueeze(1)
        if firsts is not None:
            mask &= positions >= firsts.unsqueeze(1)
        if ancestors is not None:
            bits = words.unsqueeze(1) >> (positions - root).clamp(0, 63)
            mask &= (positions < root) | (bits & 1 == 1)
        mixed = _attend(q[first:end].transpose(0, 1), kv[0], kv[1], mask, spec).transpose(0, 1)
        out[first:end] = mixed.masked_fill((rows < first_position)[:, None, None], 0)
    return out.flatten(1)


def first_in_window(at: torch.Tensor, window: int, is_chunked: bool) -> torch.Tensor:
    """First position that a row at position `at` attends to; negative for the first rows."""
    return at // window * window if is_chunked else at + 1 - window


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Attention of [Hq, N, D] over [Hkv, M, D] where `mask`, [N, M], is true."""
    if spec.sinks is None and spec.softcap is None:
        return F.scaled_dot_product_attention(
            q.unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            attn_mask=mask,
            scale=spec.scale,
            enable_gqa=True,
        )[0]
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0).float() for x in (k, v))
    scores = q.float() @ k.transpose(1, 2) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if spec.sinks is None:
        return (scores.softmax(dim=-1) @ v).to(q.dtype)
    sinks = spec.sinks[:, None, None].expand(-1, scores.shape[1], 1)
    weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    return (weights @ v).to(q.dtype)


def depths_of(words: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Depth of each row in its tree: the number of the tree's rows that it sees before itself.

    Args:
        words: [N] int64: each row's word of `AttentionMetadata.ancestors`.
        rows: [N] int64: each row's index in its tree.

    Returns:
        [N] int64; 0 for row 0 of a tree.
    """
    bits = torch.arange(64, device=words.device)
    is_seen = (words.unsqueeze(1) >> bits & 1 == 1) & (bits <= rows.unsqueeze(1))
    # Bit 63 also stands for all later rows.
    return is_seen.sum(dim=1) - 1 + (rows - 63).clamp(min=0) * (words < 0)
