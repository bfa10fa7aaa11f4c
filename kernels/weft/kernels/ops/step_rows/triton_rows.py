"""`weft.kernels.ops.step_rows` on a GPU: one launch each, since the host waits meanwhile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.attention.spec import MAX_TREE_ROWS
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows, Verified
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_BLOCK = 128


def resolve_rows(
    step: StepRows,
    sources: torch.Tensor,
    owners: torch.Tensor,
    known: SlotTokens,
    page_table: torch.Tensor,
    page_size: int,
) -> None:
    count = sources.shape[0]
    _resolve_kernel[(cdiv(count, _BLOCK),)](
        step,
        sources,
        owners,
        known,
        page_table,
        count,
        known.tokens.shape[1],
        page_table.stride(0),
        PAGE_SIZE=page_size,
        MAX_ROWS=MAX_TREE_ROWS,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def accept_drafts(
    drawn: torch.Tensor, step: StepRows, verified: Verified, known: SlotTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    requests, width = verified.rows.shape
    last_rows, own_slots = torch.empty((2, requests), dtype=torch.int64, device=drawn.device)
    _accept_kernel[(requests,)](
        last_rows,
        own_slots,
        drawn,
        step,
        verified,
        known,
        width,
        known.starts.shape[0] - 1,
        BLOCK=max(2, next_power_of_2(width)),
        num_warps=1,
    )
    return last_rows, own_slots


def chain_places(
    slots: torch.Tensor,
    starts: torch.Tensor,
    limits: torch.Tensor,
    late_starts: torch.Tensor,
    page_table: torch.Tensor,
    depth: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    requests = slots.shape[0]
    positions, places = torch.empty((2, depth, requests), dtype=torch.int64, device=slots.device)
    kv_lens = torch.empty((depth, requests), dtype=torch.int32, device=slots.device)
    _places_kernel[(depth, cdiv(requests, _BLOCK))](
        positions,
        places,
        kv_lens,
        slots,
        starts,
        limits,
        late_starts,
        page_table,
        requests,
        page_table.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return positions, places, kv_lens


@triton.jit(do_not_specialize=["count", "slots"])
def _resolve_kernel(
    step: StepRows,
    sources: tl.tensor,
    owners: tl.tensor,
    known: SlotTokens,
    page_table: tl.tensor,
    count: int,
    slots: int,
    table_stride: int,
    PAGE_SIZE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + row, mask=row < count, other=-1)
    is_there = source >= 0
    token = tl.load(known.tokens + source, mask=is_there, other=0)
    tl.store(step.token_ids + row, token, mask=is_there)
    request = tl.load(owners + row, mask=is_there, other=-1)
    is_late = request >= 0
    slot = source % slots
    start = tl.load(known.starts + slot, mask=is_late, other=0)
    behind = source // slots
    place = start + behind
    page = tl.load(page_table + slot * table_stride + place // PAGE_SIZE, mask=is_late, other=0)
    tl.store(step.places + row, page.to(tl.int64) * PAGE_SIZE + place % PAGE_SIZE, mask=is_late)
    if step.ancestors is None or known.words is None:
        tl.store(step.positions + row, place, mask=is_late)
    else:
        word = tl.load(known.words + source, mask=is_there, other=0)
        tl.store(step.ancestors + row, word, mask=is_there)
        bit = tl.arange(0, MAX_ROWS)
        is_seen = ((word[:, None] >> bit[None, :]) & 1 == 1) & (bit[None, :] < behind[:, None])
        depth = tl.sum(is_seen.to(tl.int32), axis=1)
        known_position = tl.load(step.positions + row, mask=is_there, other=0)
        position = tl.where(is_late, start, known_position - behind) + depth
        tl.store(step.positions + row, position, mask=is_there)
    # All rows of a request write the same value.
    length = tl.load(step.cu_q_lens + request + 1, mask=is_late, other=0)
    length -= tl.load(step.cu_q_lens + request, mask=is_late, other=0)
    tl.store(step.kv_lens + request, start.to(tl.int32) + length, mask=is_late)


@triton.jit(do_not_specialize=["width", "dummy"])
def _accept_kernel(
    last_rows: tl.tensor,
    own_slots: tl.tensor,
    drawn: tl.tensor,
    rows: StepRows,
    verified: Verified,
    known: SlotTokens,
    width: int,
    dummy: int,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    step = tl.arange(0, BLOCK)
    begin = verified.rows + request.to(tl.int64) * width
    first = tl.load(begin)
    row = tl.load(begin + step, mask=step < width, other=-1)
    following = tl.load(begin + step + 1, mask=step + 1 < width, other=-1)
    found = tl.load(drawn + row, mask=row >= 0, other=-1)
    draft = tl.load(rows.token_ids + following, mask=following >= 0, other=-2)
    then = tl.load(drawn + following, mask=following >= 0, other=-1)
    # The first row that is not accepted; the rows of a request follow one another.
    is_end = (found != draft) | (then < 0)
    num_accepted = tl.min(tl.where(is_end, step, BLOCK), axis=0)
    is_request = first >= 0
    last = tl.maximum(first + num_accepted, 0)
    token = tl.load(drawn + last)
    slot = tl.load(verified.slots + first, mask=is_request, other=0)
    slot = tl.where(is_request, slot, dummy)
    tl.store(last_rows + request, last)
    tl.store(own_slots + request, slot)
    tl.store(known.tokens + slot, tl.maximum(token, 0))
    tl.store(known.starts + slot, tl.load(rows.positions + last) + 1)


@triton.jit(do_not_specialize=["requests"])
def _places_kernel(
    positions: tl.tensor,
    places: tl.tensor,
    kv_lens: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    limits: tl.tensor,
    late_starts: tl.tensor,
    page_table: tl.tensor,
    requests: int,
    table_stride: int,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    step = tl.program_id(0)
    request = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = request < requests
    slot = tl.load(slots + request, mask=is_there, other=0)
    start = tl.load(starts + request, mask=is_there, other=0)
    late = tl.load(late_starts + slot, mask=is_there, other=0)
    limit = tl.load(limits + request, mask=is_there, other=1)
    wanted = tl.where(start < 0, late, start) + step
    position = tl.minimum(wanted, limit - 1)
    page = tl.load(
        page_table + slot * table_stride + position // PAGE_SIZE, mask=is_there, other=0
    ).to(tl.int64)
    place = tl.where(wanted < limit, page * PAGE_SIZE + position % PAGE_SIZE, 0)
    at = step * requests + request
    tl.store(positions + at, position, mask=is_there)
    tl.store(places + at, place, mask=is_there)
    tl.store(kv_lens + at, (position + 1).to(tl.int32), mask=is_there)
