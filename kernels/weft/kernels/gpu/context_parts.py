"""Parts of the context of a few prompts, which several programs walk at once.

A program of `extend_attention` walks all positions before its rows. Where a step brings few rows,
as the next turn of a long chat does, there are fewer programs than a GPU runs at once, or a few
more, for which it then takes as long as for twice as many. So each context is cut into parts, one
program walks each, and what the parts found is merged (Dao et al., Flash-Decoding, 2023). The
device alone knows how long a context is; a short one has one part, which needs no merge.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.gpu.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.gpu.launch_sizes import cdiv
from weft.kernels.gpu.softmax import with_sink

MAX_PARTS = 8
MIN_POSITIONS = tl.constexpr(512)
"""Positions for which one more part pays."""
_MOST_BYTES = 64 << 20
"""Memory for what all parts of a step find."""
_COST = 0.02
"""Share of the time that one more part costs."""
_MERGED_ROWS = 16
"""Rows of a program that merges."""


class Parts(NamedTuple):
    """Where programs leave what each part of a context gave."""

    number: int
    """Most parts of a context, 2 to MAX_PARTS."""
    mixed: torch.Tensor
    """[number, T, Hq, D] float32: values by their weights, not yet divided by the weights' sum."""
    sums: torch.Tensor
    """[number, T, Hq, 2] float32: the largest score and the sum of weights relative to it."""


def make_parts(q: torch.Tensor, programs: int, at_once: int) -> Parts | None:
    """Memory for the number of parts with which the GPU is busy for the shortest time; None: one.

    Args:
        q: [T, Hq, D], queries.
        programs: Programs of a part.
        at_once: Programs that the GPU runs at once.
    """
    tokens, heads, dim = q.shape
    most = min(MAX_PARTS, _MOST_BYTES // (4 * tokens * heads * dim))

    def duration(count: int) -> float:
        return cdiv(programs * count, at_once) / count * (1 + _COST * count)

    count = min(range(1, most + 1), key=duration, default=1)
    if count == 1:
        return None
    mixed = torch.empty((count, tokens, heads, dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((count, tokens, heads, 2), dtype=torch.float32, device=q.device)
    return Parts(count, mixed, sums)


def merge_parts(
    out: torch.Tensor,
    parts: Parts,
    cu_q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    least_rows: int,
) -> None:
    """Writes the rows of `out` whose contexts have several parts.

    Args:
        out: [T, Hq * D].
        parts: What programs left.
        cu_q_lens: [R + 1] int32.
        kv_lens: [R] int32, new rows included.
        sinks: [Hq] float32, or None.
        scale: Factor on the scores, log2(e) included.
        least_rows: Fewest rows of a request.
    """
    _, tokens, heads, dim = parts.mixed.shape
    requests = kv_lens.shape[0]
    _merge_kernel[(heads, tokens // _MERGED_ROWS + requests)](
        out,
        parts.mixed,
        parts.sums,
        cu_q_lens,
        kv_lens,
        sinks,
        scale,
        requests,
        tokens,
        PARTS=parts.number,
        MIN_ROWS=least_rows,
        ROWS=_MERGED_ROWS,
        DIM=dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(dim)),
        num_warps=4,
        **launch_options(out.device),
    )


@triton.jit
def parts_of(cached: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Parts of a context of so many positions before the step."""
    return tl.maximum(1, tl.minimum(PARTS, cached // MIN_POSITIONS))


@triton.jit
def leave_part(
    mixed_of: tl.tensor,
    sums_of: tl.tensor,
    part: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    tokens: int,
    heads: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    is_row: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Stores what a part gave for some rows under a head, as in `Parts`."""
    column = tl.arange(0, BLOCK_DIM)
    at = (part.to(tl.int64) * tokens + row) * heads + head
    mask = is_row[:, None] & (column < DIM)[None, :]
    tl.store(mixed_of + at[:, None] * DIM + column[None, :], mixed, mask=mask)
    tl.store(sums_of + 2 * at, largest, mask=is_row)
    tl.store(sums_of + 2 * at + 1, total, mask=is_row)


@triton.jit
def request_of_tile(
    index: tl.tensor, cu_q_lens: tl.tensor, requests: int, ROWS: tl.constexpr
) -> tl.tensor:
    """Last request whose first tile, cu_q_lens[r] // ROWS + r, is not after `index`."""
    low = 0
    high = requests
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(cu_q_lens + middle) // ROWS + middle > index
        low = tl.where(is_after, low, middle)
        high = tl.where(is_after, middle, high)
    return low


@triton.jit(do_not_specialize=["requests", "tokens"])
def _merge_kernel(
    out: tl.tensor,
    mixed_of: tl.tensor,
    sums_of: tl.tensor,
    cu_q_lens: tl.tensor,
    kv_lens: tl.tensor,
    sinks: tl.tensor,
    scale: float,
    requests: int,
    tokens: int,
    IS_DEPENDENT: tl.constexpr,
    PARTS: tl.constexpr,
    MIN_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Merges the parts of a tile of one request's rows under one head."""
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    head, heads = tl.program_id(0), tl.num_programs(0)
    index = tl.program_id(1)
    request = request_of_tile(index, cu_q_lens, requests, ROWS)
    first_row = tl.load(cu_q_lens + request)
    q_len = tl.load(cu_q_lens + request + 1) - first_row
    begin = (index - first_row // ROWS - request) * ROWS
    parts = parts_of(tl.load(kv_lens + request) - q_len, PARTS)
    if (q_len < MIN_ROWS) | (begin >= q_len) | (parts == 1):
        return
    row = begin + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_DIM)
    is_row = row < q_len
    mask = is_row[:, None] & (column < DIM)[None, :]
    at = (first_row + row).to(tl.int64) * heads + head
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for part in range(0, parts):
        part_at = at + tl.cast(part, tl.int64) * tokens * heads
        of_part = tl.load(sums_of + 2 * part_at, mask=is_row, other=0.0)
        total_of_part = tl.load(sums_of + 2 * part_at + 1, mask=is_row, other=0.0)
        values = tl.load(mixed_of + part_at[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        # Parts are cut between pages: with long ones, a part may have nothing.
        new_largest = tl.maximum(largest, of_part)
        is_first = largest == float("-inf")
        keep = tl.where(is_first, 0.0, tl.exp2((largest - new_largest) * scale))
        is_empty = of_part == float("-inf")
        weight = tl.where(is_empty, 0.0, tl.exp2((of_part - new_largest) * scale))
        largest = new_largest
        total = total * keep + total_of_part * weight
        mixed = mixed * keep[:, None] + values * weight[:, None]
    if sinks is not None:
        total = with_sink(total, largest, sinks, head, scale)
    mixed = mixed / total[:, None]
    tl.store(out + at[:, None] * DIM + column[None, :], mixed.to(out.dtype.element_ty), mask=mask)
