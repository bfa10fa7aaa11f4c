"""Walks of attention over tiles of positions, in pages or in matrices, on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.attention.spec import AttentionSpec
from weft.kernels.ops.pages.triton_entries import (
    LEAST_UNIT,
    SCALE_BYTES,
    dequantised,
    load_scales,
    weights_in_units,
    widened,
)
from weft.kernels.shared.launch_sizes import block_dim
from weft.kernels.shared.softmax import capped, weigh_tile


class AttentionForm(NamedTuple):
    """What kernels of attention know when they are compiled."""

    kv_heads: int
    group: int
    """Query heads of a KV head."""
    dim: int
    block_dim: int
    """Columns of a program for a head."""
    layers: int
    """Of the pool."""
    page_size: int
    page_stride: int
    """Elements of the pool from one page to the next."""
    tile: int
    """Positions per iteration."""
    window: int
    """0: none."""
    is_chunked: bool
    softcap: float
    """Of products before scaling; 0: none."""
    first_position: int
    is_fused: bool
    """Whether weights take one instruction a score (`weigh_tile`)."""

    @classmethod
    def of(
        cls, q: torch.Tensor, pool: torch.Tensor, spec: AttentionSpec, tile: int
    ) -> AttentionForm:
        """q: [T, Hq, D]; pool: as `paged_attention` takes it."""
        (_, heads, dim), kv_heads = q.shape, pool.shape[1]
        is_fused = q.dtype.itemsize == 2 and spec.first_position == 0
        return cls(
            kv_heads, heads // kv_heads, dim, block_dim(dim), pool.shape[2], pool.shape[4],
            pool.stride(0), tile, spec.window or 0, spec.is_chunked,
            (spec.softcap or 0.0) / spec.scale, spec.first_position, is_fused,
        )  # fmt: skip


@triton.jit
def empty_softmax(ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr) -> tl.tuple:
    """The running softmax of rows that have seen nothing, as `attend_tile` takes it."""
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    return largest, total, mixed, tl.full([], LEAST_UNIT, tl.float32)


@triton.jit
def attend_pages(
    softmax: tl.tuple,
    rows: tl.tuple,
    pages: tl.tuple,
    start: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    IS_PARTIAL: tl.constexpr,
    IN_UNITS: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tuple:
    """Adds a tile of positions in pages, from `start` on, to a running softmax, as `attend_tile`
    does.

    Args:
        pages: The pool, the pages of the rows' request, the KV head, and the layer.
        IN_UNITS: Whether numbers in 8 bits are multiplied as they are; else they are multiplied by
            their scales first.
    """
    pool, table, kv_head, layer = pages
    IS_SCALED: tl.constexpr = pool.dtype.element_ty.is_int()
    PAGE_SIZE: tl.constexpr = FORM.page_size
    OF_ROWS: tl.constexpr = PAGE_SIZE * (FORM.dim + (SCALE_BYTES if IS_SCALED else 0))
    position = start + tl.arange(0, FORM.tile)
    if IS_PARTIAL:
        page = tl.load(table + position // PAGE_SIZE, mask=position < end, other=0)
    else:
        page = tl.load(table + position // PAGE_SIZE)
    scale_at = None
    if IS_SCALED:
        scale_at = scales_at(pool, page, position, kv_head, layer, FORM)
    column = tl.arange(0, FORM.block_dim)
    k_at = k_of_pages(pool, page, position, kv_head, layer, column, FORM)
    return attend_tile(
        softmax, rows, k_at, k_at + OF_ROWS, position, first, end, IS_PARTIAL, FORM, 0, scale_at,
        OF_ROWS // SCALE_BYTES if IS_SCALED else 0, IS_SCALED and IN_UNITS,
    )  # fmt: skip


@triton.jit
def attend_tile(
    softmax: tl.tuple,
    rows: tl.tuple,
    k_at: tl.tensor,
    v_at: tl.tensor,
    position: tl.tensor,
    first: int,
    end: tl.tensor,
    IS_PARTIAL: tl.constexpr,
    FORM: tl.constexpr,
    before: int = 0,
    scale_at: tl.tensor = None,
    TO_V: tl.constexpr = 0,
    IN_UNITS: tl.constexpr = False,
) -> tl.tuple:
    """Adds a tile of positions to a running softmax. With IS_PARTIAL each row adds what it sees of
    the tile.

    Args:
        softmax: Each row's largest score, its sum of weights, the values times their weights, and
            the unit of the latter (`weights_in_units`) with IN_UNITS.
        rows: The queries, their unit with IN_UNITS, the last position that each row sees, the
            rows' positions, from which windows count, and the factor on scores.
        before: Positions of the request before the first of the tiles' numbering, for windows.
        scale_at: For numbers in 8 bits: where the scales of K are; those of V are TO_V further.
        IN_UNITS: Whether scores and weights are multiplied by the scales, instead of K and V.
    """
    largest, total, mixed, unit = softmax
    query, unit_of_query, last_seen, at, scale = rows
    in_dim = (tl.arange(0, FORM.block_dim) < FORM.dim)[None, :]
    exists = None
    if IS_PARTIAL:
        is_there = in_reach(position, end, first, FORM)
        exists = is_there
    if IN_UNITS:
        k_scales, v_scales = load_scales(scale_at, exists), load_scales(scale_at + TO_V, exists)
    if IS_PARTIAL:
        keys = tl.load(k_at, mask=in_dim & is_there[:, None], other=0)
        values = tl.load(v_at, mask=in_dim & is_there[:, None], other=0)
    elif FORM.dim == FORM.block_dim:
        keys = tl.load(k_at)
        values = tl.load(v_at)
    else:
        keys = tl.load(k_at, mask=in_dim, other=0)
        values = tl.load(v_at, mask=in_dim, other=0)
    if IN_UNITS:
        keys = widened(keys, query.dtype)
        values = widened(values, query.dtype, True)
    elif TO_V > 0:
        keys = dequantised(keys, scale_at, exists, query.dtype)
        values = dequantised(values, scale_at + TO_V, exists, query.dtype)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if IN_UNITS:
        scores = scores * (k_scales * unit_of_query)[None, :]
    scores = capped(scores, FORM.softcap)
    if IS_PARTIAL:
        scores = _seen_alone(scores, position, is_there, last_seen, at, before, FORM)
    largest, total, shrink, weights = weigh_tile(
        largest, total, scores, scale, FORM.is_fused, IS_PARTIAL and FORM.window > 0
    )
    if IN_UNITS:
        weights, shrink, unit = weights_in_units(weights, v_scales, shrink, unit)
    mixed = mixed * shrink[:, None]
    mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return largest, total, mixed, unit


@triton.jit
def _seen_alone(
    scores: tl.tensor,
    position: tl.tensor,
    is_there: tl.tensor,
    last_seen: tl.tensor,
    at: tl.tensor,
    before: int,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Scores of the positions of a tile that each row sees; the others are hidden."""
    is_seen = (position[None, :] <= last_seen[:, None]) & is_there[None, :]
    if FORM.is_chunked:
        is_seen &= position[None, :] >= first_of_chunk(at, before, FORM.window)[:, None]
    elif FORM.window > 0:
        is_seen &= position[None, :] > at[:, None] - FORM.window
    # Finite where a whole tile may be hidden: its weight vanishes next to any other tile's.
    return tl.where(is_seen, scores, float("-inf") if FORM.first_position == 0 else -1e30)


@triton.jit
def in_reach(
    position: tl.tensor, end: tl.tensor, first: tl.tensor, FORM: tl.constexpr
) -> tl.tensor:
    """Which positions of a tile any row sees: those before `end`, from the first position on, and
    with a window from `first` on.
    """
    is_there = position < end
    if FORM.first_position > 0:
        is_there &= position >= FORM.first_position
    if FORM.window > 0:
        is_there &= position >= first
    return is_there


@triton.jit
def k_of_pages(
    pool: tl.tensor,
    page: tl.tensor,
    position: tl.tensor,
    kv_head: tl.tensor,
    layer: int,
    column: tl.tensor,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Address of K at the given positions, whose pages are known; V is one page's rows further."""
    MORE: tl.constexpr = SCALE_BYTES if pool.dtype.element_ty.is_int() else 0
    in_page = (kv_head * FORM.layers + layer) * (2 * FORM.page_size) * (FORM.dim + MORE)
    at = page.to(tl.int64) * FORM.page_stride + in_page + position % FORM.page_size * FORM.dim
    return pool + at[:, None] + column[None, :]


@triton.jit
def scales_at(
    pool: tl.tensor,
    page: tl.tensor,
    position: tl.tensor,
    kv_head: tl.tensor,
    layer: int,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Address of the scales of K at the given positions; those of V are one page's rows further."""
    OF_ROWS: tl.constexpr = FORM.page_size * (FORM.dim + SCALE_BYTES)
    in_page = (kv_head * FORM.layers + layer) * (2 * OF_ROWS) + FORM.page_size * FORM.dim
    at = page.to(tl.int64) * FORM.page_stride + in_page + position % FORM.page_size * SCALE_BYTES
    return (pool + at).to(tl.pointer_type(tl.float32))


@triton.jit
def window_of_rows(
    at: tl.tensor,
    rows: int,
    end: tl.tensor,
    before: tl.tensor,
    FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """For rows at positions from `at` on: the first position that any of them sees, and the first
    tile boundary, before `end`, from which on all of them see everything. Positions are counted
    from `before` on.
    """
    if FORM.is_chunked:
        first = tl.maximum(first_of_chunk(at, before, FORM.window), 0)
        all_see = tl.maximum(first_of_chunk(at + rows - 1, before, FORM.window), 0)
    else:
        first = tl.maximum(at + 1 - FORM.window, 0)
        all_see = tl.maximum(at + rows - FORM.window, 0)
    return first, tl.minimum(tl.cdiv(all_see, FORM.tile) * FORM.tile, end)


@triton.jit
def seen_behind(
    key_ends: tl.tensor, token: tl.tensor, is_row: tl.tensor, at: tl.tensor, end: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The last position that each row sees, and the one after all of these, which is at least
    `end`. `token`: numbers of the rows in the step. Others than rows see up to `at`.
    """
    last_seen = tl.load(key_ends + token, mask=is_row, other=0) - 1
    last_seen = tl.where(is_row, last_seen, at)
    return last_seen, tl.maximum(end, tl.max(tl.where(is_row, last_seen + 1, 0), axis=0))


@triton.jit
def first_of_chunk(at: tl.tensor, before: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """First position of the chunk that holds positions `at`, all counted from `before` on."""
    return (at + before) // WINDOW * WINDOW - before
