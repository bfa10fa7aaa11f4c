"""Ragged causal attention over paged K and V."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.attention.cpu import native_attention, native_for
from weft.kernels.ops.attention.reference import paged_attention_reference
from weft.kernels.ops.attention.spec import MAX_TREE_ROWS, AttentionMetadata, AttentionSpec
from weft.kernels.ops.pages.pool import check_tables, has_dense_pages
from weft.kernels.ops.pages.scaled_kv import head_dim, holds
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.attention import gpu as _gpu
    from weft.kernels.ops.attention import library_cudnn as _library_cudnn
    from weft.kernels.ops.attention import library_flash as _library_flash
    from weft.kernels.ops.attention.spec import OwnKv
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

    With `key_ends` a row also attends to later rows of its request, which this step brings: tokens
    of an image see one another both ways (Gemma 3). A window then still begins as its own position
    says.

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
    check_key_ends(step, q.shape[0])
    native = None if q.is_cuda else native_for(q, pool)
    if native is None and not q.is_cuda:
        return paged_attention_reference(q, pool, layer, spec, step, earlier_rows=earlier_rows)
    if not step.is_settled:
        if not 0 <= layer < pool.shape[2]:
            raise IndexError(f"layer {layer} of a pool with {pool.shape[2]}")
        check_attention(q.shape, q.dtype, pool, step)
        if not q.is_contiguous():
            raise ValueError("q must be contiguous")
    if native is not None:
        return native_attention(native, q, pool, layer, spec, step, earlier_rows)
    return _gpu.paged_attention(q, pool, layer, spec, step, own, earlier_rows=earlier_rows)


def can_settle(step: AttentionMetadata, pool: torch.Tensor) -> bool:
    """Whether `settled` is still to check a step, once for consecutive layers: on a GPU alone.
    Native operations check each call themselves.
    """
    return pool.is_cuda and not step.is_settled


def settled(
    step: AttentionMetadata, spec: AttentionSpec, rows: int, dtype: torch.dtype, pool: torch.Tensor
) -> AttentionMetadata:
    """Checks a step once for consecutive layers on a GPU in which every row attends.

    A launch that is not dependent (`weft.kernels.shared.dependent_launch`), such as the one that
    turns an embedding into the stream, must follow all launches that fill `step` and the pool.

    Args:
        spec: Constants of one of the layers, which may differ only in their windows.
        rows: T.
        pool: The layers' pages, [num_pages, Hkv, layers, 2, page_size, D].
    """
    check_attention((rows, spec.heads, spec.dim), dtype, pool, step)
    prompts = None
    if step.is_cold and step.key_ends is None and _library_flash.supports(dtype, spec.dim, rows):
        prompts = _library_flash.prompt_rows(step.cu_q_lens, rows)
    return step._replace(is_settled=True, prompts=prompts)


def own_kv(qkv: torch.Tensor, spec: AttentionSpec, step: AttentionMetadata) -> OwnKv | None:
    """If kernels read K and V of a settled step's rows from memory of their own instead of from the
    pool: that memory, else None. `qkv`, [T, (Hq + 2 * Hkv) * D], contains V already; K gets new
    memory.
    """
    if not step.is_settled or step.key_ends is not None:
        return None
    return _gpu.own_kv(qkv, spec, step)


def joined_requests(
    page_table: torch.Tensor, cu_q_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Requests side by side with the same pages as one request of all of their rows, so that each
    page is read once: for rows that all see the same positions.

    On a GPU the requests stay as they are, since the host would wait to know how many are left.

    Args:
        page_table: [R, pages] int32.
        cu_q_lens: [R + 1] int32.

    Returns:
        Both, of at most R requests.
    """
    if page_table.is_cuda or len(page_table) < 2:
        return page_table, cu_q_lens
    is_first = torch.ones(len(page_table), dtype=torch.bool)
    is_first[1:] = (page_table[1:] != page_table[:-1]).any(1)
    return page_table[is_first], torch.cat((cu_q_lens[:-1][is_first], cu_q_lens[-1:]))


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


def check_key_ends(step: AttentionMetadata, rows: int) -> None:
    """Raises ValueError unless a step of so many rows can have these `key_ends`. Their values are
    checked on a CPU alone, where they are used.
    """
    ends = step.key_ends
    if ends is None:
        return
    if step.ancestors is not None:
        raise ValueError("rows that see later ones form no trees")
    if (
        ends.shape != (rows,)
        or ends.dtype != torch.int32
        or not ends.is_contiguous()
        or ends.device != step.kv_lens.device
    ):
        raise ValueError(
            f"key_ends {tuple(ends.shape)} {ends.dtype} on {ends.device} must be contiguous "
            f"[{rows}] int32 on {step.kv_lens.device}"
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
