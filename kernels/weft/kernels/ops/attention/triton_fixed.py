"""Attention on a GPU in which a row's bits do not depend on the other rows.

One kernel takes requests of any number of rows. It reads K and V from pages, in tiles of positions
from position 0 on; positions of a tile that a row does not see add exact zeros. Contexts are cut
into segments at absolute positions, and the segments' sums are merged in order with the same
arithmetic in every case. A program merges all segments that it walks. If there are few programs,
each takes one segment, and a second launch merges them (KV splits of a fixed size: H. He et al.,
Defeating Nondeterminism in LLM Inference, 2025).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.attention.triton_extend import launch_config
from weft.kernels.ops.attention.triton_tiles import (
    AttentionForm,
    attend_pages,
    empty_softmax,
    seen_behind,
    window_of_rows,
)
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import block_dim, cdiv
from weft.kernels.shared.multiprocessors import num_multiprocessors
from weft.kernels.shared.request_tiles import request_of_tile
from weft.kernels.shared.softmax import with_sink

SEGMENT = 1024
"""Positions of a segment, a multiple of every tile. Results depend on it, so that it is the same
for all models and steps.
"""
_PROGRAMS_PER_SM = 2
"""Programs per multiprocessor from which on separate segments gain nothing."""
_MAX_PARTS = 4096
"""Most rows times segments that are kept for the merge: about 70 MB for 32 heads."""


def fixed_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    spec: AttentionSpec,
    step: AttentionMetadata,
) -> None:
    """Writes all rows of `out`.

    Args:
        out: [T, Hq * D], dtype of `q`; a request without context gets zeros.
        q: [T, Hq, D], T at least 1.
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page, or in 8 bits.
        spec: Without a first position.
        step: `max_kv_len` decides on launches, and changes no bits.
    """
    requests = step.page_table.shape[0]
    tokens, heads, dim = q.shape
    kv_heads = pool.shape[1]
    group = heads // kv_heads
    launch = launch_config(q.dtype, dim, 0, is_copied=False)
    # An upper bound: each request has at most one tile that is not full.
    tiles = tokens // (launch.rows // group) + requests
    segments = cdiv(step.max_kv_len, SEGMENT)
    is_split = segments > 1 and tokens * segments <= _MAX_PARTS
    is_split &= kv_heads * tiles <= _PROGRAMS_PER_SM * num_multiprocessors(q.device)
    partial, sums = out, out
    if is_split:
        parts = (tokens, heads, segments)
        partial = torch.empty((*parts, dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((*parts, 2), dtype=torch.float32, device=q.device)
    in_powers_of_two = spec.scale * math.log2(math.e)
    _fixed_kernel[(kv_heads, tiles, segments if is_split else 1)](
        partial,
        sums,
        q,
        pool,
        step.page_table,
        step.cu_q_lens,
        step.kv_lens,
        step.key_ends,
        spec.sinks,
        in_powers_of_two,
        layer,
        step.page_table.stride(0),
        requests,
        segments,
        FORM=AttentionForm.of(q, pool, spec, launch.tile),
        IS_SPLIT=is_split,
        ROWS=launch.rows,
        SEGMENT=SEGMENT,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **launch_options(q.device),
    )
    if is_split:
        _merge_kernel[(tokens, heads)](
            out,
            partial,
            sums,
            spec.sinks,
            in_powers_of_two,
            segments,
            DIM=dim,
            BLOCK_DIM=block_dim(dim),
            num_warps=1,
            **launch_options(q.device),
        )


@triton.jit(do_not_specialize=["layer", "requests", "segments"])
def _fixed_kernel(
    out: tl.tensor,
    sums: tl.tensor,
    q: tl.tensor,
    pool: tl.tensor,
    page_table: tl.tensor,
    cu_q_lens: tl.tensor,
    kv_lens: tl.tensor,
    key_ends: tl.tensor,
    sinks: tl.tensor,
    scale: float,
    layer: int,
    table_stride: int,
    requests: int,
    segments: int,
    FORM: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> None:
    """A tile of one request's rows for the query heads of one KV head, as [ROWS] pairs of row and
    head.
    """
    GROUP: tl.constexpr = FORM.group
    DIM: tl.constexpr = FORM.dim
    BLOCK_DIM: tl.constexpr = FORM.block_dim
    TILE: tl.constexpr = FORM.tile
    release_next()
    wait_for_last()
    kv_head = tl.program_id(0)
    index = tl.program_id(1)
    Q_ROWS: tl.constexpr = ROWS // GROUP
    request = request_of_tile(index, cu_q_lens, requests, Q_ROWS)
    first_row = tl.load(cu_q_lens + request)
    q_len = tl.load(cu_q_lens + request + 1) - first_row
    # The tiles that see most begin first.
    begin = (tl.cdiv(q_len, Q_ROWS) - 1 - (index - first_row // Q_ROWS - request)) * Q_ROWS
    if (q_len < 1) | (begin < 0):
        return

    member = tl.arange(0, ROWS)
    row = begin + member // GROUP
    column = tl.arange(0, BLOCK_DIM)
    is_there = (row < q_len) & (member < Q_ROWS * GROUP)
    mask = is_there[:, None] & (column < DIM)[None, :]
    heads = FORM.kv_heads * GROUP
    place = (first_row + row).to(tl.int64) * heads + kv_head * GROUP + member % GROUP
    query = tl.load(q + place[:, None] * DIM + column[None, :], mask=mask, other=0.0)
    all_largest = tl.full([ROWS], float("-inf"), tl.float32)
    all_total = tl.zeros([ROWS], tl.float32)
    all_mixed = tl.zeros([ROWS, BLOCK_DIM], tl.float32)

    cached = tl.load(kv_lens + request) - q_len
    own_at = cached + row
    last_seen = own_at
    pages = pool, page_table + request.to(tl.int64) * table_stride, kv_head, layer
    # Every row sees [full, common), no row sees anything before `first` or from `end` on.
    end = cached + tl.minimum(begin + Q_ROWS, q_len)
    if key_ends is not None:
        last_seen, end = seen_behind(key_ends, first_row + row, is_there, own_at, end)
    common = (cached + begin + 1) // TILE * TILE
    first, full, walk, tail = 0, 0, 0, common
    if FORM.window > 0:
        first, full = window_of_rows(cached + begin, Q_ROWS, common, 0, FORM)
        walk = first // TILE * TILE
        tail = tl.maximum(common, walk)
    rows = query, 1.0, last_seen, own_at, scale
    first_segment = first // SEGMENT
    end_segment = tl.cdiv(end, SEGMENT)
    if IS_SPLIT:
        first_segment = tl.program_id(2)
        end_segment = tl.minimum(first_segment + 1, end_segment)
    for segment in range(first_segment, end_segment):
        softmax = empty_softmax(ROWS, BLOCK_DIM)
        segment_end = tl.minimum((segment + 1) * SEGMENT, end)
        start_fully = segment * SEGMENT
        if FORM.window > 0:
            start_fully = tl.maximum(full, segment * SEGMENT)
            start_partly = tl.maximum(walk, segment * SEGMENT)
            for start in range(start_partly, tl.minimum(full, segment_end), TILE):
                softmax = attend_pages(softmax, rows, pages, start, first, end, True, False, FORM)
        for start in range(start_fully, tl.minimum(common, segment_end), TILE):
            softmax = attend_pages(softmax, rows, pages, start, first, end, False, False, FORM)
        for start in range(tl.maximum(tail, segment * SEGMENT), segment_end, TILE):
            softmax = attend_pages(softmax, rows, pages, start, first, end, True, False, FORM)
        largest, total, mixed, _ = softmax
        keep, share, all_largest = _weights(all_largest, largest, scale)
        is_seen = share > 0.0
        all_total = tl.fma(all_total, keep, tl.where(is_seen, total * share, 0.0))
        part = tl.where(is_seen[:, None], mixed * share[:, None], 0.0)
        all_mixed = tl.fma(all_mixed, tl.broadcast_to(keep[:, None], [ROWS, BLOCK_DIM]), part)
    if IS_SPLIT:
        part_at = place * segments + tl.program_id(2)
        is_seen = all_largest > float("-inf")
        at = out + part_at[:, None] * DIM + column[None, :]
        tl.store(at, all_mixed, mask=mask & is_seen[:, None])
        tl.store(sums + 2 * part_at, all_largest, mask=is_there)
        tl.store(sums + 2 * part_at + 1, all_total, mask=is_there)
    else:
        if sinks is not None:
            head = tl.where(is_there, kv_head * GROUP + member % GROUP, 0)
            all_total = with_sink(all_total, all_largest, sinks, head, scale)
        # A padding request brings a row that sees nothing.
        mixed = all_mixed / tl.where(all_total > 0.0, all_total, 1.0)[:, None]
        at = out + place[:, None] * DIM + column[None, :]
        tl.store(at, mixed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["segments"])
def _merge_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    sinks: tl.tensor,
    scale: float,
    segments: int,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """The segments of one row for one head, merged as _fixed_kernel merges them."""
    release_next()
    wait_for_last()
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    column = tl.arange(0, BLOCK_DIM)
    in_dim = column < DIM
    all_largest = tl.full([1], float("-inf"), tl.float32)
    all_total = tl.zeros([1], tl.float32)
    all_mixed = tl.zeros([BLOCK_DIM], tl.float32)
    for segment in range(0, segments):
        part_at = place * segments + segment + tl.arange(0, 1)
        largest = tl.load(sums + 2 * part_at)
        total = tl.load(sums + 2 * part_at + 1)
        keep, share, all_largest = _weights(all_largest, largest, scale)
        is_seen = share > 0.0
        mixed = tl.load(partial + part_at * DIM + column, mask=is_seen & in_dim, other=0.0)
        all_total = tl.fma(all_total, keep, tl.where(is_seen, total * share, 0.0))
        part = tl.where(is_seen, mixed * share, 0.0)
        all_mixed = tl.fma(all_mixed, tl.broadcast_to(keep, [BLOCK_DIM]), part)
    if sinks is not None:
        all_total = with_sink(all_total, all_largest, sinks, tl.program_id(1), scale)
    mixed = all_mixed / tl.where(all_total > 0.0, all_total, 1.0)
    tl.store(out + place * DIM + column, mixed.to(out.dtype.element_ty), mask=in_dim)


@triton.jit
def _weights(
    all_largest: tl.tensor, largest: tl.tensor, scale: float
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Weights of the sums so far and of one more segment's, and the larger of the two maxima. A
    segment's weight is 0 if no position of it is seen, or if it is negligible.
    """
    new_largest = tl.maximum(all_largest, largest)
    is_seen = largest > float("-inf")
    keep = tl.where(is_seen, tl.exp2((all_largest - new_largest) * scale), 1.0)
    share = tl.where(is_seen, tl.exp2((largest - new_largest) * scale), 0.0)
    return keep, share, new_largest
