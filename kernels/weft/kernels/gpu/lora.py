"""Low-rank additions on a GPU: all tokens' ranks first, then their products added in place.

Few tokens: each program takes one token and streams a part of its adapter; nothing is sorted. More
tokens: those of a segment are cut into chunks, and a program multiplies a chunk by a part of its
adapter, which is so read once a chunk (Punica, Chen et al. 2023, section 4). Grids are sized by
bounds, and programs that have nothing to do end at once: a captured graph serves any mix of
adapters. Sums are taken in a fixed order, so that results repeat.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.gpu.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.lora import LoraAddition, LoraSegments, LoraWeights

MAX_DIRECT_TOKENS = 8
"""Up to here hardly two tokens share an adapter."""
_RANKS = 16
"""Taken at once: the least that tensor cores multiply."""
_LEAST_SPLIT_K = 512
"""Elements of the input below which parts are too short to be worth their sum."""
_MAX_SPLITS = 8
_PROGRAMS = 512
"""Enough to keep the memory busy."""
_COLUMNS = 128
_DIRECT_COLUMNS = 256

Parts = tuple[LoraWeights, ...]


def add_lora(out: torch.Tensor, x: torch.Tensor, addition: LoraAddition) -> None:
    """`weft.kernels.lora.add_lora` for CUDA tensors."""
    tokens, depth = x.shape
    if not (out.is_contiguous() and x.is_contiguous()):
        raise ValueError("x and out must be contiguous")
    if tokens == 0:
        return
    if tokens <= MAX_DIRECT_TOKENS:
        _direct(out, x, addition, direct_splits(tokens, depth, addition.parts))
    else:
        chunk = chunk_of(tokens)
        chunks = max_chunks(tokens, addition.segments, chunk)
        splits = _splits(chunks * len(addition.parts), depth)
        _chunked(out, x, addition, chunk, chunks, splits)


def chunk_of(tokens: int) -> int:
    """Tokens of a segment that are multiplied together."""
    if tokens <= 256:
        return 16
    return 32 if tokens <= 1024 else 64


def max_chunks(tokens: int, segments: LoraSegments, chunk: int) -> int:
    """The most chunks that so many tokens can make."""
    most = min(tokens, segments.slots.shape[0])
    return most + (tokens - most) // chunk


def direct_splits(rows: int, depth: int, parts: Parts) -> int:
    """Parts of K that suit `direct_shrink`."""
    return _splits(rows * sum(_max_rows(part) for part in parts), depth)


def _splits(programs: int, depth: int) -> int:
    """Parts of K."""
    splits = 1
    while 2 * splits <= _MAX_SPLITS and depth // (2 * splits) >= _LEAST_SPLIT_K:
        if programs * splits >= _PROGRAMS:
            break
        splits *= 2
    return splits


def _max_rows(part: LoraWeights) -> int:
    return part.table.shape[2]


def _three(values: list[Any]) -> list[Any]:
    """Kernels take three parts; those that do not exist are never touched."""
    return (values + values[:1] * 2)[:3]


class TokenSlots(NamedTuple):
    """Whose parameters each row uses: a token's adapter's, or those of one of its experts."""

    token_slots: torch.Tensor
    """[T] int32."""
    ids: torch.Tensor
    """[T * k] int32: each pair's expert; not read where there are no experts."""
    experts: int = 0
    """E; 0 for none."""
    top_k: int = 1
    """Rows a token: pair p is one of token p // k."""


def _direct(out: torch.Tensor, x: torch.Tensor, addition: LoraAddition, splits: int) -> None:
    slots = TokenSlots(addition.segments.token_slots, addition.segments.token_slots)
    shrunk = direct_shrink(x, addition.parts, addition.layer, slots, splits)
    direct_expand(out, shrunk, addition.parts, addition.layer, slots)


def direct_shrink(
    x: torch.Tensor, parts: Parts, layer: int, slots: TokenSlots, splits: int, x_top_k: int = 1
) -> torch.Tensor:
    """The ranks of each row by itself, [splits, R, ranks of all parts].

    Args:
        x: [R / x_top_k, K]: row r is that of x_top_k neighbours.
        parts: Of the product.
        layer: Of the adapters.
        slots: Of R rows.
        splits: Parts of K.
        x_top_k: Rows that have one input.
    """
    depth, rows = x.shape[1], x.shape[0] * x_top_k
    shrunk = _ranks(rows, parts, splits, x.device)
    _direct_shrink_kernel[(rows, sum(_max_rows(part) for part in parts), splits)](
        shrunk, x, slots.token_slots, slots.ids, *_three([p.a for p in parts]),
        *_tables(parts, [p.table for p in parts]), layer, parts[0].table.shape[1], shrunk.shape[2],
        K=depth, EXPERTS=slots.experts, TOP_K=slots.top_k, X_TOP_K=x_top_k, SPLITS=splits,
        TILE=min(1024, triton.next_power_of_2(triton.cdiv(depth, splits))),
        num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return shrunk


def direct_expand(
    out: torch.Tensor, shrunk: torch.Tensor, parts: Parts, layer: int, slots: TokenSlots
) -> None:
    """Adds each row's ranks times B to `out` [R, N]; see `direct_shrink`."""
    blocks = sum(triton.cdiv(part.out_features, _DIRECT_COLUMNS) for part in parts)
    _direct_expand_kernel[(out.shape[0], blocks)](
        out, shrunk, slots.token_slots, slots.ids, *_three([p.b for p in parts]),
        *_tables(parts, [p.rows_of_b for p in parts]), layer, parts[0].table.shape[1],
        *_three([part.out_features for part in parts]), *_three([part.column for part in parts]),
        *shrunk.shape[1:], out.shape[1], EXPERTS=slots.experts, TOP_K=slots.top_k,
        SPLITS=shrunk.shape[0], COLUMNS=_DIRECT_COLUMNS, num_warps=4, **launch_options(out.device),
    )  # fmt: skip


def _chunked(
    out: torch.Tensor, x: torch.Tensor, addition: LoraAddition, chunk: int, chunks: int, splits: int
) -> None:
    (tokens, depth), parts, segments = x.shape, addition.parts, addition.segments
    shrunk = _ranks(tokens, parts, splits, x.device)
    where = (addition.layer, parts[0].table.shape[1])
    num_segments = segments.slots.shape[0]
    sorted_by = (segments.order, segments.starts, segments.slots, num_segments)
    options = {
        "SEGMENTS": triton.next_power_of_2(num_segments),
        "CHUNK": chunk,
        "RANKS": _RANKS,
        "SPLITS": splits,
        "IS_EXACT": x.dtype == torch.float32,
        "num_warps": 4,
        **launch_options(x.device),
    }
    blocks = sum(triton.cdiv(part.max_rank, _RANKS) for part in parts)
    _shrink_kernel[(chunks, blocks, splits)](
        shrunk, x, *sorted_by, *_three([p.a for p in parts]),
        *_tables(parts, [p.table for p in parts]), *where, *shrunk.shape[1:],
        K=depth, TILE=min(128, triton.next_power_of_2(depth)), num_stages=3, **options,
    )  # fmt: skip
    blocks = sum(triton.cdiv(part.out_features, _COLUMNS) for part in parts)
    _expand_kernel[(chunks, blocks)](
        out, shrunk, *sorted_by, *_three([p.b for p in parts]),
        *_tables(parts, [p.rows_of_b for p in parts]), *where,
        *_three([part.out_features for part in parts]), *_three([part.column for part in parts]),
        *shrunk.shape[1:], out.shape[1], COLUMNS=_COLUMNS, **options,
    )  # fmt: skip


def _tables(parts: Parts, tables: list[torch.Tensor]) -> tuple[Any, ...]:
    """Arguments that say where rows are."""
    counts, rows = [part.counts for part in parts], [_max_rows(part) for part in parts]
    return (*_three(tables), *_three(counts), *_three(rows))


def _ranks(rows: int, parts: Parts, splits: int, device: torch.device) -> torch.Tensor:
    """[splits, R, ranks of all parts] float32: each row's ranks, in as many sums."""
    width = sum(part.max_rank for part in parts)
    return torch.empty((splits, rows, width), dtype=torch.float32, device=device)


@triton.jit
def _pick(number: int, first: tl.tensor, second: tl.tensor, third: tl.tensor) -> tl.tensor:
    """Of three pointers or numbers."""
    return tl.where(number == 0, first, tl.where(number == 1, second, third))


@triton.jit
def _before(number: tl.tensor, first: int, second: int) -> tl.tensor:
    """What comes before a part, if the first two have so much."""
    return (number >= 1).to(tl.int32) * first + (number >= 2).to(tl.int32) * second


@triton.jit
def _part_of(block: tl.tensor, first: int, second: int) -> tl.tensor:
    """Which part a block belongs to, if the first two have so many."""
    return (block >= first).to(tl.int32) + (block >= first + second).to(tl.int32)


@triton.jit
def slot_of(
    row: int,
    token_slots: tl.tensor,
    ids: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
) -> tl.tensor:
    """Whose parameters a row uses; 0 for nobody's."""
    slot = tl.load(token_slots + row // TOP_K)
    if EXPERTS > 0:
        slot = tl.where(slot == 0, 0, slot * EXPERTS + tl.load(ids + row))
    return slot


@triton.jit
def expand_row(
    ranks: tl.tensor,
    b: tl.tensor,
    table: tl.tensor,
    count: int,
    column: tl.tensor,
    features: int,
    split_stride: int,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """[COLUMNS] float32: one row's ranks times columns of B, which is `count` rows of the pool."""
    rank = tl.arange(0, 8)
    total = tl.zeros([COLUMNS], tl.float32)
    for index in range(count):
        row = tl.load(table + index).to(tl.int64)
        at = b + (row * 8 + rank[:, None]) * features + column[None, :]
        tile = tl.load(at, mask=(column < features)[None, :], other=0.0)
        given = tl.zeros([8], tl.float32)
        for split in tl.static_range(SPLITS):
            given += tl.load(ranks + split * split_stride + index * 8 + rank)
        total += tl.sum(tile.to(tl.float32) * given[:, None], axis=0)
    return total


_FREE = [
    *("layer", "slots", "width", "tokens", "out_width", "num_segments"),
    *(f"{name}{n}" for name in ("max_rows", "out", "column") for n in range(3)),
]
"""Numbers that kernels are not compiled anew for."""


@triton.jit(do_not_specialize=_FREE)
def _direct_shrink_kernel(
    shrunk: tl.tensor,
    x: tl.tensor,
    token_slots: tl.tensor,
    ids: tl.tensor,
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    table0: tl.tensor,
    table1: tl.tensor,
    table2: tl.tensor,
    counts0: tl.tensor,
    counts1: tl.tensor,
    counts2: tl.tensor,
    max_rows0: int,
    max_rows1: int,
    max_rows2: int,
    layer: int,
    slots: int,
    width: int,
    IS_DEPENDENT: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    X_TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The ranks of one of a slot's rows for one row of x, over a part of K."""
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    token, place, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = slot_of(token, token_slots, ids, EXPERTS, TOP_K)
    if slot == 0:
        return
    part = _part_of(place, max_rows0, max_rows1)
    index = place - _before(part, max_rows0, max_rows1)
    at = layer * slots + slot
    if index >= tl.load(_pick(part, counts0, counts1, counts2) + at):
        return
    max_rows = _pick(part, max_rows0, max_rows1, max_rows2)
    row = tl.load(_pick(part, table0, table1, table2) + at * max_rows + index).to(tl.int64)
    PART: tl.constexpr = ((K + SPLITS * TILE - 1) // (SPLITS * TILE)) * TILE
    rank = tl.arange(0, 8)
    step = tl.arange(0, TILE)
    begin = _pick(part, a0, a1, a2) + (row * 8 + rank[:, None]) * K
    given_at = x + (token // X_TOP_K).to(tl.int64) * K
    total = tl.zeros([8, TILE], tl.float32)
    for start in range(split * PART, (split + 1) * PART, TILE):
        inside = start + step < K
        given = tl.load(given_at + start + step, mask=inside, other=0.0)
        tile = tl.load(begin + (start + step)[None, :], mask=inside[None, :], other=0.0)
        total += tile.to(tl.float32) * given.to(tl.float32)[None, :]
    to = shrunk + (split * tl.num_programs(0) + token) * width + place * 8
    tl.store(to + rank, tl.sum(total, axis=1))


@triton.jit(do_not_specialize=_FREE)
def _direct_expand_kernel(
    out: tl.tensor,
    shrunk: tl.tensor,
    token_slots: tl.tensor,
    ids: tl.tensor,
    b0: tl.tensor,
    b1: tl.tensor,
    b2: tl.tensor,
    table0: tl.tensor,
    table1: tl.tensor,
    table2: tl.tensor,
    counts0: tl.tensor,
    counts1: tl.tensor,
    counts2: tl.tensor,
    max_rows0: int,
    max_rows1: int,
    max_rows2: int,
    layer: int,
    slots: int,
    out0: int,
    out1: int,
    out2: int,
    column0: int,
    column1: int,
    column2: int,
    tokens: int,
    width: int,
    out_width: int,
    IS_DEPENDENT: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """A row's ranks times some columns of one part."""
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    token, block = tl.program_id(0), tl.program_id(1)
    slot = slot_of(token, token_slots, ids, EXPERTS, TOP_K)
    if slot == 0:
        return
    blocks0, blocks1 = tl.cdiv(out0, COLUMNS), tl.cdiv(out1, COLUMNS)
    part = _part_of(block, blocks0, blocks1)
    at = layer * slots + slot
    count = tl.load(_pick(part, counts0, counts1, counts2) + at)
    if count == 0:
        return
    block -= _before(part, blocks0, blocks1)
    table = _pick(part, table0, table1, table2)
    table += at * _pick(part, max_rows0, max_rows1, max_rows2)
    features = _pick(part, out0, out1, out2)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < features
    ranks = shrunk + token * width + 8 * _before(part, max_rows0, max_rows1)
    total = expand_row(
        ranks,
        _pick(part, b0, b1, b2),
        table,
        count,
        column,
        features,
        tokens * width,
        SPLITS,
        COLUMNS,
    )
    to = out + token.to(tl.int64) * out_width + _pick(part, column0, column1, column2) + column
    total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _chunk_at(
    number: int,
    starts: tl.tensor,
    slots: tl.tensor,
    num_segments: int,
    SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The slot, the first place in the order and the end of the segment of a chunk; slot 0 where
    there is no such chunk. Chunks are those of all segments but slot 0's, one after another."""
    segment = tl.arange(0, SEGMENTS)
    is_one = segment < num_segments
    begin = tl.load(starts + segment, mask=is_one, other=0)
    end = tl.load(starts + segment + 1, mask=is_one, other=0)
    slot = tl.load(slots + segment, mask=is_one, other=0)
    count = tl.where(slot == 0, 0, (end - begin + CHUNK - 1) // CHUNK)
    before = tl.cumsum(count, 0) - count
    is_mine = (number >= before) & (number < before + count)
    first = tl.sum(tl.where(is_mine, begin + (number - before) * CHUNK, 0))
    return tl.sum(tl.where(is_mine, slot, 0)), first, tl.sum(tl.where(is_mine, end, 0))


@triton.jit(do_not_specialize=_FREE)
def _shrink_kernel(
    shrunk: tl.tensor,
    x: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    segment_slots: tl.tensor,
    num_segments: int,
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    table0: tl.tensor,
    table1: tl.tensor,
    table2: tl.tensor,
    counts0: tl.tensor,
    counts1: tl.tensor,
    counts2: tl.tensor,
    max_rows0: int,
    max_rows1: int,
    max_rows2: int,
    layer: int,
    slots: int,
    tokens: int,
    width: int,
    IS_DEPENDENT: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """Some ranks of a chunk's tokens, over a part of K."""
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    number, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, first, end = _chunk_at(number, starts, segment_slots, num_segments, SEGMENTS, CHUNK)
    if slot == 0:
        return
    blocks0, blocks1 = tl.cdiv(max_rows0 * 8, RANKS), tl.cdiv(max_rows1 * 8, RANKS)
    part = _part_of(block, blocks0, blocks1)
    first_rank = (block - _before(part, blocks0, blocks1)) * RANKS
    at = layer * slots + slot
    num_ranks = 8 * tl.load(_pick(part, counts0, counts1, counts2) + at)
    if first_rank >= num_ranks:
        return
    table = _pick(part, table0, table1, table2)
    table += at * _pick(part, max_rows0, max_rows1, max_rows2)
    rank = first_rank + tl.arange(0, RANKS)
    is_rank = rank < num_ranks
    row = tl.load(table + rank // 8, mask=is_rank, other=0).to(tl.int64)
    place = first + tl.arange(0, CHUNK)
    is_token = place < end
    token = tl.load(order + place, mask=is_token, other=0).to(tl.int64)
    PART: tl.constexpr = ((K + SPLITS * TILE - 1) // (SPLITS * TILE)) * TILE
    step = tl.arange(0, TILE)
    a = _pick(part, a0, a1, a2) + (row * 8 + rank % 8)[:, None] * K
    given = x + token[:, None] * K
    total = tl.zeros([CHUNK, RANKS], tl.float32)
    for start in range(split * PART, (split + 1) * PART, TILE):
        inside = (start + step < K)[None, :]
        values = tl.load(
            given + (start + step)[None, :], mask=is_token[:, None] & inside, other=0.0
        )
        tile = tl.load(a + (start + step)[None, :], mask=is_rank[:, None] & inside, other=0.0)
        total = _dot(values, tl.trans(tile), total, IS_EXACT)
    to = shrunk + (split * tokens + token)[:, None] * width
    to += 8 * _before(part, max_rows0, max_rows1) + rank[None, :]
    tl.store(to, total, mask=is_token[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=_FREE)
def _expand_kernel(
    out: tl.tensor,
    shrunk: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    segment_slots: tl.tensor,
    num_segments: int,
    b0: tl.tensor,
    b1: tl.tensor,
    b2: tl.tensor,
    table0: tl.tensor,
    table1: tl.tensor,
    table2: tl.tensor,
    counts0: tl.tensor,
    counts1: tl.tensor,
    counts2: tl.tensor,
    max_rows0: int,
    max_rows1: int,
    max_rows2: int,
    layer: int,
    slots: int,
    out0: int,
    out1: int,
    out2: int,
    column0: int,
    column1: int,
    column2: int,
    tokens: int,
    width: int,
    out_width: int,
    IS_DEPENDENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """The ranks of a chunk's tokens times some columns of one part."""
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    number, block = tl.program_id(0), tl.program_id(1)
    slot, first, end = _chunk_at(number, starts, segment_slots, num_segments, SEGMENTS, CHUNK)
    if slot == 0:
        return
    blocks0, blocks1 = tl.cdiv(out0, COLUMNS), tl.cdiv(out1, COLUMNS)
    part = _part_of(block, blocks0, blocks1)
    at = layer * slots + slot
    num_ranks = 8 * tl.load(_pick(part, counts0, counts1, counts2) + at)
    if num_ranks == 0:
        return
    block -= _before(part, blocks0, blocks1)
    table = _pick(part, table0, table1, table2)
    table += at * _pick(part, max_rows0, max_rows1, max_rows2)
    features = _pick(part, out0, out1, out2)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < features
    place = first + tl.arange(0, CHUNK)
    is_token = place < end
    token = tl.load(order + place, mask=is_token, other=0).to(tl.int64)
    ranks = shrunk + token[:, None] * width
    ranks += 8 * _before(part, max_rows0, max_rows1)
    b = _pick(part, b0, b1, b2) + column[None, :]
    total = tl.zeros([CHUNK, COLUMNS], tl.float32)
    for first_rank in range(0, num_ranks, RANKS):
        rank = first_rank + tl.arange(0, RANKS)
        is_rank = rank < num_ranks
        row = tl.load(table + rank // 8, mask=is_rank, other=0).to(tl.int64)
        tile = tl.load(
            b + (row * 8 + rank % 8)[:, None] * features,
            mask=is_rank[:, None] & inside[None, :],
            other=0.0,
        )
        mask = is_token[:, None] & is_rank[None, :]
        given = tl.zeros([CHUNK, RANKS], tl.float32)
        for split in tl.static_range(SPLITS):
            given += tl.load(ranks + split * tokens * width + rank[None, :], mask=mask, other=0.0)
        total = _dot(given.to(tile.dtype), tile, total, IS_EXACT)
    to = out + token[:, None] * out_width + _pick(part, column0, column1, column2) + column[None, :]
    mask = is_token[:, None] & inside[None, :]
    total += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _dot(values: tl.tensor, tile: tl.tensor, total: tl.tensor, IS_EXACT: tl.constexpr) -> tl.tensor:
    if IS_EXACT:
        total = tl.dot(values, tile, total, input_precision="ieee")
    else:
        total = tl.dot(values, tile, total)
    return total
