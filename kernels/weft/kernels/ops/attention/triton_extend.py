"""Causal attention of requests that bring several rows, over paged K and V on a GPU.

A program holds a tile of one request's rows for one head and walks the positions that they see:
first the pages of positions before the step, then the step's own K and V up to the diagonal. If the
caller has own K and V outside the pool, the kernel reads them there, and a prompt without cached
positions reads no page; else it reads them from pages too. With a window, the walk begins at the
first tile of which the first row sees a part. If there are too few programs to fill the GPU,
several programs share the positions before the step (`triton_parts`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec, OwnKv, SeveralRows
from weft.kernels.ops.attention.triton_parts import (
    Parts,
    leave_part,
    make_parts,
    merge_parts,
    parts_of,
)
from weft.kernels.ops.attention.triton_tiles import (
    AttentionForm,
    attend_pages,
    attend_tile,
    empty_softmax,
    seen_behind,
    window_of_rows,
)
from weft.kernels.ops.pages.triton_entries import query_in_units
from weft.kernels.shared.copied_tiles import can_copy, copied_tiles
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv
from weft.kernels.shared.multiprocessors import num_multiprocessors
from weft.kernels.shared.request_tiles import several_rows
from weft.kernels.shared.softmax import capped, weigh_tile, with_sink


class ExtendLaunchConfig(NamedTuple):
    rows: int
    """Rows of one request for one head; a multiple of `tile`."""
    tile: int
    """Positions per iteration."""
    warps: int
    stages: int
    """Tiles that are being loaded."""


def extend_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    spec: AttentionSpec,
    step: AttentionMetadata,
    own: OwnKv | None,
    *,
    least_rows: int = 2,
    several: SeveralRows | None = None,
) -> None:
    """Writes the rows of `out` whose requests bring `least_rows` or more, and no others.

    Args:
        out: [T, Hq * D], dtype of `q`.
        q: [T, Hq, D].
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page.
        spec: A first position excludes `own` and a window.
        step: `key_ends` exclude `own` and a first position.
        own: The step's K and V; None: they are read from the pool.
        several: The requests that may bring several rows, with `least_rows` of 2 or more; None:
            any may.

    Raises:
        ValueError: A first position or `key_ends` with what excludes them.
    """
    if spec.first_position and own is not None:
        raise ValueError("a first position needs K and V in the pool")
    if spec.first_position and spec.window is not None:
        raise ValueError("a first position is not taken beside a window")
    if step.key_ends is not None and (own is not None or spec.first_position):
        raise ValueError("rows that see later ones need K and V in the pool, all positions")
    tokens, heads, dim = q.shape
    requests = step.page_table.shape[0]
    own_matrices = [] if own is None else [part.flatten(1) for part in (own.k, own.v)]
    is_copied = dim in (64, 128) and bool(own_matrices) and all(map(can_copy, own_matrices))
    launch = launch_config(q.dtype, dim, step.max_q_len, is_copied=is_copied)
    # An upper bound: each request has at most one tile that is not full.
    tiles = tokens // launch.rows + (several.most + 1 if several else requests)
    k_tiles, v_tiles = (
        (copied_tiles(part, launch.tile, dim) for part in own_matrices)
        if is_copied
        else (None, None)
    )
    in_powers = spec.scale * math.log2(math.e)
    parts = None
    if spec.window is None and spec.first_position == 0 and not spec.is_chunked:
        parts = parts_of_contexts(q, launch, can_share=is_copied)
    _extend_kernel[(heads, tiles, parts.number if parts else 1)](
        out,
        parts.mixed if parts else None,
        parts.sums if parts else None,
        q,
        pool,
        own.k if own else None,
        own.v if own else None,
        k_tiles,
        v_tiles,
        step.page_table,
        step.cu_q_lens,
        step.kv_lens,
        step.key_ends,
        spec.sinks,
        several.first if several else None,
        in_powers,
        layer,
        step.page_table.stride(0),
        own.k.stride(0) if own else 0,
        own.v.stride(0) if own else 0,
        requests,
        several.most if several else 0,
        tokens,
        FORM=AttentionForm.of(q, pool, spec, launch.tile),
        ROWS=launch.rows,
        MIN_ROWS=least_rows,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **launch_options(q.device),
    )
    if parts:
        merge_parts(out, parts, step, spec.sinks, in_powers, least_rows, several)


def launch_config(
    dtype: torch.dtype, dim: int, rows: int, *, is_copied: bool
) -> ExtendLaunchConfig:
    """The launch for a head of `dim` elements of `dtype` and at most `rows` rows a request.

    `is_copied`: the copy engine fetches own K and V, so that two programs share a multiprocessor.
    """
    if dtype == torch.float32:
        return ExtendLaunchConfig(rows=32, tile=32, warps=4, stages=1)
    if dim > 256:
        return ExtendLaunchConfig(rows=64, tile=32, warps=8, stages=2)
    if dim > 128:
        return ExtendLaunchConfig(rows=64, tile=64, warps=4, stages=2)
    if is_copied or rows < 1024:
        return ExtendLaunchConfig(rows=64, tile=64, warps=4, stages=3)
    return ExtendLaunchConfig(rows=128, tile=64, warps=8, stages=3)


def parts_of_contexts(
    q: torch.Tensor, launch: ExtendLaunchConfig, *, can_share: bool
) -> Parts | None:
    """Parts of a step's contexts, chosen as if all rows belonged to one request; each further
    request adds at most one tile.

    `can_share`: a multiprocessor runs two programs at the same time.
    """
    tokens, heads, _ = q.shape
    programs = heads * cdiv(tokens, launch.rows)
    at_once = num_multiprocessors(q.device) * (2 if can_share else 1)
    return make_parts(q, programs, at_once)


@triton.jit(do_not_specialize=["requests", "most_several", "layer", "tokens"])
def _extend_kernel(
    out: tl.tensor,
    mixed_of_parts: tl.tensor,
    sums_of_parts: tl.tensor,
    q: tl.tensor,
    pool: tl.tensor,
    own_k: tl.tensor,
    own_v: tl.tensor,
    k_tiles: tl.tensor_descriptor,
    v_tiles: tl.tensor_descriptor,
    page_table: tl.tensor,
    cu_q_lens: tl.tensor,
    kv_lens: tl.tensor,
    key_ends: tl.tensor,
    sinks: tl.tensor,
    first_several: tl.tensor,
    scale: float,
    layer: int,
    table_stride: int,
    k_stride: int,
    v_stride: int,
    requests: int,
    most_several: int,
    tokens: int,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    MIN_ROWS: tl.constexpr,
) -> None:
    DIM: tl.constexpr = FORM.dim
    BLOCK_DIM: tl.constexpr = FORM.block_dim
    PAGE_SIZE: tl.constexpr = FORM.page_size
    TILE: tl.constexpr = FORM.tile
    release_next()
    wait_for_last()
    head = tl.program_id(0)
    index, request = several_rows(
        tl.program_id(1), cu_q_lens, requests, first_several, most_several, ROWS
    )
    first_row = tl.load(cu_q_lens + request)
    q_len = tl.load(cu_q_lens + request + 1) - first_row
    # Later tiles of a request see more of it. The longest work begins first, and so does that of
    # the first requests, which continue a prompt.
    begin = (tl.cdiv(q_len, ROWS) - 1 - (index - first_row // ROWS - request)) * ROWS
    cached = tl.load(kv_lens + request) - q_len
    part, parts = tl.program_id(2), parts_of(cached, tl.num_programs(2))
    if (q_len < MIN_ROWS) | (begin < 0) | (part >= parts):
        return

    IS_SCALED: tl.constexpr = pool.dtype.element_ty.is_int()
    PART_UNIT: tl.constexpr = max(TILE, PAGE_SIZE)
    kv_head = head // FORM.group
    row = begin + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_DIM)
    mask = (row < q_len)[:, None] & (column < DIM)[None, :]
    q_at = ((first_row + row).to(tl.int64) * (FORM.kv_heads * FORM.group) + head)[:, None] * DIM
    q_at += column[None, :]
    query = tl.load(q + q_at, mask=mask, other=0.0)
    unit_of_query = 1.0
    if IS_SCALED:
        query, unit_of_query = query_in_units(query)
    softmax = empty_softmax(ROWS, BLOCK_DIM)

    own_at = cached + row
    last_seen = own_at
    table = page_table + request.to(tl.int64) * table_stride
    # In pages: every row sees [full, common), no row sees anything before `first` or from `end` on.
    if own_k is None:
        end = cached + tl.minimum(begin + ROWS, q_len)
        if key_ends is not None:
            # What a row sees behind itself is masked, as the diagonal is.
            last_seen, end = seen_behind(key_ends, first_row + row, row < q_len, own_at, end)
        common = (cached + begin + 1) // TILE * TILE if FORM.first_position == 0 else 0
    else:
        end = cached
        common = cached // TILE * TILE
    rows = query, unit_of_query, last_seen, own_at, scale
    pages = pool, table, kv_head, layer
    first, full, tail, walked = 0, 0, common, table
    own_begin, own_end = begin, tl.minimum(begin + ROWS, q_len)
    if mixed_of_parts is not None:
        # This program attends to one part of the common positions, and in the last part also to
        # those after them. Positions are counted from the part's first page: a loop from 0 on takes
        # a fifth fewer instructions, since the compiler then knows that none is negative.
        part_begin = part * (common // PART_UNIT) // parts * PART_UNIT
        part_end = (part + 1) * (common // PART_UNIT) // parts * PART_UNIT
        is_last = part == parts - 1
        walked = table + part_begin // PAGE_SIZE
        common = tl.where(is_last, common, part_end) - part_begin
        tail = tl.where(is_last, tail, end)
        own_begin = tl.where(is_last, own_begin, 0)
        own_end = tl.where(is_last, own_end, 0)
    if FORM.window > 0:
        first, full = window_of_rows(cached + begin, ROWS, common, 0, FORM)
        tail = tl.maximum(common, first // TILE * TILE)
        for start in range(first // TILE * TILE, full, TILE):
            softmax = attend_pages(softmax, rows, pages, start, first, end, True, True, FORM)
    for start in range(full, common, TILE):
        of_part = pool, walked, kv_head, layer
        softmax = attend_pages(softmax, rows, of_part, start, first, end, False, True, FORM)
    for start in range(tail, end, TILE):
        softmax = attend_pages(softmax, rows, pages, start, first, end, True, True, FORM)
    largest, total, mixed, unit = softmax
    if IS_SCALED:
        mixed = mixed * unit
        if own_k is not None:
            # The query without units is read once more, so that it takes no registers.
            query = tl.load(q + q_at, mask=mask, other=0.0)
    if own_k is not None:
        k_at = own_k + first_row.to(tl.int64) * k_stride + kv_head * DIM + column[None, :]
        v_at = own_v + first_row.to(tl.int64) * v_stride + kv_head * DIM + column[None, :]
        softmax, rows = (largest, total, mixed, unit), (query, 1.0, row, row, scale)
        first, full = 0, 0
        if FORM.window > 0:
            first, full = window_of_rows(begin, ROWS, begin, cached, FORM)
            for start in range(first // TILE * TILE, full, TILE):
                position = start + tl.arange(0, TILE)
                at = position.to(tl.int64)[:, None]
                softmax = attend_tile(
                    softmax, rows, k_at + at * k_stride, v_at + at * v_stride, position, first,
                    q_len, True, FORM, cached,
                )  # fmt: skip
        # Before the diagonal, then across it.
        for start in range(full, own_begin, TILE):
            if k_tiles is not None:
                keys = k_tiles.load([first_row + start, kv_head * DIM])
                values = v_tiles.load([first_row + start, kv_head * DIM])
                largest, total, mixed, unit = softmax
                scores = capped(tl.dot(query, tl.trans(keys)), FORM.softcap)
                largest, total, shrink, weights = weigh_tile(
                    largest, total, scores, scale, FORM.is_fused, False
                )
                mixed = mixed * shrink[:, None]
                mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
                softmax = largest, total, mixed, unit
            else:
                position = start + tl.arange(0, TILE)
                at = position.to(tl.int64)[:, None]
                softmax = attend_tile(
                    softmax, rows, k_at + at * k_stride, v_at + at * v_stride, position, 0, q_len,
                    False, FORM,
                )  # fmt: skip
        for start in range(own_begin, own_end, TILE):
            position = start + tl.arange(0, TILE)
            at = position.to(tl.int64)[:, None]
            softmax = attend_tile(
                softmax, rows, k_at + at * k_stride, v_at + at * v_stride, position, first, q_len,
                True, FORM, cached,
            )  # fmt: skip
        largest, total, mixed, _ = softmax
    if mixed_of_parts is not None:
        # The result of a context with one part is complete; the code below writes it.
        is_shared = parts > 1
        if is_shared:
            leave_part(
                mixed_of_parts, sums_of_parts, part, first_row + row, head, tokens,
                tl.num_programs(0), largest, total, mixed, row < q_len, DIM, BLOCK_DIM,
            )  # fmt: skip
            return
    if sinks is not None:
        total = with_sink(total, largest, sinks, head, scale)
    # With a window, rows beyond the request's own may see no position.
    mixed = mixed / (tl.where(total > 0.0, total, 1.0) if FORM.window > 0 else total)[:, None]
    if FORM.first_position > 0:
        mixed = tl.where((last_seen >= FORM.first_position)[:, None], mixed, 0.0)
    tl.store(out + q_at, mixed.to(out.dtype.element_ty), mask=mask)
