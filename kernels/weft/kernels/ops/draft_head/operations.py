"""The head as single operations, each of which chooses its form by device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.draft_head.spec import (
    FIRST_POSITION,
    DraftChains,
    DraftHeadWeight,
    DraftRows,
    TurnRows,
)
from weft.kernels.ops.linear import linear, normed_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.spec import LoraAddition, addition_to
from weft.kernels.ops.norm import rms_norm
from weft.kernels.ops.pages.scaled_kv import head_dim
from weft.kernels.ops.peers.spec import Peers
from weft.kernels.ops.rope import rope_and_cache
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.draft_head import triton_rows as _triton_rows
    from weft.kernels.ops.greedy import triton_rows as _triton_greedy
else:
    _triton_greedy = deferred(__name__, "weft.kernels.ops.greedy.triton_rows")
    _triton_rows = deferred(__name__, "weft.kernels.ops.draft_head.triton_rows")


def draft_entries_reference(
    aux: torch.Tensor,
    w: DraftHeadWeight,
    rows: DraftRows,
    kept: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    g = linear(aux, w.fc)
    kv = linear(_join_shifted(w, rows, g, kept), w.kv)
    _keep_last(g, rows, kept)
    _store(kv, w, 0, rows.positions, rows.slots, pool, layer)
    return g


def draft_chain_reference(
    state: torch.Tensor,
    token_ids: torch.Tensor,
    w: DraftHeadWeight,
    chains: DraftChains,
    pool: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """`draft_chain` as its single operations; it does not change `state`, nor wait for a device."""
    # If every step runs all requests, every element is written.
    is_whole = chains.counts[-1] == state.shape[0]
    make = torch.empty if is_whole else torch.zeros
    tokens = make(chains.positions.shape, dtype=torch.int64, device=state.device)
    for step, count in enumerate(chains.counts):
        rows = TurnRows(
            positions=chains.positions[step, :count],
            slots=chains.slots[step, :count],
            page_table=chains.page_table[:count],
            cu_q_lens=chains.one_row_each[: count + 1],
            kv_lens=chains.kv_lens[step, :count],
            max_kv_len=chains.max_kv_len,
            lora=chains.lora,
        )
        state, logits = draft_turn(state[:count], token_ids[:count], w, rows, pool, layer)
        token_ids = _choose(logits, w.target_ids, tokens[step, :count])
    return tokens


def draft_turn(
    state: torch.Tensor,
    token_ids: torch.Tensor,
    w: DraftHeadWeight,
    rows: TurnRows,
    pool: torch.Tensor,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the head once, without waiting for a device.

    Args:
        state: [T, H]: g, or the head's own state, of the position before each token.
        token_ids: [T] int64.
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page; written.
        layer: Index of the head's layer in the pool.

    Returns:
        The head's states [T, H], and its logits [T, draft vocabulary] float32.
    """
    lora = rows.lora
    joined = _join(w, token_ids, state)
    qkv = linear(joined, w.qkv, lora=addition_to(lora, "qkv", 0))
    if w.norms_first:
        state = joined[:, w.hidden_size :].contiguous()
    spec = AttentionSpec(
        w.num_heads, pool.shape[1], head_dim(pool), w.scale, first_position=FIRST_POSITION
    )
    step = AttentionMetadata(
        page_table=rows.page_table,
        places=rows.slots,
        cu_q_lens=rows.cu_q_lens,
        kv_lens=rows.kv_lens,
        max_q_len=rows.max_q_len,
        max_kv_len=rows.max_kv_len,
        ancestors=rows.ancestors,
    )
    mixed = paged_attention(
        _store(qkv, w, w.num_heads, rows.positions, rows.slots, pool, layer),
        pool,
        layer,
        spec,
        step,
        earlier_rows=rows.earlier_rows,
    )
    state = added(mixed, w.o, state, w.peers, addition_to(lora, "o", 0))
    to_gate_up = addition_to(lora, "gate_up", 0)
    inner = normed_linear(state, w.post_norm, w.eps, w.gate_up, lora=to_gate_up)
    state = added(inner, w.down, state, w.peers, addition_to(lora, "down", 0))
    return state, normed_linear(state, w.norm, w.eps, w.lm_head, torch.float32)


def added(
    x: torch.Tensor,
    w: LinearWeight,
    state: torch.Tensor,
    peers: Peers | None,
    lora: LoraAddition | None = None,
) -> torch.Tensor:
    """state + x @ w^T, [T, H]. With `peers`, each rank has a part of x, and the parts are
    summed.
    """
    if peers is None:
        return linear(x, w, state, lora=lora)
    dtype = None if x.is_cuda else torch.float32
    return peers.add_sum(linear(x, w, out_dtype=dtype, lora=lora), state)


def _choose(logits: torch.Tensor, target_ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """[R] tokens of the target's vocabulary, written to `out`."""
    if logits.is_cuda:
        return _triton_greedy.greedy_rows(logits, target_ids, out)
    return torch.index_select(target_ids, 0, logits.argmax(dim=1), out=out)


def _join(w: DraftHeadWeight, token_ids: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """[T], [T, H] -> [T, 2 * H]."""
    if state.is_cuda:
        return _triton_rows.join_rows(w, token_ids, state)
    embedded = rms_norm(w.embedding.index_select(0, token_ids), w.input_norm, w.eps)
    return torch.cat((embedded, rms_norm(state, w.hidden_norm, w.eps)), dim=1)


def _join_shifted(
    w: DraftHeadWeight, rows: DraftRows, g: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """`_join` with the state of the row before: [T, H] -> [T, 2 * H]."""
    if g.is_cuda:
        return _triton_rows.join_shifted(w, rows, g, kept)
    num_rows, starts = g.shape[0], rows.cu_q_lens[:-1]
    before = kept.index_select(0, rows.request_slots)
    positions = rows.positions.index_select(0, starts.clamp(max=num_rows - 1))
    before.masked_fill_((positions == 0).unsqueeze(1), 0)
    # One row more than the step has, since padding requests begin there.
    shifted = g.new_empty((num_rows + 1, g.shape[1]))
    shifted[1:] = g
    if rows.ancestors is not None:
        shifted[:num_rows] = g.index_select(0, _parent_rows(rows.ancestors, rows.cu_q_lens))
    shifted.index_copy_(0, starts.long(), before)
    return _join(w, rows.token_ids, shifted[:num_rows])


def _parent_rows(ancestors: torch.Tensor, cu_q_lens: torch.Tensor) -> torch.Tensor:
    """[T] int64: the row that each row of a tree follows; arbitrary for a request's first row."""
    rows = torch.arange(len(ancestors), device=ancestors.device)
    requests = torch.bucketize(rows, cu_q_lens[1:].long(), right=True)
    # Padding rows belong to no request.
    own = rows - cu_q_lens[requests.clamp(max=len(cu_q_lens) - 2)]
    bits = torch.arange(63, device=ancestors.device)
    is_seen = (ancestors.unsqueeze(1) >> bits & 1 == 1) & (bits < own.unsqueeze(1))
    nearest = torch.where(is_seen, bits, 0).amax(dim=1)
    nearest = torch.where(ancestors < 0, own - 1, nearest)
    return (rows - own + nearest).clamp(min=0)


def _keep_last(g: torch.Tensor, rows: DraftRows, kept: torch.Tensor) -> None:
    if g.is_cuda:
        _triton_rows.keep_last(g, rows, kept)
        return
    ends = (rows.cu_q_lens[1:] - 1).clamp(min=0)
    kept.index_copy_(0, rows.request_slots, g.index_select(0, ends))


def _store(
    projected: torch.Tensor,
    w: DraftHeadWeight,
    num_heads: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    kv_heads = pool.shape[1]
    return rope_and_cache(projected, positions, w.cos_sin, pool, layer, slots, num_heads, kv_heads)
