"""Attention to one rank's pages on a GPU, by the kernels of requests that bring one row."""

from __future__ import annotations

import torch
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.attention.triton_decode import decode_attention
from weft.kernels.ops.latent_attention import library_flash_mla, triton_latent
from weft.kernels.ops.latent_attention.spec import LatentSpec
from weft.kernels.ops.pages.scaled_kv import is_scaled


def planned(
    step: AttentionMetadata, dtype: torch.dtype, spec: LatentSpec, pool: torch.Tensor
) -> AttentionMetadata:
    """Prepares a step of `divided_rows` for consecutive layers of latents. `spec`: of all ranks'
    heads.
    """
    sizes = dtype, pool.shape[-1], spec, pool.shape[-2]
    if step.latents is not None or is_scaled(pool) or not library_flash_mla.supports(*sizes):
        return step
    assert step.key_ends is not None
    return step._replace(
        latents=library_flash_mla.plan_before(step.page_table, step.key_ends, spec.heads)
    )


def latents_here(
    q: torch.Tensor, pool: torch.Tensor, layer: int, spec: LatentSpec, step: AttentionMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all ranks' heads to latents here, and the logarithms of the softmaxes' sums."""
    return triton_latent.attention_before(q, pool, layer, spec, step)


def heads_here(
    q: torch.Tensor, pool: torch.Tensor, layer: int, spec: AttentionSpec, step: AttentionMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all ranks' heads to K and V here, and the logarithms of the softmaxes' sums."""
    assert step.key_ends is not None
    rows, heads, dim = q.shape
    out = torch.empty((rows, heads * dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    # `merge` adds sinks once for all ranks, and `key_ends` say what a window leaves.
    own = spec._replace(sinks=None, window=None, is_chunked=False, first_position=0)
    here = step._replace(kv_lens=step.key_ends, ancestors=None, is_settled=False)
    decode_attention(out, q, pool, layer, own, here, is_uniform=True, lse=lse)
    return out.view(q.shape), lse
