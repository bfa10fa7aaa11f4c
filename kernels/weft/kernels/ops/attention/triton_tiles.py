"""Walks of attention over tiles of positions, in pages or in matrices, on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.attention.spec import AttentionSpec
from weft.kernels.ops.pages.triton_entries import (
    SCALE_BYTES,
    dequantised,
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
def attend_pages(
    largest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    unit: tl.tensor,
    query: tl.tensor,
    unit_of_query: tl.tensor,
    pool: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    first: tl.tensor,
    last_seen: tl.tensor,
    at: tl.tensor,
    kv_head: tl.tensor,
    layer: int,
    scale: float,
    IS_PARTIAL: tl.constexpr,
    IN_UNITS: tl.constexpr,
    FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Adds a tile of positions in pages, from `start` on, to a running softmax, as `attend_tile`
    does.

    Numbers in 8 bits are multiplied by their scales; with IN_UNITS instead the scores and weights
    are, and `mixed` is in the `unit` of `weights_in_units`.
    """
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
    if IS_SCALED and IN_UNITS:
        largest, total, mixed, unit = _attend_in_units(
            largest, total, mixed, unit, query, unit_of_query, k_at, scale_at, position, end,
            last_seen, at, scale, first, OF_ROWS, IS_PARTIAL, FORM,
        )  # fmt: skip
    else:
        largest, total, mixed = attend_tile(
            largest, total, mixed, query, k_at, k_at + OF_ROWS, position, end, last_seen, at, scale,
            IS_PARTIAL, FORM, first, 0, scale_at, OF_ROWS // SCALE_BYTES if IS_SCALED else 0,
        )  # fmt: skip
    return largest, total, mixed, unit


@triton.jit
def attend_tile(
    largest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    query: tl.tensor,
    k_at: tl.tensor,
    v_at: tl.tensor,
    position: tl.tensor,
    end: tl.tensor,
    last_seen: tl.tensor,
    at: tl.tensor,
    scale: float,
    IS_PARTIAL: tl.constexpr,
    FORM: tl.constexpr,
    first: int = 0,
    before: int = 0,
    scale_at: tl.tensor = None,
    TO_V: tl.constexpr = 0,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds a tile of positions to a running softmax. With IS_PARTIAL each row adds what it sees of
    the tile.

    In 8 bits `scale_at` points to the scales of K, and those of V are TO_V further. `at`: positions
    of the rows, from which windows count.
    """
    in_dim = (tl.arange(0, FORM.block_dim) < FORM.dim)[None, :]
    if IS_PARTIAL:
        is_there = in_reach(position, end, first, FORM)
        keys = tl.load(k_at, mask=in_dim & is_there[:, None], other=0)
        values = tl.load(v_at, mask=in_dim & is_there[:, None], other=0)
    elif FORM.dim == FORM.block_dim:
        keys = tl.load(k_at)
        values = tl.load(v_at)
    else:
        keys = tl.load(k_at, mask=in_dim, other=0)
        values = tl.load(v_at, mask=in_dim, other=0)
    if TO_V > 0:
        exists = is_there if IS_PARTIAL else None
        keys = dequantised(keys, scale_at, exists, query.dtype)
        values = dequantised(values, scale_at + TO_V, exists, query.dtype)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    scores = capped(scores, FORM.softcap)
    if IS_PARTIAL:
        scores = _seen_alone(scores, position, is_there, last_seen, at, before, FORM)
    return mix_tile(  # type: ignore[no-any-return]
        largest, total, mixed, scores, values, scale, FORM.is_fused, IS_PARTIAL and FORM.window > 0
    )


@triton.jit
def _attend_in_units(
    largest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    unit: tl.tensor,
    query: tl.tensor,
    unit_of_query: tl.tensor,
    k_at: tl.tensor,
    scale_at: tl.tensor,
    position: tl.tensor,
    end: tl.tensor,
    last_seen: tl.tensor,
    at: tl.tensor,
    scale: float,
    first: int,
    OF_ROWS: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    is_there = in_reach(position, end, first, FORM)
    mask = (tl.arange(0, FORM.block_dim) < FORM.dim)[None, :]
    if IS_PARTIAL:
        mask &= is_there[:, None]
        k_scales = tl.load(scale_at, mask=is_there, other=0.0)
        v_scales = tl.load(scale_at + OF_ROWS // SCALE_BYTES, mask=is_there, other=0.0)
    else:
        k_scales = tl.load(scale_at)
        v_scales = tl.load(scale_at + OF_ROWS // SCALE_BYTES)
    if IS_PARTIAL or FORM.dim < FORM.block_dim:
        keys = tl.load(k_at, mask=mask, other=0)
        values = tl.load(k_at + OF_ROWS, mask=mask, other=0)
    else:
        keys = tl.load(k_at)
        values = tl.load(k_at + OF_ROWS)
    keys = widened(keys, query.dtype)
    values = widened(values, query.dtype, True)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    scores = capped(scores * (k_scales * unit_of_query)[None, :], FORM.softcap)
    if IS_PARTIAL:
        scores = _seen_alone(scores, position, is_there, last_seen, at, 0, FORM)
    largest, total, shrink, weights = weigh_tile(
        largest, total, scores, scale, FORM.is_fused, IS_PARTIAL and FORM.window > 0
    )
    weights, shrink, unit = weights_in_units(weights, v_scales, shrink, unit)
    mixed = mixed * shrink[:, None]
    mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return largest, total, mixed, unit


@triton.jit
def mix_tile(
    largest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    scores: tl.tensor,
    values: tl.tensor,
    scale: float,
    IS_FUSED: tl.constexpr,
    MAY_SEE_NONE: tl.constexpr = False,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds values, weighed by their scores, to a running softmax."""
    largest, total, shrink, weights = weigh_tile(
        largest, total, scores, scale, IS_FUSED, MAY_SEE_NONE
    )
    mixed = mixed * shrink[:, None]
    mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return largest, total, mixed


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
