"""What each row of a step sees of the pages that are on one rank, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.attention.spec import AttentionMetadata, PageRanks, PagesHere
from weft.kernels.ops.pages.triton_pages import row_in_pool

_COLUMNS = 256
"""Entries of a page table, or requests, that a program reads at once."""


def divided_rows(step: AttentionMetadata, ranks: PageRanks, page_size: int) -> AttentionMetadata:
    """`weft.kernels.ops.divided_pages.divided` on a GPU. Each row is a request of its own in
    `PagesHere.step`, whose positions before it are those that it sees here.
    """
    table, places = step.page_table, step.places
    rows, (requests, columns) = len(places), table.shape
    here = torch.zeros((rows, columns), dtype=torch.int32, device=table.device)
    ends, lens = here.new_empty((2, rows)).unbind()
    starts = here.new_empty(rows + 1)
    into, offsets, own_places = places.new_empty((3, rows)).unbind()
    if rows:
        _rows_kernel[(rows,)](
            *(here, ends, lens, starts, into, offsets, own_places),
            *(table, step.cu_q_lens, step.kv_lens, step.key_ends, places),
            *(table.stride(0), requests, columns),
            RANK=ranks.rank,
            SIZE=ranks.size,
            PAGE_SIZE=page_size,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
    own = AttentionMetadata(
        page_table=here,
        places=places,
        cu_q_lens=starts,
        kv_lens=lens,
        max_q_len=1,
        max_kv_len=step.max_kv_len,
        key_ends=ends,
    )
    return step._replace(places=own_places, divided=(into, offsets), here=PagesHere(ranks, own))


@triton.jit
def _rows_kernel(
    here: tl.tensor,
    ends: tl.tensor,
    lens: tl.tensor,
    starts: tl.tensor,
    into: tl.tensor,
    offsets: tl.tensor,
    own_places: tl.tensor,
    table: tl.tensor,
    cu_q_lens: tl.tensor,
    kv_lens: tl.tensor,
    key_ends: tl.tensor,
    places: tl.tensor,
    table_stride: int,
    requests: int,
    columns: int,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    lane = tl.arange(0, COLUMNS)
    begun = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, requests + 1, COLUMNS):
        is_start = first + lane <= requests
        start = tl.load(cu_q_lens + first + lane, mask=is_start, other=0)
        begun += (is_start & (start <= row)).to(tl.int32)
    # Padding rows follow the last request's.
    request = tl.minimum(tl.sum(begun, axis=0), requests) - 1
    length = tl.load(kv_lens + request)
    if key_ends is not None:
        end = tl.load(key_ends + row)
    else:
        end = length - tl.load(cu_q_lens + request + 1) + 1 + row
        end = tl.minimum(tl.maximum(end, 0), length)
    seen = tl.zeros([COLUMNS], tl.int32)
    count = tl.full([], 0, tl.int32)
    for first in range(0, tl.minimum(columns, tl.cdiv(length, PAGE_SIZE)), COLUMNS):
        column = first + lane
        is_page = (column < columns) & (column * PAGE_SIZE < length)
        page = tl.load(table + request.to(tl.int64) * table_stride + column, mask=is_page, other=0)
        is_here = is_page & (page % SIZE == RANK)
        at = count + tl.cumsum(is_here.to(tl.int32), axis=0) - 1
        tl.store(here + row.to(tl.int64) * columns + at, row_in_pool(page, SIZE), mask=is_here)
        of_page = tl.minimum(tl.maximum(end - column * PAGE_SIZE, 0), PAGE_SIZE)
        seen += tl.where(is_here, of_page, 0)
        count += tl.sum(is_here.to(tl.int32), axis=0)
    total = tl.sum(seen, axis=0)
    tl.store(ends + row, total)
    # Attention to the positions before a row counts the row itself, which is not here.
    tl.store(lens + row, total + 1)
    tl.store(starts + row, row)
    tl.store(starts + row + 1, row + 1)
    place = tl.load(places + row)
    page = place // PAGE_SIZE
    page = tl.where(page % SIZE == RANK, row_in_pool(page, SIZE), 0)
    tl.store(into + row, page)
    tl.store(offsets + row, place % PAGE_SIZE)
    tl.store(own_places + row, page * PAGE_SIZE + place % PAGE_SIZE)
