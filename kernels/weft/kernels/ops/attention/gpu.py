"""Ragged causal attention over paged K and V on a GPU.

The decode kernel takes requests of one row, and splits their contexts over programs. It also takes
requests of few rows, as for verified drafts, if all requests have few rows or rows form trees. The
extend kernel takes the other requests; a program holds a tile of their rows. A step with both kinds
has two launches. Each launch skips the other launch's requests by their lengths, which only the
device knows. Long prompts without cached positions go to FlashAttention-3 if it is installed, else
to cuDNN if that is faster.
"""

from __future__ import annotations

import torch
from weft.kernels.ops.attention.library_cudnn import dense_attention, is_faster
from weft.kernels.ops.attention.library_flash import flash_attention, supports
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec, OwnKv
from weft.kernels.ops.attention.triton_decode import MAX_FEW_ROWS, decode_attention
from weft.kernels.ops.attention.triton_extend import extend_attention
from weft.kernels.ops.attention.triton_fixed import fixed_attention

_SIZES = (2, 4, 8, 16, MAX_FEW_ROWS)
_FEW_OF_MANY = 8
"""Most rows of a request that is decoded, where there may be many requests."""
_FEW_REQUESTS = 8
"""Most requests whose bound on rows may be larger: all requests pay for the bound, and only some
reach it.
"""


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
    """`weft.kernels.ops.attention.paged_attention` for CUDA tensors that have been checked.

    `max_q_len` and `max_kv_len` may be bounds; they decide which launches are made. With `own`, K
    and V of requests with several rows are not read from the pool; with `ancestors`, the decode
    kernel takes requests of few rows and reads the pool. `first_position` must be 0 with `own` or a
    window, and there is no `own` with `key_ends`. With `is_fixed` and without `own`, one kernel
    takes all requests, unless there is a first position: what drafts attend to decides no bits of
    the text. If the step is settled, offsets, lengths, page table and earlier positions of the pool
    were written before a launch that was not dependent (`weft.kernels.shared.dependent_launch`),
    and may be read ahead.

    Raises:
        ValueError: No kernel takes these arguments.
    """
    tokens, heads, dim = q.shape
    max_q_len, max_kv_len, window = step.max_q_len, step.max_kv_len, spec.window
    requests, is_tree = step.page_table.shape[0], step.ancestors is not None
    is_fixed = spec.is_fixed and spec.first_position == 0
    if is_tree and is_fixed:
        raise ValueError("attention with fixed bits takes no ancestors: draft chains")
    sees_all = (window is None or window >= max_kv_len) and not is_tree
    # Neither cuDNN's nor FlashAttention's softmax is asked for more than a scale.
    dense = own if sees_all and spec.sinks is None and not spec.softcap else None
    prompts = None if dense is None else dense.prompts
    if (
        dense is not None
        and prompts is None
        and is_faster(q, pool.shape[1], requests, max_q_len, max_kv_len)
    ):
        return dense_attention(q, dense.k, dense.v, requests, spec.scale)
    out = torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    if dense is not None and prompts is not None:
        flash_attention(out, q, dense, prompts, spec.scale)
    operands = out, q, pool, layer, spec, step
    if is_fixed:
        fixed_attention(*operands)
        return out
    is_few = own is None and spec.first_position == 0 and step.key_ends is None
    if is_tree or (is_few and are_few_rows(q.dtype, max_q_len, requests)):
        # Few sizes, since each is compiled separately.
        max_rows = next(size for size in _SIZES if size >= min(max_q_len, MAX_FEW_ROWS))
        decode_attention(*operands, is_uniform=False, max_rows=max_rows, earlier_rows=earlier_rows)
        if max_q_len <= MAX_FEW_ROWS:
            return out
    # With a bound of few rows, the decode kernel takes requests of one row too, even alone. With a
    # bound of many rows, a single request goes to the extend kernel, however many rows it brings.
    has_decodes = max_q_len == 1 or requests > 1 or max_q_len <= _FEW_OF_MANY
    if max_q_len > 1 and prompts is None:
        least_rows = 1 + MAX_FEW_ROWS if is_tree else 1 + has_decodes
        several = step.several if has_decodes else None
        extend_attention(*operands, own, least_rows=least_rows, several=several)
    if has_decodes and not is_tree:
        # Of as many rows as requests, none with two, each request has exactly one.
        decode_attention(*operands, is_uniform=max_q_len == 1 and tokens == requests)
    return out


def own_kv(qkv: torch.Tensor, spec: AttentionSpec, step: AttentionMetadata) -> OwnKv | None:
    rows, max_q_len = qkv.shape[0], step.max_q_len
    is_few = are_few_rows(qkv.dtype, max_q_len, step.page_table.shape[0])
    if step.ancestors is not None:
        is_few = max_q_len <= MAX_FEW_ROWS
    if max_q_len <= 1 or spec.is_fixed or is_few:
        return None
    k = torch.empty((rows, spec.kv_heads, spec.dim), dtype=qkv.dtype, device=qkv.device)
    # Other layers, with heads of another width, may have settled the step.
    prompts = step.prompts if supports(qkv.dtype, spec.dim, rows) else None
    return OwnKv(k, qkv.view(rows, -1, spec.dim)[:, spec.heads + spec.kv_heads :], prompts)


def are_few_rows(dtype: torch.dtype, max_q_len: int, requests: int) -> bool:
    """Whether requests of at most `max_q_len` rows run as decodes, which read K and V only once."""
    most = MAX_FEW_ROWS if requests <= _FEW_REQUESTS else _FEW_OF_MANY
    return dtype.itemsize == 2 and 1 < max_q_len <= most
