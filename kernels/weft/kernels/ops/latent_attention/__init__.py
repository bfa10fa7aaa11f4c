"""Attention over paged latents: each position has one vector, which is key and value of all heads.

`latent_attention` computes with the latents themselves, which suits few rows. For a prompt's many
rows it is less work to compute keys and values by head for the prompt's own positions
(`own_attention`), and to merge the result (`merged`) with attention to the positions before the
step (`attention_before`). For very many rows it is even less work to compute keys and values by
head for those earlier positions too (`earlier_attention`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.attention import check_ancestors
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.latent_attention.reference import (
    earlier_attention_reference,
    latent_attention_reference,
    own_attention_reference,
)
from weft.kernels.ops.latent_attention.scaled import read_scaled, write_scaled
from weft.kernels.ops.latent_attention.spec import NOTHING, EarlierLatents, LatentSpec
from weft.kernels.ops.pages.pool import has_dense_pages
from weft.kernels.ops.pages.scaled_kv import head_dim, holds, is_scaled
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.attention import library_flash as _library_flash
    from weft.kernels.ops.latent_attention import library_flash_mla as _library_flash_mla
    from weft.kernels.ops.latent_attention import triton_latent as _triton_latent
else:
    _library_flash = deferred(__name__, "weft.kernels.ops.attention.library_flash")
    _library_flash_mla = deferred(__name__, "weft.kernels.ops.latent_attention.library_flash_mla")
    _triton_latent = deferred(__name__, "weft.kernels.ops.latent_attention.triton_latent")


def latent_attention(
    q: torch.Tensor, pool: torch.Tensor, layer: int, spec: LatentSpec, step: AttentionMetadata
) -> torch.Tensor:
    """Causal attention of each request's new rows over its pages, in the absorbed form.

    The caller has multiplied the queries by the projection of latents to keys, and multiplies the
    result by the projection of latents to values (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
    The step's own vectors must be in the pool already. Rows may form trees, as in
    `paged_attention`.

    Args:
        q: [T, H, D], contiguous.
        pool: [num_pages, 1, layers, 1, page_size, D], contiguous within a page, dtype of `q`; or in
            8 bits (`weft.kernels.ops.latent_attention.scaled`).

    Returns:
        [T, H, V], dtype of `q`; softmax in float32.

    Raises:
        IndexError: `layer` points outside.
    """
    _check(q, pool, layer, spec, step)
    if q.is_cuda:
        return _triton_latent.latent_attention(q, pool, layer, spec, step)
    return latent_attention_reference(q, pool, layer, spec, step)


def planned(
    step: AttentionMetadata, dtype: torch.dtype, spec: LatentSpec, rows: int, pool: torch.Tensor
) -> AttentionMetadata:
    """Prepares a step for consecutive layers of equal constants in which all rows attend. `rows`:
    T.
    """
    if step.divided is None:
        step = step._replace(divided=_divided(step.places, pool.shape[-2]))
    if step.num_earlier and step.earlier is None and step.ancestors is None:
        step = step._replace(earlier=_earlier_latents(step, step.num_earlier, rows, pool.shape[-2]))
    has_floats = pool.is_cuda and not is_scaled(pool)
    if not has_floats or step.latents is not None or step.ancestors is not None:
        return step
    if not _library_flash_mla.supports(dtype, pool.shape[-1], spec, pool.shape[-2]):
        return step
    if step.max_q_len <= 1 and rows != step.page_table.shape[0]:
        return step
    return step._replace(latents=_library_flash_mla.plan_latents(step, rows, spec.heads))


def _earlier_latents(
    step: AttentionMetadata, total: int, rows: int, page_size: int
) -> EarlierLatents:
    counts = step.cu_q_lens.diff()
    before = torch.where(counts > 1, step.kv_lens - counts, 0)
    ends = before.cumsum(0)
    number = torch.arange(total, device=ends.device)
    request = torch.searchsorted(ends, number, right=True)
    position = number - (ends - before).index_select(0, request)
    places = step.page_table[request, position // page_size].long() * page_size
    bounds = torch.cat([ends.new_zeros(1), ends])
    parts = []
    for first in range(0, total, rows):
        end = min(first + rows, total)
        parts.append((slice(first, end), (bounds - first).clamp(0, end - first).int()))
    return EarlierLatents(places + position % page_size, tuple(parts))


def attention_before(
    q: torch.Tensor, pool: torch.Tensor, layer: int, spec: LatentSpec, step: AttentionMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    """`latent_attention` to the positions before the step alone, without trees.

    Returns:
        [T, H, V], and [T, H] float32: the logarithm of each softmax's sum. A request without
        earlier positions gets zeros and a very negative number.
    """
    _check(q, pool, layer, spec, step)
    if step.ancestors is not None:
        raise ValueError("rows of trees attend to each other in the pool")
    if q.is_cuda:
        return _triton_latent.attention_before(q, pool, layer, spec, step)
    sums = torch.full(q.shape[:2], NOTHING, dtype=torch.float32)
    return latent_attention_reference(q, pool, layer, spec, step, sums), sums


def is_faster_uncompressed(dtype: torch.dtype, dim: int, value_dim: int, rows: int) -> bool:
    """Whether `own_attention` is fast for a step of `rows` rows, which needs FlashAttention-3."""
    return _library_flash.supports_own_rows(dtype, dim, value_dim, rows)


def own_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q_lens: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention among the rows of each request.

    Args:
        q: [T, H, D].
        k: [T, H, D].
        v: [T, H, V].
        cu_q_lens: [R + 1] int32: request r has the rows cu_q_lens[r] to cu_q_lens[r + 1].

    Returns:
        [T, H, V], dtype of `q`, and [T, H] float32: the logarithm of each softmax's sum.
    """
    if q.is_cuda:
        return _library_flash.own_attention(q, k, v, cu_q_lens, scale)
    return own_attention_reference(q, k, v, cu_q_lens, scale)


def earlier_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q_lens: torch.Tensor,
    cu_kv_lens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's rows to all keys that it is given, without a mask.

    Args:
        q: [T, H, D].
        k: [N, H, D].
        v: [N, H, V].
        cu_q_lens: [R + 1] int32: request r has the rows cu_q_lens[r] to cu_q_lens[r + 1].
        cu_kv_lens: [R + 1] int32: its keys and values likewise; a request may have none.

    Returns:
        [T, H, V], dtype of `q`, and [T, H] float32: the logarithm of each softmax's sum. Rows
        without keys get zeros and a very negative number.
    """
    if q.is_cuda:
        return _library_flash.earlier_attention(q, k, v, cu_q_lens, cu_kv_lens, scale)
    return earlier_attention_reference(q, k, v, cu_q_lens, cu_kv_lens, scale)


def merged(
    values: torch.Tensor,
    sums: torch.Tensor,
    others: torch.Tensor,
    other_sums: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Merges attention to two disjoint sets of positions.

    Args:
        values: [T, H, V]: attention to the first set.
        sums: [T, H] float32: logarithms of its softmaxes' sums.
        others: Like `values`, for the second set.
        other_sums: Like `sums`.
        out: Where the result goes, which may be `values`; None: new memory.
    """
    share = torch.sigmoid(other_sums - sums).to(values.dtype)
    return torch.lerp(values, others, share.unsqueeze(2), out=out)


def _check(
    q: torch.Tensor, pool: torch.Tensor, layer: int, spec: LatentSpec, step: AttentionMetadata
) -> None:
    tokens, heads, dim = q.shape
    if pool.dim() != 6 or pool.shape[1] != 1 or pool.shape[3] != 1 or head_dim(pool) != dim:
        raise ValueError(f"a pool {tuple(pool.shape)} does not fit queries {tuple(q.shape)}")
    if heads != spec.heads or not 0 < spec.value_dim <= dim or not holds(pool, q.dtype):
        raise ValueError(f"{spec} does not fit queries {tuple(q.shape)} {q.dtype}")
    if not (q.is_contiguous() and has_dense_pages(pool)):
        raise ValueError("q must be contiguous, and a pool contiguous within a page")
    if not 0 <= layer < pool.shape[2]:
        raise IndexError(f"layer {layer} of a pool with {pool.shape[2]}")
    if step.ancestors is not None:
        check_ancestors(step.ancestors, tokens, None, step.max_q_len)


def read_latents(
    pool: torch.Tensor, layer: int, spec: LatentSpec, places: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[T, D] of a dtype: the vectors that `write_latents` has written with these arguments."""
    pages, at = pool[:, 0, layer, 0], _divided(places, pool.shape[-2])
    return read_scaled(pages, at, spec.value_dim, dtype) if is_scaled(pool) else pages[at]


def write_latents(
    latents: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    spec: LatentSpec,
    places: torch.Tensor,
    divided: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Writes rows' vectors to the pool.

    Args:
        latents: [T, D].
        pool: As for `latent_attention`; changed.
        places: [T] int64: page * page_size + offset.
        divided: Page and offset of each of `places`, [T] int64 each; None: computed here.
    """
    if is_scaled(pool) and pool.is_cuda:
        _triton_latent.write_scaled(latents, pool, layer, spec, places)
        return
    pages, at = pool[:, 0, layer, 0], divided or _divided(places, pool.shape[-2])
    if is_scaled(pool):
        write_scaled(latents, pages, at, spec.value_dim)
    else:
        pages[at] = latents


def _divided(places: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return places // page_size, places % page_size
