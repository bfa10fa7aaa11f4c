"""The draft head of EAGLE-3 (Li et al. 2025): its K and V for a target's step, and chains of
drafts.

A head is one decoder layer over pairs of a token's embedding and g, the target's state at the
position before. Its K and V are one more layer of the target's pool, without position 0.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention.cpu import fits_native
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.draft_head.spec import (
    FIRST_POSITION,
    MAX_NATIVE_DEPTH,
    DraftChains,
    DraftHeadWeight,
    DraftRows,
    TurnRows,
)
from weft.kernels.ops.linear import linear, normed_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.spec import LoraAddition, addition_to
from weft.kernels.ops.norm import rms_norm
from weft.kernels.ops.pages.scaled_kv import head_dim, holds
from weft.kernels.ops.peers.spec import Peers
from weft.kernels.ops.rope import rope_and_cache
from weft.kernels.shared import cpu
from weft.kernels.shared.deferred import deferred
from weft.kernels.shared.side_stream import SideStreamWork, is_forking

if TYPE_CHECKING:
    from weft.kernels.ops.draft_head import triton_rows as _triton_rows
    from weft.kernels.ops.greedy import triton_rows as _triton_greedy
    from weft.kernels.shared import dependent_launch as _dependent_launch
else:
    _dependent_launch = deferred(__name__, "weft.kernels.shared.dependent_launch")
    _triton_greedy = deferred(__name__, "weft.kernels.ops.greedy.triton_rows")
    _triton_rows = deferred(__name__, "weft.kernels.ops.draft_head.triton_rows")


def pack_draft_head(
    *,
    fc: LinearWeight,
    qkv: LinearWeight,
    kv: LinearWeight,
    o: LinearWeight,
    gate_up: LinearWeight,
    down: LinearWeight,
    lm_head: LinearWeight,
    input_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    post_norm: torch.Tensor,
    norm: torch.Tensor,
    embedding: torch.Tensor,
    target_ids: torch.Tensor,
    cos_sin: torch.Tensor,
    num_heads: int,
    eps: float,
    peers: Peers | None = None,
) -> DraftHeadWeight:
    """Packs a head's parameters, as `DraftHeadWeight` describes them; shapes must fit together.

    Raises:
        ValueError: A table is not contiguous, or a product's matrix is rotated.
    """
    native = None
    products = (fc, qkv, kv, o, gate_up, down, lm_head)
    if any(part.is_rotated for part in products):
        raise ValueError("products of a draft head cannot be of rotated matrices")
    tables = (input_norm, hidden_norm, post_norm, norm, embedding, target_ids, cos_sin)
    if all(part.native is not None for part in products):
        if not all(table.is_contiguous() for table in tables):
            raise ValueError("norms, embedding and tables of a draft head must be contiguous")
        (vocab, hidden), (positions, dim) = embedding.shape, cos_sin.shape
        native = cpu.DraftHeadStruct(
            *(part.address for part in products),
            *(table.data_ptr() for table in tables),
            *(vocab, hidden, positions, num_heads),
            *(eps, 1 / math.sqrt(dim)),
        )
    return DraftHeadWeight(
        fc=fc,
        qkv=qkv,
        kv=kv,
        o=o,
        gate_up=gate_up,
        down=down,
        lm_head=lm_head,
        input_norm=input_norm,
        hidden_norm=hidden_norm,
        post_norm=post_norm,
        norm=norm,
        embedding=embedding,
        target_ids=target_ids,
        cos_sin=cos_sin,
        num_heads=num_heads,
        eps=eps,
        native=native,
        peers=peers,
    )


def replace_layer(
    w: DraftHeadWeight,
    *,
    qkv: LinearWeight,
    o: LinearWeight,
    gate_up: LinearWeight,
    down: LinearWeight,
) -> DraftHeadWeight:
    """The same head with other products in its layer; `DraftHeadWeight.kv` stays."""
    parts = {field.name: getattr(w, field.name) for field in fields(w) if field.name != "native"}
    parts |= {"qkv": qkv, "o": o, "gate_up": gate_up, "down": down}
    return pack_draft_head(**parts)


def draft_entries(
    aux: torch.Tensor,
    w: DraftHeadWeight,
    rows: DraftRows,
    kept: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """Writes the head's K and V of a target's step into the pool.

    Args:
        aux: [T, W], contiguous: the target's states.
        kept: [slots, H], contiguous: g of the row before each request's first one, which counts
            as zeros at position 0; becomes g of the request's last row.
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page; written.
        layer: Index of the head's layer in the pool.

    Returns:
        g [T, H], dtype of `aux`.

    Raises:
        IndexError: A token, position, slot or length points outside.
    """
    return DraftEntries(aux, w, rows, kept, pool, layer).finish()


class DraftEntries:
    """`draft_entries` as work that continues from the taps that write `aux`, in the threads of the
    native operation or concurrently with the following layers.

    It has the arguments and errors of `draft_entries`, and checks indices after it has run.
    """

    def __init__(
        self,
        aux: torch.Tensor,
        w: DraftHeadWeight,
        rows: DraftRows,
        kept: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
    ) -> None:
        self._arguments = (aux, w, rows, kept, pool, layer)
        self._described: (
            tuple[cpu.DraftWriteStruct, cpu.DraftEntriesStruct, torch.Tensor] | None
        ) = None
        self._g: torch.Tensor | None = None
        self._is_done = False
        self._beside: SideStreamWork[torch.Tensor] | None = None
        self._native = _native_for(aux, w, pool)
        if self._native is not None:
            self._describe(self._native)

    def native(self) -> cpu.DraftWriteStruct | None:
        """The work for native operations, valid as long as this object lives; None if it has no
        native form.
        """
        return None if self._described is None else self._described[0]

    def done(self) -> None:
        """Called when the native operation has run it."""
        self._is_done = True

    def begin(self) -> None:
        """Called on a GPU once all states have been tapped, before the layers that follow."""
        device = self._arguments[0].device
        if is_forking(device):
            self._beside = SideStreamWork(device, self._launch_beside, "drafts")

    def finish(self) -> torch.Tensor:
        """Runs the operation unless the layers have done so; returns g."""
        if self._beside is not None:
            # The cycle is broken here, since garbage is not collected while a graph is captured.
            work, self._beside = self._beside, None
            return work.join()
        if self._native is None or self._described is None:
            return draft_entries_reference(*self._arguments)
        assert self._g is not None
        if not self._is_done:
            write, pool = self._described[0], self._described_pool()
            status = self._native.draft_entries(ctypes.byref(write), ctypes.byref(pool))
            if status:
                cpu.check_status(status, "draft_entries")
            self.done()
        return self._g

    def _described_pool(self) -> cpu.PoolStruct:
        aux, _, _, _, pool, _ = self._arguments
        return cpu.describe_pool(pool, aux.dtype)

    def _launch_beside(self) -> torch.Tensor:
        with _dependent_launch.ordinary_launches():
            return draft_entries_reference(*self._arguments)

    def _describe(self, native: cpu.NativeCpu) -> None:
        aux, w, rows, kept, pool, layer = self._arguments
        num_rows, requests = aux.shape[0], rows.request_slots.shape[0]
        _check(aux, (num_rows, w.fc.in_features), w.fc.dtype, "aux")
        _check(kept, (kept.shape[0], w.hidden_size), w.fc.dtype, "kept")
        for name in ("token_ids", "positions", "slots"):
            _check(getattr(rows, name), (num_rows,), torch.int64, name)
        _check(rows.request_slots, (requests,), torch.int64, "request_slots")
        _check(rows.cu_q_lens, (requests + 1,), torch.int32, "cu_q_lens")
        _check_pool(w, layer, pool)
        g = torch.empty((num_rows, w.hidden_size), dtype=aux.dtype)
        scratch = torch.empty(num_rows * native.draft_entries_width(_at(w)), dtype=aux.dtype)
        tensors = (aux, g, kept, rows.token_ids, rows.positions, rows.slots, rows.cu_q_lens)
        if rows.ancestors is not None:
            _check(rows.ancestors, (num_rows,), torch.int64, "ancestors")
        entries = cpu.DraftEntriesStruct(
            *(tensor.data_ptr() for tensor in tensors),
            rows.request_slots.data_ptr(),
            None if rows.ancestors is None else rows.ancestors.data_ptr(),
            *(num_rows, requests, kept.shape[0]),
            scratch.data_ptr(),
        )
        write = cpu.DraftWriteStruct(_at(w), ctypes.addressof(entries), layer)
        self._g, self._described = g, (write, entries, scratch)


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


def draft_chain(
    state: torch.Tensor,
    token_ids: torch.Tensor,
    w: DraftHeadWeight,
    chains: DraftChains,
    pool: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """Proposes tokens one after another, each time the head's most likely one.

    Args:
        state: [R, H], contiguous: g of the position before the last token; overwritten.
        token_ids: [R] int64: last tokens.
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page; written.
        layer: Index of the head's layer in the pool.

    Returns:
        [D, R] int64, ids of the target's vocabulary; undefined for steps that a chain did not run.

    Raises:
        IndexError: A token, position, slot, length or page points outside.
    """
    native = _native_for(state, w, pool)
    depth, requests = chains.positions.shape
    is_divided = w.peers is not None
    if native is None or is_divided or depth > MAX_NATIVE_DEPTH or chains.lora is not None:
        return draft_chain_reference(state, token_ids, w, chains, pool, layer)
    _check(state, (requests, w.hidden_size), w.fc.dtype, "state")
    _check(token_ids, (requests,), torch.int64, "token_ids")
    _check(chains.positions, (depth, requests), torch.int64, "positions")
    _check(chains.slots, (depth, requests), torch.int64, "slots")
    _check(chains.kv_lens, (depth, requests), torch.int32, "kv_lens")
    _check(chains.one_row_each, (requests + 1,), torch.int32, "one_row_each")
    table = chains.page_table
    if table.dtype != torch.int32 or table.shape[0] != requests or table.stride(1) != 1:
        raise ValueError("page_table must be [R, max_pages] int32, contiguous along a row")
    if len(chains.counts) != depth:
        raise ValueError(f"{len(chains.counts)} counts for {depth} steps")
    _check_pool(w, layer, pool)
    tokens = torch.empty((depth + 1, requests), dtype=torch.int64)
    tokens[0] = token_ids
    counts = (ctypes.c_int64 * depth)(*chains.counts)
    width = native.draft_chain_width(_at(w), head_dim(pool))
    scratch = torch.empty(requests * width, dtype=state.dtype)
    logits = torch.empty((requests, w.lm_head.out_features), dtype=torch.float32)
    chain = cpu.DraftChainStruct(
        *(x.data_ptr() for x in (state, tokens, chains.positions, chains.slots, chains.kv_lens)),
        ctypes.addressof(counts),
        *(table.data_ptr(), chains.one_row_each.data_ptr()),
        *(depth, requests, table.shape[1], table.stride(0)),
        *(scratch.data_ptr(), logits.data_ptr()),
    )
    described = cpu.describe_pool(pool, state.dtype)
    status = native.draft_chain(_at(w), ctypes.byref(chain), ctypes.byref(described), layer)
    if status:
        cpu.check_status(status, "draft_chain")
    return tokens[1:]


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
    qkv = linear(_join(w, token_ids, state), w.qkv, lora=addition_to(lora, "qkv", 0))
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


def _native_for(x: torch.Tensor, w: DraftHeadWeight, pool: torch.Tensor) -> cpu.NativeCpu | None:
    native = cpu.native_cpu_for(x)
    if native is None or w.native is None or not fits_native(native, w.num_heads, pool):
        return None
    return native


def _at(w: DraftHeadWeight) -> int:
    assert w.native is not None
    return ctypes.addressof(w.native)


def _check(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} {tuple(tensor.shape)} {tensor.dtype} contiguous={tensor.is_contiguous()} is "
            f"not a contiguous {shape} {dtype}"
        )


def _check_pool(w: DraftHeadWeight, layer: int, pool: torch.Tensor) -> None:
    fits = 2 * pool.shape[1] * head_dim(pool) == w.kv.out_features
    if not fits or not holds(pool, w.kv.dtype):
        raise ValueError(
            f"a head with {w.kv.out_features} numbers of K and V a position does not fit a pool "
            f"{tuple(pool.shape)} {pool.dtype}"
        )
    if not 0 <= layer < pool.shape[2]:
        raise IndexError(f"layer {layer} of a pool with {pool.shape[2]}")
