"""The draft head of EAGLE-1 and EAGLE-2 (Li et al. 2024, sections 3 and 4.1): its K and V, and
chains.

`fc` joins a token's embedding with f, the target's last hidden state at the position before. One
decoder layer without a norm before attention turns the result into the next f, from which the
target's own LM head computes logits. K and V are a layer of the target's pool.
"""

from __future__ import annotations

import math

import torch
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.draft_head.operations import added
from weft.kernels.ops.draft_head.spec import FIRST_POSITION, DraftChains, DraftRows
from weft.kernels.ops.eagle_head.spec import EagleHeadWeight
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.norm import rms_norm
from weft.kernels.ops.rope import rope_and_cache


def eagle_entries(
    states: torch.Tensor,
    w: EagleHeadWeight,
    rows: DraftRows,
    kept: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
) -> None:
    """Writes the head's K and V of a target's step, without waiting for a device.

    Args:
        states: [T, H], contiguous: the target's last hidden states, normalised.
        kept: [slots, H], contiguous: f of the row before each request's first one, which counts as
            zeros at position 0; becomes f of the request's last row.
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page; written.
        layer: Index of the head's layer in the pool.
    """
    joined = _join(w, rows.token_ids, states_before(states, rows, kept))
    kv = linear(linear(joined, w.fc), w.kv)
    kv_heads = pool.shape[1]
    rope_and_cache(kv, rows.positions, w.cos_sin, pool, layer, rows.slots, 0, kv_heads)
    keep_last_states(states, rows, kept)


def eagle_chain(
    state: torch.Tensor,
    token_ids: torch.Tensor,
    w: EagleHeadWeight,
    chains: DraftChains,
    pool: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """Proposes tokens one after another, each time the head's most likely one.

    Args:
        state: [R, H]: f of the position before the last token; not changed.
        token_ids: [R] int64: last tokens.
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page; written.
        layer: Index of the head's layer in the pool.

    Returns:
        [D, R] int64; undefined for steps that a chain did not run.
    """
    tokens = torch.zeros(chains.positions.shape, dtype=torch.int64, device=state.device)
    for step, count in enumerate(chains.counts):
        x = linear(_join(w, token_ids[:count], state[:count]), w.fc)
        state = _layer(x, w, chains, step, pool, layer)
        token_ids = linear(state, w.lm_head, out_dtype=torch.float32).argmax(dim=1)
        tokens[step, :count] = token_ids
    return tokens


def _layer(
    x: torch.Tensor,
    w: EagleHeadWeight,
    chains: DraftChains,
    step: int,
    pool: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """[C, H] -> [C, H] for the first C requests; writes their K and V."""
    count, dim, places = x.shape[0], w.cos_sin.shape[1], chains.slots[step, : x.shape[0]]
    q = rope_and_cache(
        linear(x, w.qkv),
        chains.positions[step, :count],
        w.cos_sin,
        pool,
        layer,
        places,
        w.num_heads,
        pool.shape[1],
    )
    rows = AttentionMetadata(
        page_table=chains.page_table[:count],
        places=places,
        cu_q_lens=chains.one_row_each[: count + 1],
        kv_lens=chains.kv_lens[step, :count],
        max_q_len=1,
        max_kv_len=chains.max_kv_len,
    )
    heads = (w.num_heads, pool.shape[1])
    spec = AttentionSpec(*heads, dim, 1 / math.sqrt(dim), first_position=FIRST_POSITION)
    mixed = paged_attention(q, pool, layer, spec, rows)
    state = added(mixed, w.o, x, w.peers)
    inner = gate_up_silu(rms_norm(state, w.post_norm, w.eps), w.gate_up)
    return added(inner, w.down, state, w.peers)


def states_before(states: torch.Tensor, rows: DraftRows, kept: torch.Tensor) -> torch.Tensor:
    """[T, H] -> [T, H]: state of the row before each row; the kept one for a request's first
    row.
    """
    num_rows, starts = states.shape[0], rows.cu_q_lens[:-1]
    before = kept.index_select(0, rows.request_slots)
    positions = rows.positions.index_select(0, starts.clamp(max=num_rows - 1))
    before.masked_fill_((positions == 0).unsqueeze(1), 0)
    # One row more than the step has, since padding requests begin there.
    shifted = states.new_empty((num_rows + 1, states.shape[1]))
    shifted[1:] = states
    shifted.index_copy_(0, starts.long(), before)
    return shifted[:num_rows]


def keep_last_states(states: torch.Tensor, rows: DraftRows, kept: torch.Tensor) -> None:
    """Puts the state of each request's last row, of [T, H], into its slot of [slots, H]."""
    ends = (rows.cu_q_lens[1:] - 1).clamp(min=0)
    kept.index_copy_(0, rows.request_slots, states.index_select(0, ends))


def _join(w: EagleHeadWeight, token_ids: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """[T], [T, H] -> [T, 2 * H]."""
    return torch.cat((w.embedding.index_select(0, token_ids), state), dim=1)
