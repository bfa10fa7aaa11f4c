"""Ragged causal attention over paged K and V."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from weft.kernels.ops.attention.spec import MAX_TREE_ROWS, AttentionMetadata, AttentionSpec
from weft.kernels.ops.pages.pool import check_tables, has_dense_pages
from weft.kernels.ops.pages.scaled_kv import (
    SCALED_MULTIPLE,
    dequantised,
    head_dim,
    holds,
    is_scaled,
)
from weft.kernels.shared import cpu
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.attention import gpu as _gpu
    from weft.kernels.ops.attention import library_cudnn as _library_cudnn
    from weft.kernels.ops.attention import library_flash as _library_flash
    from weft.kernels.ops.attention.triton_extend import OwnKv
else:
    _gpu = deferred(__name__, "weft.kernels.ops.attention.gpu")
    _library_cudnn = deferred(__name__, "weft.kernels.ops.attention.library_cudnn")
    _library_flash = deferred(__name__, "weft.kernels.ops.attention.library_flash")


def paged_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    spec: AttentionSpec,
    step: AttentionMetadata,
    own: OwnKv | None = None,
    *,
    earlier_rows: int = 0,
) -> torch.Tensor:
    """Attention of each request's new rows over its pages, decode and prefill mixed freely.

    Row j of a request with q_len rows attends to positions first_position .. kv_len - q_len + j;
    with a window only to the last `window` of them, its own included (sliding window attention,
    Mistral 7B, arXiv 2310.06825, section 2), or to those of its chunk (Llama 4). A row without
    visible positions gets zeros. K and V of this step must be in the pool already. Kernels do not
    read K and V that no row sees, nor the table beyond kv_len.

    With ancestors a request's rows may be nodes of a tree (tree attention, SpecInfer, Miao et al.,
    arXiv 2305.09781, section 4.2), which follow one another in the pool, parents first. Row j sees
    all positions before the tree and the tree's rows that its word names. Its position, from which
    a window counts, follows from its depth.

    Args:
        q: [T, Hq, D], contiguous.
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page; in 8 bits, or
            dtype of `q`.
        step: Where the rows' K and V are; `places` is not used.
        own: K and V of these rows, from `own_kv`; None: kernels read them from the pool.
        earlier_rows: Number of rows of each tree in earlier steps: bit i stands for position
            kv_len - q_len - earlier_rows + i. Only with ancestors; q_len + earlier_rows is at
            most MAX_TREE_ROWS then, whatever the words. Not on a GPU together with a window.

    Returns:
        [T, Hq * D], dtype of `q`; softmax in float32.

    Raises:
        IndexError: `layer`, a length or a page points outside.
    """
    if spec.first_position < 0:
        raise ValueError(f"first_position is {spec.first_position}")
    if spec.window is not None and spec.window < 1:
        raise ValueError(f"window is {spec.window}")
    _check_softmax(spec, q)
    ancestors = step.ancestors
    if ancestors is not None or earlier_rows:
        check_ancestors(ancestors, q.shape[0], spec.window, step.max_q_len, earlier_rows)
        if ancestors is not None and ancestors.device != q.device:
            raise ValueError(f"ancestors on {ancestors.device}, q on {q.device}")
    native = cpu.native_cpu_for(q)
    is_native = native is not None and fits_native(native, q.shape[1], pool)
    if not (is_native or q.is_cuda):
        return paged_attention_reference(q, pool, layer, spec, step, earlier_rows=earlier_rows)
    if not step.is_settled:
        if not 0 <= layer < pool.shape[2]:
            raise IndexError(f"layer {layer} of a pool with {pool.shape[2]}")
        check_attention(q.shape, q.dtype, pool, step)
        if not q.is_contiguous():
            raise ValueError("q must be contiguous")
    if native is None:
        return _gpu.paged_attention(q, pool, layer, spec, step, own, earlier_rows=earlier_rows)
    described = cpu.describe_pool(pool, q.dtype)
    tokens, heads, dim = q.shape
    requests, max_pages = step.page_table.shape
    out = torch.empty((tokens, heads * dim), dtype=q.dtype)
    status = native.paged_attention(
        ctypes.byref(described),
        layer,
        q.data_ptr(),
        out.data_ptr(),
        step.page_table.data_ptr(),
        step.cu_q_lens.data_ptr(),
        step.kv_lens.data_ptr(),
        requests,
        max_pages,
        step.page_table.stride(0),
        heads,
        tokens,
        spec.scale,
        spec.first_position,
        spec.window or 0,
        spec.is_chunked,
        None if ancestors is None else ancestors.data_ptr(),
        earlier_rows,
        None if spec.sinks is None else spec.sinks.data_ptr(),
        spec.softcap or 0.0,
    )
    if status:
        cpu.check_status(status, "paged_attention")
    return out


def settled(
    step: AttentionMetadata, spec: AttentionSpec, rows: int, dtype: torch.dtype, pool: torch.Tensor
) -> AttentionMetadata:
    """Checks a step once for consecutive layers on a GPU in which every row attends.

    A launch that is not dependent (`weft.kernels.shared.dependent_launch`), such as the one that
    turns an embedding into the stream, must follow all launches that fill `step` and the pool.

    Args:
        spec: Constants of one of the layers, which may differ only in their windows.
        rows: T.
        pool: As in `paged_attention`.
    """
    check_attention((rows, spec.heads, spec.dim), dtype, pool, step)
    prompts = None
    if step.is_cold and _library_flash.supports(dtype, spec.dim, rows):
        prompts = _library_flash.prompt_rows(step.cu_q_lens, rows)
    return step._replace(is_settled=True, prompts=prompts)


def own_kv(qkv: torch.Tensor, spec: AttentionSpec, step: AttentionMetadata) -> OwnKv | None:
    """If kernels read K and V of a settled step's rows from memory of their own instead of from the
    pool: that memory, else None. `qkv`, [T, (Hq + 2 * Hkv) * D], contains V already; K gets new
    memory.
    """
    if not step.is_settled:
        return None
    return _gpu.own_kv(qkv, spec, step)


def is_faster_by_lengths(
    heads: int,
    dim: int,
    tokens: int,
    requests: int,
    max_q_len: int,
    max_kv_len: int,
    window: int | None = None,
) -> bool:
    """Whether a GPU's attention is faster if the host knows the lengths at launch, which it does
    not for a captured graph: cuDNN then handles long prompts without cached positions.
    """
    if window is not None and window < max_kv_len:
        return False
    return _library_cudnn.is_long_and_cold(heads, dim, tokens, requests, max_q_len, max_kv_len)


def is_faster_when_cold(dtype: torch.dtype, dim: int, tokens: int) -> bool:
    """Whether a GPU's attention is faster if requests of several rows are known to have no cached
    positions: FlashAttention-3 then handles them, where it is installed.
    """
    return _library_flash.supports(dtype, dim, tokens)


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
        mask = positions <= rows.unsqueeze(1)
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


def _check_softmax(spec: AttentionSpec, q: torch.Tensor) -> None:
    sinks = spec.sinks
    if sinks is not None and (
        sinks.shape != (q.shape[1],) or sinks.dtype != torch.float32 or sinks.device != q.device
    ):
        raise ValueError(
            f"sinks {tuple(sinks.shape)} {sinks.dtype} on {sinks.device} must be "
            f"[{q.shape[1]}] float32 on {q.device}"
        )
    if spec.softcap is not None and spec.softcap <= 0:
        raise ValueError(f"softcap is {spec.softcap}")


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


def check_ancestors(
    ancestors: torch.Tensor | None,
    tokens: int,
    window: int | None,
    max_q_len: int,
    earlier_rows: int = 0,
) -> None:
    """Raises ValueError unless a step can have these `ancestors`, as `paged_attention` defines
    them.
    """
    if earlier_rows and (
        ancestors is None or earlier_rows < 0 or max_q_len + earlier_rows > MAX_TREE_ROWS
    ):
        raise ValueError(
            f"{earlier_rows} rows before {max_q_len} of a tree of at most {MAX_TREE_ROWS}, "
            f"ancestors={'none' if ancestors is None else 'given'}"
        )
    if ancestors is None:
        return
    if (
        ancestors.shape != (tokens,)
        or ancestors.dtype != torch.int64
        or not ancestors.is_contiguous()
    ):
        raise ValueError(
            f"ancestors {tuple(ancestors.shape)} {ancestors.dtype} must be contiguous "
            f"[{tokens}] int64"
        )
    if window is not None and window <= MAX_TREE_ROWS:
        raise ValueError(
            f"a window of {window} positions is too small for trees of {MAX_TREE_ROWS} rows: draft "
            "chains"
        )


def check_attention(
    q_shape: Sequence[int], dtype: torch.dtype, pool: torch.Tensor, step: AttentionMetadata
) -> None:
    check_attention_pool(q_shape[1:], dtype, pool)
    check_tables(step)


def check_attention_pool(heads_dim: Sequence[int], dtype: torch.dtype, pool: torch.Tensor) -> None:
    """The part of `check_attention` that holds for all steps alike. `heads_dim`: [Hq, D]."""
    heads, dim = heads_dim
    if dim != head_dim(pool) or heads % pool.shape[1] or not holds(pool, dtype):
        raise ValueError(
            f"q [T, {heads}, {dim}] {dtype} does not fit a pool {tuple(pool.shape)} {pool.dtype}"
        )
    if not has_dense_pages(pool):
        raise ValueError(f"a pool with strides {pool.stride()} is not contiguous within a page")


def fits_native(native: cpu.NativeCpu, heads: int, pool: torch.Tensor) -> bool:
    """Whether the native operation handles these shapes."""
    dim, group = head_dim(pool), heads // pool.shape[1]
    multiple = SCALED_MULTIPLE if is_scaled(pool) else 8
    return dim % multiple == 0 and dim <= native.max_dim and group <= native.max_group
