"""The head as native operations on a CPU (csrc/draft.h)."""

from __future__ import annotations

import ctypes

import torch
from weft.kernels.ops.attention.cpu import fits_native
from weft.kernels.ops.draft_head.spec import DraftChains, DraftHeadWeight, DraftRows
from weft.kernels.ops.pages.cpu import describe_pool
from weft.kernels.ops.pages.scaled_kv import head_dim, holds
from weft.kernels.shared import cpu


def native_for(x: torch.Tensor, w: DraftHeadWeight, pool: torch.Tensor) -> cpu.NativeCpu | None:
    """The native operations if they handle this head and pool."""
    native = cpu.native_cpu_for(x)
    if native is None or w.native is None or not fits_native(native, w.num_heads, pool):
        return None
    return native


class NativeEntries:
    """The work of `weft.kernels.ops.draft_head.DraftEntries` for native operations, valid as long
    as this object lives; its arguments and errors.
    """

    def __init__(
        self,
        native: cpu.NativeCpu,
        aux: torch.Tensor,
        w: DraftHeadWeight,
        rows: DraftRows,
        kept: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
    ) -> None:
        num_rows, requests = aux.shape[0], rows.request_slots.shape[0]
        _check(aux, (num_rows, w.fc.in_features), w.fc.dtype, "aux")
        _check(kept, (kept.shape[0], w.hidden_size), w.fc.dtype, "kept")
        for name in ("token_ids", "positions", "slots"):
            _check(getattr(rows, name), (num_rows,), torch.int64, name)
        _check(rows.request_slots, (requests,), torch.int64, "request_slots")
        _check(rows.cu_q_lens, (requests + 1,), torch.int32, "cu_q_lens")
        _check_pool(w, layer, pool)
        self._native, self._pool = native, pool
        self.g = torch.empty((num_rows, w.hidden_size), dtype=aux.dtype)
        """[T, H]: the result, complete once the work has run."""
        width = native.draft_entries_width(_address_of(w))
        self._scratch = torch.empty(num_rows * width, dtype=aux.dtype)
        tensors = (aux, self.g, kept, rows.token_ids, rows.positions, rows.slots, rows.cu_q_lens)
        if rows.ancestors is not None:
            _check(rows.ancestors, (num_rows,), torch.int64, "ancestors")
        self._entries = cpu.DraftEntriesStruct(
            *(tensor.data_ptr() for tensor in tensors),
            rows.request_slots.data_ptr(),
            None if rows.ancestors is None else rows.ancestors.data_ptr(),
            *(num_rows, requests, kept.shape[0]),
            self._scratch.data_ptr(),
        )
        self.write = cpu.DraftWriteStruct(_address_of(w), ctypes.addressof(self._entries), layer)
        """The work as native operations read it."""

    def run(self) -> None:
        described = describe_pool(self._pool, self.g.dtype)
        status = self._native.draft_entries(ctypes.byref(self.write), ctypes.byref(described))
        if status:
            cpu.check_status(status, "draft_entries")


def native_chain(
    native: cpu.NativeCpu,
    state: torch.Tensor,
    token_ids: torch.Tensor,
    w: DraftHeadWeight,
    chains: DraftChains,
    pool: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """`weft.kernels.ops.draft_head.draft_chain` in one call."""
    depth, requests = chains.positions.shape
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
    width = native.draft_chain_width(_address_of(w), head_dim(pool))
    scratch = torch.empty(requests * width, dtype=state.dtype)
    logits = torch.empty((requests, w.lm_head.out_features), dtype=torch.float32)
    chain = cpu.DraftChainStruct(
        *(x.data_ptr() for x in (state, tokens, chains.positions, chains.slots, chains.kv_lens)),
        ctypes.addressof(counts),
        *(table.data_ptr(), chains.one_row_each.data_ptr()),
        *(depth, requests, table.shape[1], table.stride(0)),
        *(scratch.data_ptr(), logits.data_ptr()),
    )
    described = describe_pool(pool, state.dtype)
    status = native.draft_chain(_address_of(w), ctypes.byref(chain), ctypes.byref(described), layer)
    if status:
        cpu.check_status(status, "draft_chain")
    return tokens[1:]


def _address_of(w: DraftHeadWeight) -> int:
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
