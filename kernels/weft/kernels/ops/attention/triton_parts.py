"""Cuts contexts into parts, so that several programs attend to one context at the same time.

A program of `extend_attention` attends to all positions before its rows. The next turn of a long
chat brings few rows and so makes few programs. Then a part of the GPU is idle, or a few programs
are left over and run alone in a second round. Therefore each context is cut into parts, one program
attends to each part, and `merge_parts` combines their results (Dao et al., Flash-Decoding, 2023).
Only the device knows how long a context is. A short context has one part, and its program writes
the result itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.attention.spec import AttentionMetadata, SeveralRows
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import block_dim, cdiv
from weft.kernels.shared.request_tiles import several_rows
from weft.kernels.shared.softmax import with_sink

MAX_PARTS = 8
MIN_POSITIONS = tl.constexpr(512)
"""Least positions in each part of a context."""
_MOST_BYTES = 64 << 20
"""Most memory for the results of all parts."""
_COST = 0.02
"""Cost of one more part, as a share of the time that attention takes with one part."""
_MERGED_ROWS = 16
"""Rows of a program that merges parts."""


class Parts(NamedTuple):
    """The number of parts, and memory for the result of each."""

    number: int
    """Most parts of a context, 2 to MAX_PARTS."""
    mixed: torch.Tensor
    """[number, T, Hq, D] float32: values times their weights, not yet divided by the sum of
    weights.
    """
    sums: torch.Tensor
    """[number, T, Hq, 2] float32: the largest score, and the sum of weights relative to it."""


def make_parts(q: torch.Tensor, programs: int, at_once: int) -> Parts | None:
    """Chooses the number of parts with which attention ends soonest, and allocates their memory;
    None: one part is best. q: [T, Hq, D]. `programs` is the number of programs if each context is
    one part.
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
    step: AttentionMetadata,
    sinks: torch.Tensor | None,
    scale: float,
    least_rows: int,
    several: SeveralRows | None = None,
) -> None:
    """Merges the results of parts, for the rows of `out` whose contexts have several.

    Args:
        out: [T, Hq * D].
        sinks: [Hq] float32, or None.
        scale: Factor on the scores, log2(e) included.
        several: As in `extend_attention`.
    """
    _, tokens, heads, dim = parts.mixed.shape
    requests = step.kv_lens.shape[0]
    tiles = tokens // _MERGED_ROWS + (several.most + 1 if several else requests)
    _merge_kernel[(heads, tiles)](
        out,
        parts.mixed,
        parts.sums,
        step.cu_q_lens,
        step.kv_lens,
        sinks,
        several.first if several else None,
        scale,
        requests,
        several.most if several else 0,
        tokens,
        parts.number,
        MIN_ROWS=least_rows,
        ROWS=_MERGED_ROWS,
        DIM=dim,
        BLOCK_DIM=block_dim(dim),
        num_warps=4,
        **launch_options(out.device),
    )


@triton.jit
def parts_of(cached: tl.tensor, most: tl.tensor) -> tl.tensor:
    """Number of parts of a context with `cached` positions before the step."""
    return tl.maximum(1, tl.minimum(most, cached // MIN_POSITIONS))


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
    """Stores a part's result for some rows of one head, as `Parts` describes it."""
    column = tl.arange(0, BLOCK_DIM)
    at = (part.to(tl.int64) * tokens + row) * heads + head
    mask = is_row[:, None] & (column < DIM)[None, :]
    tl.store(mixed_of + at[:, None] * DIM + column[None, :], mixed, mask=mask)
    tl.store(sums_of + 2 * at, largest, mask=is_row)
    tl.store(sums_of + 2 * at + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["requests", "most_several", "tokens", "most_parts"])
def _merge_kernel(
    out: tl.tensor,
    mixed_of: tl.tensor,
    sums_of: tl.tensor,
    cu_q_lens: tl.tensor,
    kv_lens: tl.tensor,
    sinks: tl.tensor,
    first_several: tl.tensor,
    scale: float,
    requests: int,
    most_several: int,
    tokens: int,
    most_parts: int,
    MIN_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Merges up to ROWS rows of one request, for one head."""
    release_next()
    wait_for_last()
    head, heads = tl.program_id(0), tl.num_programs(0)
    index, request = several_rows(
        tl.program_id(1), cu_q_lens, requests, first_several, most_several, ROWS
    )
    first_row = tl.load(cu_q_lens + request)
    q_len = tl.load(cu_q_lens + request + 1) - first_row
    begin = (index - first_row // ROWS - request) * ROWS
    parts = parts_of(tl.load(kv_lens + request) - q_len, most_parts)
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
        part_largest = tl.load(sums_of + 2 * part_at, mask=is_row, other=0.0)
        part_total = tl.load(sums_of + 2 * part_at + 1, mask=is_row, other=0.0)
        values = tl.load(mixed_of + part_at[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        # Contexts are cut between pages, so with long pages a part may have no positions.
        new_largest = tl.maximum(largest, part_largest)
        is_first = largest == float("-inf")
        keep = tl.where(is_first, 0.0, tl.exp2((largest - new_largest) * scale))
        is_empty = part_largest == float("-inf")
        weight = tl.where(is_empty, 0.0, tl.exp2((part_largest - new_largest) * scale))
        largest = new_largest
        total = total * keep + part_total * weight
        mixed = mixed * keep[:, None] + values * weight[:, None]
    if sinks is not None:
        total = with_sink(total, largest, sinks, head, scale)
    mixed = mixed / total[:, None]
    tl.store(out + at[:, None] * DIM + column[None, :], mixed.to(out.dtype.element_ty), mask=mask)
