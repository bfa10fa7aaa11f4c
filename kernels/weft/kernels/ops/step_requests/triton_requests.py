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
        step,
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
        step,
        given,
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
    step: StepColumns,
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
    if tl.load(step.requests) != 0:
        # The launcher checks that there are requests.
        slots: tl.tensor = step.requests + 1  # type: ignore[operator]
        starts = slots + num_requests
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
            tl.store(step.positions + row, position, mask=is_row)
            tl.store(step.slots + row, place, mask=is_row)
            tl.store(step.logits_rows + row, row, mask=is_row)
            tl.store(step.drawing_slots + row, behind * 0 + slot, mask=is_row)
            tl.store(step.sources + row, behind * num_slots + slot, mask=is_row)
            tl.store(step.owners + row, tl.where(is_late, request, -1).to(tl.int64), mask=is_row)
            to = step.verify_rows + request * WIDTH + behind
            tl.store(to, tl.where(is_row, row, -1), mask=behind < WIDTH)
            tl.store(step.rows + request, slot)
            length = tl.where((start < 0) | (count == 0), 0, start + count)
            tl.store(step.kv_lens + request, length.to(tl.int32))
            tl.store(step.cu_q_lens + request + 1, (begin + count).to(tl.int32))
            if request == 0:
                tl.store(step.cu_q_lens, 0)
        else:
            rest = (request - num_requests) * BLOCK + tl.arange(0, BLOCK)
            is_padding = (rest >= total) & (rest < num_rows)
            nothing = tl.zeros([BLOCK], tl.int64)
            tl.store(step.token_ids + rest, nothing, mask=is_padding)
            tl.store(step.positions + rest, nothing, mask=is_padding)
            tl.store(step.slots + rest, nothing, mask=is_padding)
            tl.store(step.logits_rows + rest, nothing, mask=is_padding)
            tl.store(step.drawing_slots + rest, nothing + dummy, mask=is_padding)
            tl.store(step.sources + rest, nothing - 1, mask=is_padding)
            tl.store(step.owners + rest, nothing - 1, mask=is_padding)
            if step.ancestors is not None:
                tl.store(step.ancestors + rest, nothing - 1, mask=is_padding)


@triton.jit(do_not_specialize=["count", "dummy"])
def _decodes_kernel(
    step: StepRows,
    given: DecodeColumns,
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
    slot = tl.load(given.slots + row, mask=is_row, other=0)
    position = tl.load(given.positions + row, mask=is_row, other=0)
    token = tl.load(given.tokens + row, mask=is_row, other=0)
    last = tl.load(known + slot, mask=is_row & (token < 0), other=0)
    tl.store(step.token_ids + row, tl.where(token < 0, last, token), mask=is_row)
    new = tl.load(given.pages + row, mask=is_row, other=0)
    entry = page_table + slot * table_stride + position // PAGE_SIZE
    tl.store(entry, new.to(tl.int32), mask=is_row & (new >= 0))
    old = tl.load(entry, mask=is_row & (new < 0), other=0).to(tl.int64)
    page = tl.where(new < 0, old, new)
    tl.store(step.places + row, page * PAGE_SIZE + position % PAGE_SIZE, mask=is_row)
    length = tl.where(slot == dummy, 0, position + 1)
    tl.store(step.kv_lens + row, length.to(tl.int32), mask=is_row)
