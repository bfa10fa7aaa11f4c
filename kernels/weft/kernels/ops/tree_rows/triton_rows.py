"""`weft.kernels.ops.tree_rows` on a GPU, one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.pages.scaled_kv import entries_of
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows, Verified
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_MAX_ELEMENTS = 1024
"""Most elements of K and V that one program moves."""


def accept_trees(
    drawn: torch.Tensor, step: StepRows, verified: Verified, known: SlotTokens
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    requests, width = verified.rows.shape
    last_rows, own_slots = torch.empty((2, requests), dtype=torch.int64, device=drawn.device)
    paths = torch.full_like(verified.rows, -1)
    _accept_kernel[(requests,)](
        last_rows,
        own_slots,
        paths,
        drawn,
        step,
        verified,
        known,
        width,
        known.starts.shape[0] - 1,
        BLOCK=max(2, next_power_of_2(width)),
        num_warps=1,
    )
    return last_rows, own_slots, paths


def move_paths(
    pool: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, paths: torch.Tensor
) -> None:
    requests, width = rows.shape
    for entries in entries_of(pool):
        _, heads, layers, parts, page_size, dim = entries.shape
        lines = heads * layers * parts
        width_block = next_power_of_2(dim)
        line_block = max(1, _MAX_ELEMENTS // width_block)
        _move_kernel[(requests, cdiv(lines, line_block))](
            entries,
            places,
            rows,
            paths,
            lines,
            width,
            dim,
            entries.stride(0),
            entries.stride(3),
            PAGE_SIZE=page_size,
            LINES=line_block,
            BLOCK=width_block,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["width", "dummy"])
def _accept_kernel(
    last_rows: tl.tensor,
    own_slots: tl.tensor,
    paths: tl.tensor,
    drawn: tl.tensor,
    step: StepRows,
    verified: Verified,
    known: SlotTokens,
    width: int,
    dummy: int,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    own = tl.arange(0, BLOCK)
    begin = verified.rows + request.to(tl.int64) * width
    first = tl.load(begin)
    row = tl.load(begin + own, mask=own < width, other=-1)
    is_there = (row >= 0) & (own > 0)
    draft = tl.load(step.token_ids + row, mask=is_there, other=-2)
    then = tl.load(drawn + row, mask=is_there, other=-1)
    word = tl.load(step.ancestors + row, mask=is_there, other=0)
    # A row's parent is the nearest of its ancestors.
    is_seen = ((word[:, None] >> own[None, :]) & 1 == 1) & (own[None, :] < own[:, None])
    parent = tl.max(tl.where(is_seen, own[None, :], -1), axis=1)
    parent = tl.where(is_there & (then >= 0), parent, -1)
    reached = 0
    length = 0
    is_request = first >= 0
    goes_on = is_request
    while goes_on:
        tl.store(paths + request.to(tl.int64) * width + length, first + reached)
        token = tl.load(drawn + first + reached)
        child = tl.min(tl.where((parent == reached) & (draft == token), own, BLOCK), axis=0)
        goes_on = child < BLOCK
        reached = tl.where(goes_on, child, reached)
        length += 1
    last = tl.maximum(first + reached, 0)
    slot = tl.load(verified.slots + first, mask=is_request, other=0)
    slot = tl.where(is_request, slot, dummy)
    tl.store(last_rows + request, last)
    tl.store(own_slots + request, slot)
    # A missing token is negative. What follows it is dropped, but needs an id of the vocabulary.
    tl.store(known.tokens + slot, tl.maximum(tl.load(drawn + last), 0))
    tl.store(known.starts + slot, tl.load(step.positions + last) + 1)


@triton.jit(do_not_specialize=["width"])
def _move_kernel(
    pool: tl.tensor,
    places: tl.tensor,
    rows: tl.tensor,
    paths: tl.tensor,
    lines: int,
    width: int,
    dim: int,
    page_stride: int,
    line_stride: int,
    PAGE_SIZE: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    begin = tl.program_id(0).to(tl.int64) * width
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    column = tl.arange(0, BLOCK)
    mask = (line < lines)[:, None] & (column < dim)[None, :]
    # Each program moves its elements of all rows in order, so that a place is read before it is
    # written.
    step = 1
    while step < width:
        to = tl.load(rows + begin + step)
        of = tl.load(paths + begin + step)
        if of < 0:
            step = width
        else:
            if of != to:
                source = tl.load(places + of)
                target = tl.load(places + to)
                at = line.to(tl.int64)[:, None] * line_stride + column[None, :]
                source_at = pool + source // PAGE_SIZE * page_stride + source % PAGE_SIZE * dim
                target_at = pool + target // PAGE_SIZE * page_stride + target % PAGE_SIZE * dim
                tl.store(target_at + at, tl.load(source_at + at, mask=mask), mask=mask)
            step += 1
