"""Attention to pages that several ranks divide among them: decode context parallelism.

Ranks that would hold the same KV heads each have some of the pages. Each computes the attention of
all their query heads to its own pages, and gets the other ranks' results for its own heads. Partial
softmaxes merge by the logarithms of their sums, as in flash decoding
(https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec, PageRanks, PagesHere
from weft.kernels.ops.divided_pages.reference import attention_here_reference
from weft.kernels.ops.latent_attention.scaled import scaled_latents
from weft.kernels.ops.latent_attention.spec import LatentSpec
from weft.kernels.ops.pages.pool import row_in_pool
from weft.kernels.ops.pages.scaled_kv import dequantised, is_scaled
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.divided_pages import gpu as _gpu
    from weft.kernels.ops.divided_pages import triton_rows as _triton_rows
else:
    _gpu = deferred(__name__, "weft.kernels.ops.divided_pages.gpu")
    _triton_rows = deferred(__name__, "weft.kernels.ops.divided_pages.triton_rows")

NULL_PAGE = 0
"""Page of every pool that receives what no one reads."""


def number_here(pages: torch.Tensor, ranks: PageRanks) -> torch.Tensor:
    """Numbers of pages in the pool of the rank on which they lie."""
    return pages if ranks.has_one_pool else row_in_pool(pages, ranks.size)


def divided(step: AttentionMetadata, ranks: PageRanks, page_size: int) -> AttentionMetadata:
    """A step whose rows attend to pages that ranks divide, and write to those of this rank alone.

    Waits for no device, so that a graph may capture it.

    Args:
        step: Page table and places name pages by their numbers among all ranks. Rows form no trees.
    """
    if step.ancestors is not None:
        raise ValueError("rows of trees do not see a prefix of the pages")
    if step.page_table.is_cuda:
        return _triton_rows.divided_rows(step, ranks, page_size)
    table, rank, size = step.page_table, ranks.rank, ranks.size
    columns = torch.arange(table.shape[1], device=table.device)
    lens = step.kv_lens.long().unsqueeze(1)
    are_here = (table % size == rank) & (columns * page_size < lens)
    until = are_here.cumsum(1)
    before = until - are_here.long()
    numbers = number_here(table, ranks)
    here = torch.zeros((table.shape[0], table.shape[1] + 1), dtype=torch.int32, device=table.device)
    here.scatter_(1, torch.where(are_here, before, table.shape[1]), numbers)

    def seen(requests: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """How many of the first `ends` positions of requests are here."""
        pages, offsets = ends // page_size, ends % page_size
        last = pages.clamp(max=table.shape[1] - 1)
        full = torch.where(pages < table.shape[1], before[requests, last], until[requests, last])
        return full * page_size + are_here[requests, last] * offsets

    rows = torch.arange(step.places.shape[0], device=table.device)
    starts = step.cu_q_lens.long()
    requests = torch.searchsorted(starts, rows, right=True).sub(1).clamp(max=table.shape[0] - 1)
    ends = step.key_ends
    if ends is None:
        # Padding rows follow the last request's.
        ends = lens[requests, 0] - starts[requests + 1] + 1 + rows
        ends = torch.minimum(ends.clamp(min=0), lens[requests, 0])
    pages, offsets = step.places // page_size, step.places % page_size
    into = torch.where(pages % size == rank, number_here(pages, ranks), NULL_PAGE)
    own = AttentionMetadata(
        page_table=here[:, :-1],
        places=step.places,
        cu_q_lens=step.cu_q_lens,
        kv_lens=seen(torch.arange(table.shape[0], device=table.device), lens[:, 0]).int(),
        max_q_len=step.max_q_len,
        max_kv_len=step.max_kv_len,
        key_ends=seen(requests, ends.long()).int(),
    )
    return step._replace(
        places=into * page_size + offsets,
        divided=(into, offsets),
        here=PagesHere(ranks, own),
    )


def planned(here: PagesHere, dtype: torch.dtype, spec: LatentSpec, pool: torch.Tensor) -> PagesHere:
    """Prepares for consecutive layers of equal constants. `spec`: of this rank's heads."""
    if not pool.is_cuda:
        return here
    all_heads = spec._replace(heads=spec.heads * here.ranks.size)
    step = _gpu.planned(here.step, dtype, all_heads, pool)
    return here if step is here.step else here._replace(step=step)


def attention(
    q: torch.Tensor, pool: torch.Tensor, layer: int, spec: AttentionSpec, here: PagesHere
) -> torch.Tensor:
    """`weft.kernels.ops.attention.paged_attention` to pages that ranks divide. All ranks call it.

    Args:
        q: [T, Hq, D]: this rank's heads, which attend to the only KV head of `pool`.
        pool: [num_pages, 1, layers, 2, page_size, D]: this rank's pages, or all in one pool.
        spec: Without window and first position.

    Returns:
        [T, Hq * D], dtype of `q`.
    """
    if spec.window is not None or spec.first_position:
        raise ValueError(f"{spec}: pages are divided for layers that attend to all positions")
    asked = here.ranks.gather(q)
    if q.is_cuda:
        values, sums = _gpu.heads_here(asked, pool, layer, spec, here.step)
    else:
        read = partial(_read_kv, pool, layer, _wide(q.dtype))
        sizes = pool.shape[-2], read, spec.scale, spec.softcap
        values, sums = attention_here_reference(asked, here.step, *sizes)
    return here.ranks.merge(values, sums, spec.sinks).to(q.dtype).flatten(1)


def latent_attention(
    q: torch.Tensor, pool: torch.Tensor, layer: int, spec: LatentSpec, here: PagesHere
) -> torch.Tensor:
    """`weft.kernels.ops.latent_attention.latent_attention` to pages that ranks divide. All ranks
    call it.

    Args:
        q: [T, H, D]: absorbed queries of this rank's heads.
        pool: [num_pages, 1, layers, 1, page_size, D]: this rank's pages, or all in one pool.
        spec: Without first position.

    Returns:
        [T, H, V], dtype of `q`.
    """
    if spec.first_position:
        raise ValueError(f"{spec}: pages are divided for layers that attend to all positions")
    asked = here.ranks.gather(q)
    if q.is_cuda:
        all_heads = spec._replace(heads=asked.shape[1])
        values, sums = _gpu.latents_here(asked, pool, layer, all_heads, here.step)
    else:
        read = partial(_read_latents, pool, layer, spec.value_dim, _wide(q.dtype))
        sizes = pool.shape[-2], read, spec.scale
        values, sums = attention_here_reference(asked, here.step, *sizes)
    return here.ranks.merge(values, sums, None).to(q.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _read_kv(
    pool: torch.Tensor, layer: int, wide: torch.dtype, pages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # [pages, Hkv, 2, P, D] -> [2, positions, Hkv, D]
    kept = dequantised(pool[pages, :, layer], wide).to(wide)
    k, v = kept.permute(2, 0, 3, 1, 4).flatten(1, 2).unbind()
    return k, v


def _read_latents(
    pool: torch.Tensor, layer: int, value_dim: int, wide: torch.dtype, pages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    kept = pool[pages, 0, layer, 0]
    kept = scaled_latents(kept, value_dim, wide) if is_scaled(pool) else kept.to(wide)
    keys = kept.flatten(0, 1).unsqueeze(1)
    return keys, keys[..., :value_dim]
