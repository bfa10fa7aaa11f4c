"""Input rows of a draft head: the embedding of each token, joined with the state at the position
before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.attention.triton_decode import request_of
from weft.kernels.ops.draft_head.spec import DraftHeadWeight, DraftRows
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import next_power_of_2


def join_rows(w: DraftHeadWeight, token_ids: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Joins each row's embedding and state, both normalised: [T], [T, H] -> [T, 2 * H]."""
    return _join(w, token_ids, state, None, None)


def join_shifted(
    w: DraftHeadWeight, rows: DraftRows, g: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """Like `join_rows`, with the state of the row before; a request's first row takes the kept
    state.

    Args:
        rows: T rows of R requests; results for padding are undefined.
        g: [T, H], contiguous: states.
        kept: [slots, H], contiguous; counts as zeros at position 0.

    Returns:
        [T, 2 * H].
    """
    return _join(w, rows.token_ids, g, kept, rows)


def keep_last(g: torch.Tensor, rows: DraftRows, kept: torch.Tensor) -> None:
    """Copies each request's last row of `g`, [T, H], to its slot of `kept`, [slots, H]."""
    requests, width = rows.request_slots.shape[0], g.shape[1]
    if requests == 0:
        return
    _keep_kernel[(requests,)](
        kept,
        g,
        rows.cu_q_lens,
        rows.request_slots,
        width,
        BLOCK=next_power_of_2(width),
        num_warps=4,
        **launch_options(g.device),
    )


def _join(
    w: DraftHeadWeight,
    token_ids: torch.Tensor,
    state: torch.Tensor,
    kept: torch.Tensor | None,
    rows: DraftRows | None,
) -> torch.Tensor:
    num_rows, width = state.shape
    if not state.is_contiguous() or state.dtype != w.embedding.dtype:
        raise ValueError(f"states are {state.dtype}, contiguous={state.is_contiguous()}")
    out = state.new_empty((num_rows, 2 * width))
    if num_rows == 0:
        return out
    block = next_power_of_2(width)
    _join_kernel[(num_rows,)](
        out,
        token_ids,
        state,
        kept,
        None if rows is None else rows.positions,
        None if rows is None else rows.cu_q_lens,
        None if rows is None else rows.request_slots,
        None if rows is None else rows.ancestors,
        w.embedding,
        w.input_norm,
        w.hidden_norm,
        0 if rows is None else rows.request_slots.shape[0],
        width,
        w.eps,
        IS_UNIFORM=rows is not None and rows.is_uniform,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **launch_options(state.device),
    )
    return out


@triton.jit(do_not_specialize=["requests"])
def _join_kernel(
    out: tl.tensor,
    token_ids: tl.tensor,
    state: tl.tensor,
    kept: tl.tensor,
    positions: tl.tensor,
    cu_q_lens: tl.tensor,
    request_slots: tl.tensor,
    ancestors: tl.tensor,
    embedding: tl.tensor,
    input_norm: tl.tensor,
    hidden_norm: tl.tensor,
    requests: int,
    width: int,
    eps: float,
    IS_UNIFORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    release_next()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    input_gain = tl.load(input_norm + column, mask=mask, other=0.0).to(tl.float32)
    hidden_gain = tl.load(hidden_norm + column, mask=mask, other=0.0).to(tl.float32)
    wait_for_last()
    at = row.to(tl.int64) * width + column
    token = tl.load(token_ids + row)
    embedded = tl.load(embedding + token * width + column, mask=mask, other=0.0).to(tl.float32)
    if kept is None:
        before = tl.load(state + at, mask=mask, other=0.0).to(tl.float32)
    else:
        request = row
        if not IS_UNIFORM:
            request = request_of(row, cu_q_lens, requests)
        slot = tl.load(request_slots + request)
        kept_width = tl.where(tl.load(positions + row) > 0, width, 0)
        if not IS_UNIFORM:
            # One of the two is zero. Padding may be the very first row.
            first = tl.load(cu_q_lens + request)
            kept_width = tl.where(row == first, kept_width, 0)
            state_width = tl.where(row == first, 0, tl.where(row > 0, width, 0))
        in_kept = column < kept_width
        before = tl.load(kept + slot * width + column, mask=in_kept, other=0.0).to(tl.float32)
        if not IS_UNIFORM:
            row_before = (row - 1).to(tl.int64)
            if ancestors is not None:
                row_before = _parent_row(tl.load(ancestors + row), row, first)
            in_state = column < state_width
            at = row_before * width + column
            before += tl.load(state + at, mask=in_state, other=0.0).to(tl.float32)
    begin = out + 2 * row.to(tl.int64) * width + column
    scale = tl.rsqrt(tl.sum(embedded * embedded, axis=0) / width + eps)
    tl.store(begin, (embedded * scale * input_gain).to(out.dtype.element_ty), mask=mask)
    scale = tl.rsqrt(tl.sum(before * before, axis=0) / width + eps)
    tl.store(begin + width, (before * scale * hidden_gain).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _parent_row(word: tl.tensor, row: tl.tensor, first: tl.tensor) -> tl.tensor:
    """The row that a tree's row follows, its nearest ancestor; -1: it follows the rows before the
    tree.
    """
    bit = tl.arange(0, 64)
    is_seen = ((word >> bit) & 1 == 1) & (bit < row - first)
    nearest = first + tl.max(tl.where(is_seen, bit, 0), axis=0)
    return tl.where(word < 0, row - 1, nearest).to(tl.int64)


@triton.jit
def _keep_kernel(
    kept: tl.tensor,
    g: tl.tensor,
    cu_q_lens: tl.tensor,
    request_slots: tl.tensor,
    width: int,
    BLOCK: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    request = tl.program_id(0)
    end = tl.load(cu_q_lens + request + 1)
    if end == tl.load(cu_q_lens + request):
        return
    column = tl.arange(0, BLOCK)
    mask = column < width
    last = tl.load(g + (end - 1).to(tl.int64) * width + column, mask=mask, other=0.0)
    slot = tl.load(request_slots + request)
    tl.store(kept + slot * width + column, last, mask=mask)
