"""`weft.kernels.ops.step_requests` on a GPU, one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.step_requests.spec import DecodeColumns, StepColumns
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_BLOCK = 128


def expand_requests(
    step: StepColumns, page_table: torch.Tensor, page_size: int, num_slots: int
) -> None:
    """`weft.kernels.ops.step_requests.expand_requests` for CUDA tensors: a program for each
    request, and some for padding.
    """
    assert step.requests is not None
    rows, (requests, width) = step.token_ids.shape[0], step.verify_rows.shape
    _expand_kernel[(requests + cdiv(rows, _BLOCK),)](
        *step[:-1],  # `first_several` is None.
        page_table,
        page_table.stride(0),
        rows,
        requests,
        num_slots,
        WIDTH=width,
        PAGE_SIZE=page_size,
        REQUESTS=next_power_of_2(requests),
        ROWS=next_power_of_2(width),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def expand_decodes(
    given: DecodeColumns,
    step: StepRows,
    known: SlotTokens,
    page_table: torch.Tensor,
    page_size: int,
) -> None:
    count = given.slots.shape[0]
    _decodes_kernel[(cdiv(count, _BLOCK),)](
        step.token_ids,
        step.places,
        step.kv_lens,
        *given,
        known.tokens,
        page_table,
        page_table.stride(0),
        count,
        known.tokens.shape[1] - 1,
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows", "num_requests", "num_slots"])
def _expand_kernel(
    given: tl.tensor,
    token_ids: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    table_rows: tl.tensor,
    logits_rows: tl.tensor,
    drawing_slots: tl.tensor,
    sources: tl.tensor,
    owners: tl.tensor,
    verify_rows: tl.tensor,
    ancestors: tl.tensor,
    cu_q_lens: tl.tensor,
    kv_lens: tl.tensor,
    page_table: tl.tensor,
    table_stride: int,
    num_rows: int,
    num_requests: int,
    num_slots: int,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    if tl.load(given) != 0:
        slots, starts = given + 1, given + 1 + num_requests
        counts = starts + num_requests
        other = tl.arange(0, REQUESTS)
        all_counts = tl.load(counts + other, mask=other < num_requests, other=0)
        total = tl.sum(all_counts, axis=0)
        dummy = num_slots - 1
        if request < num_requests:
            begin = tl.sum(tl.where(other < request, all_counts, 0), axis=0)
            count = tl.load(counts + request)
            start = tl.load(starts + request)
            slot = tl.where(count > 0, tl.load(slots + request), dummy)
            behind = tl.arange(0, ROWS)
            is_row = behind < count
            row = begin + behind
            first = start + behind * 0
            is_late = first < 0
            position = tl.where(is_late, 0, first) + behind
            page = tl.load(
                page_table + slot * table_stride + position // PAGE_SIZE,
                mask=is_row & (first >= 0),
                other=0,
            ).to(tl.int64)
            place = tl.where(is_late, 0, page * PAGE_SIZE + position % PAGE_SIZE)
            tl.store(positions + row, position, mask=is_row)
            tl.store(places + row, place, mask=is_row)
            tl.store(logits_rows + row, row, mask=is_row)
            tl.store(drawing_slots + row, behind * 0 + slot, mask=is_row)
            tl.store(sources + row, behind * num_slots + slot, mask=is_row)
            tl.store(owners + row, tl.where(is_late, request, -1).to(tl.int64), mask=is_row)
            to = verify_rows + request * WIDTH + behind
            tl.store(to, tl.where(is_row, row, -1), mask=behind < WIDTH)
            tl.store(table_rows + request, slot)
            length = tl.where((start < 0) | (count == 0), 0, start + count)
            tl.store(kv_lens + request, length.to(tl.int32))
            tl.store(cu_q_lens + request + 1, (begin + count).to(tl.int32))
            if request == 0:
                tl.store(cu_q_lens, 0)
        else:
            rest = (request - num_requests) * BLOCK + tl.arange(0, BLOCK)
            is_padding = (rest >= total) & (rest < num_rows)
            nothing = tl.zeros([BLOCK], tl.int64)
            tl.store(token_ids + rest, nothing, mask=is_padding)
            tl.store(positions + rest, nothing, mask=is_padding)
            tl.store(places + rest, nothing, mask=is_padding)
            tl.store(logits_rows + rest, nothing, mask=is_padding)
            tl.store(drawing_slots + rest, nothing + dummy, mask=is_padding)
            tl.store(sources + rest, nothing - 1, mask=is_padding)
            tl.store(owners + rest, nothing - 1, mask=is_padding)
            if ancestors is not None:
                tl.store(ancestors + rest, nothing - 1, mask=is_padding)


@triton.jit(do_not_specialize=["count", "dummy"])
def _decodes_kernel(
    token_ids: tl.tensor,
    places: tl.tensor,
    kv_lens: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,
    pages: tl.tensor,
    known: tl.tensor,
    page_table: tl.tensor,
    table_stride: int,
    count: int,
    dummy: int,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < count
    slot = tl.load(slots + row, mask=is_row, other=0)
    position = tl.load(positions + row, mask=is_row, other=0)
    token = tl.load(tokens + row, mask=is_row, other=0)
    last = tl.load(known + slot, mask=is_row & (token < 0), other=0)
    tl.store(token_ids + row, tl.where(token < 0, last, token), mask=is_row)
    new = tl.load(pages + row, mask=is_row, other=0)
    entry = page_table + slot * table_stride + position // PAGE_SIZE
    tl.store(entry, new.to(tl.int32), mask=is_row & (new >= 0))
    old = tl.load(entry, mask=is_row & (new < 0), other=0).to(tl.int64)
    page = tl.where(new < 0, old, new)
    tl.store(places + row, page * PAGE_SIZE + position % PAGE_SIZE, mask=is_row)
    length = tl.where(slot == dummy, 0, position + 1)
    tl.store(kv_lens + row, length.to(tl.int32), mask=is_row)
