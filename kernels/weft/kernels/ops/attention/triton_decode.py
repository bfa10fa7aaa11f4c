"""Attention of requests that bring one row, or a few, over paged K and V on a GPU.

A program holds all query heads of one KV head, for all rows of a request or for a block of its
rows, so that it reads K and V once. It walks one split of the request's context. Splits are merged
in order, so that a request's result depends only on its length and on the number of splits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.attention.spec import MAX_TREE_ROWS, AttentionMetadata, AttentionSpec
from weft.kernels.ops.attention.triton_tiles import (
    AttentionForm,
    in_reach,
    k_of_pages,
    scales_at,
)
from weft.kernels.ops.pages.scaled_kv import is_scaled
from weft.kernels.ops.pages.triton_entries import (
    LEAST_UNIT,
    SCALE_BYTES,
    query_in_units,
    weights_in_units,
    widened,
)
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2
from weft.kernels.shared.multiprocessors import num_multiprocessors
from weft.kernels.shared.softmax import capped, log_of_sum, weigh_tile, with_sink


class DecodeLaunchConfig(NamedTuple):
    """How a program iterates over its split of the context."""

    tile: int
    """Positions per iteration."""
    warps: int


MAX_FEW_ROWS = MAX_TREE_ROWS
"""Most rows of a request; with more, `extend_attention` has enough work for each head."""
_SMALL_ROWS = 8
"""Most rows of a request that one program holds together; as many programs then run as for one row.
"""
_BLOCK_MEMBERS = 128
"""Most rows of a program times query heads of a KV head, for requests of more rows."""
MAX_SPLITS = 64
_PROGRAMS_PER_SM = 4
"""Programs per multiprocessor to aim for: their loads keep the memory busy."""
_PAIRS_PER_SM = 1.9
"""Pairs of request and head per multiprocessor from which on splitting costs more than it gains. On
an H100 (132 multiprocessors), 64 requests of four KV heads take 52 us in one part and 60 us in two
at 1,000 tokens.
"""


def decode_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    spec: AttentionSpec,
    step: AttentionMetadata,
    *,
    is_uniform: bool,
    max_rows: int = 1,
    earlier_rows: int = 0,
    lse: torch.Tensor | None = None,
) -> None:
    """Writes the rows of `out` whose requests bring one row, or at most `max_rows`, and no others.

    Args:
        out: [T, Hq * D], dtype of `q`; a request without context gets zeros.
        q: [T, Hq, D].
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page, or in 8 bits.
        spec: A first position excludes a window.
        step: `key_ends` are not read.
        is_uniform: Whether every request brings one row; `cu_q_lens` is not read then.
        max_rows: Most rows of a request, up to MAX_FEW_ROWS; a power of two.
        earlier_rows: Earlier rows of each tree; 0 with a window.
        lse: [T, Hq] float32: receives the logarithm of each softmax's sum, sinks not counted, and a
            very negative number for a request without context; or None.

    Raises:
        ValueError: A first position or `earlier_rows` with a window.
    """
    page_table, _, cu_q_lens, kv_lens, _, max_kv_len, ancestors, *_ = step
    window, is_settled = spec.window, step.is_settled
    if (spec.first_position or earlier_rows) and window is not None:
        raise ValueError("a first position or earlier rows are not taken beside a window")
    requests = page_table.shape[0]
    tokens, heads, dim = q.shape
    kv_heads = pool.shape[1]
    group = heads // kv_heads
    is_float32 = q.dtype == torch.float32
    tile, warps = launch_config(q.dtype, dim, max_rows)
    block_rows = rows_of_program(q.dtype, group, max_rows)
    # Tensor cores take at least 16 rows.
    block_group = max(1 if is_float32 else 16, next_power_of_2(block_rows * group))
    blocks = requests * (max_rows // block_rows)
    share = 1
    if max_rows > _SMALL_ROWS:
        warps = 8 if block_group > 64 else warps
        if ancestors is not None:
            # A program of many rows fills a multiprocessor, and its part takes long to merge. For
            # chains only a bound on rows is known: most requests may bring one row.
            share = max(1, block_group // 32)
    # A window may begin anywhere in a tile.
    walked = max_kv_len if window is None else min(max_kv_len, window + max_rows + tile)
    splits = num_splits(share * blocks * kv_heads, cdiv(walked, tile), q.device)
    programs = share * blocks * kv_heads * splits
    if block_group == 16 and dim <= 128 and (splits == 1 or is_scaled(pool)):
        # Many programs hide each other's waits, and each additional warp would widen the same keys
        # for its part of the product. Fewer warps cost less of both.
        warps = min(warps, 2)
    if splits == 1:
        partial, sums = out, out
    else:
        # The number of tokens does not decide: prompts in the same step bring many tokens, which
        # need no parts.
        parts = (requests * max_rows, heads, splits)
        partial = torch.empty((*parts, dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((*parts, 2), dtype=torch.float32, device=q.device)
    # Programs that fill the device wait for other loads meanwhile; programs of many rows have no
    # registers to spare.
    is_early = is_settled and splits > 1 and block_group <= 32 and not is_scaled(pool)
    # A first tile that is loaded early takes a few more registers than four programs have.
    is_capped = is_early and warps == 4 and block_group == 16 and dim <= 128
    form, in_powers = AttentionForm.of(q, pool, spec, tile), spec.scale * math.log2(math.e)
    _decode_kernel[(kv_heads, blocks, splits)](
        partial,
        sums,
        q,
        pool,
        page_table,
        cu_q_lens,
        kv_lens,
        ancestors,
        spec.sinks,
        None if splits > 1 else lse,
        in_powers,
        layer,
        page_table.stride(0),
        splits,
        earlier_rows,
        FORM=form,
        IS_SETTLED=is_settled,
        IS_EARLY=is_early,
        IS_UNIFORM=is_uniform,
        IS_SPLIT=splits > 1,
        IS_SUMMED=is_float32 and ancestors is None,
        IS_ALIKE=spec.first_position == 0
        and window is None
        and (max_rows > _SMALL_ROWS or ancestors is not None),
        ROWS=max_rows,
        BLOCK_ROWS=block_rows,
        BLOCK_GROUP=block_group,
        num_warps=warps,
        num_stages=num_stages(programs, splits, q, is_scaled(pool)),
        **({"maxnreg": 128} if is_capped else {}),
        **launch_options(q.device),
    )
    if splits > 1:
        # Launch a program per actual row or per possible row, whichever is fewer.
        is_by_token = max_rows > _SMALL_ROWS and tokens < requests * max_rows
        _merge_kernel[(tokens if is_by_token else requests * max_rows, heads)](
            out,
            partial,
            sums,
            cu_q_lens,
            kv_lens,
            spec.sinks,
            lse,
            in_powers,
            splits,
            heads,
            requests,
            FORM=form,
            IS_SETTLED=is_settled,
            IS_UNIFORM=is_uniform,
            IS_BY_TOKEN=is_by_token,
            ROWS=max_rows,
            BLOCK_SPLITS=next_power_of_2(splits),
            num_warps=4,
            **launch_options(q.device),
        )


def rows_of_program(dtype: torch.dtype, group: int, max_rows: int) -> int:
    """Rows of a request that a program holds: a power of two that divides `max_rows`, also a power
    of two. `group` is the number of query heads of a KV head.
    """
    most = 32 if dtype == torch.float32 else _BLOCK_MEMBERS
    if max_rows <= _SMALL_ROWS and (dtype != torch.float32 or max_rows * group <= _BLOCK_MEMBERS):
        return max_rows
    rows = max_rows
    while rows > 1 and rows * group > most:
        rows //= 2
    return rows


def num_splits(programs: int, tiles: int, device: torch.device) -> int:
    """Number of parts into which each context is split.

    Args:
        programs: Programs of a launch without splits, weighted: blocks of rows * KV heads, times a
            share that grows with the rows of a block.
        tiles: Tiles of the longest context.
    """
    multiprocessors = num_multiprocessors(device)
    if programs >= _PAIRS_PER_SM * multiprocessors:
        return 1
    wanted = _PROGRAMS_PER_SM * multiprocessors
    return max(1, min(wanted // programs, tiles, MAX_SPLITS))


def launch_config(dtype: torch.dtype, dim: int, max_rows: int) -> DecodeLaunchConfig:
    """The launch for heads of `dim` elements of `dtype` and at most `max_rows` rows a request."""
    if dtype == torch.float32:
        return DecodeLaunchConfig(tile=16, warps=8)
    # A tile of one short row is multiplied quickly, and fewer warps wait less for each other.
    is_short = dim <= 64 and max_rows == 1
    return DecodeLaunchConfig(tile=32 if dim > 128 else 64, warps=2 if is_short else 4)


def num_stages(programs: int, splits: int, q: torch.Tensor, is_scaled: bool) -> int:
    """Number of tiles that a program loads ahead; their memory limits how many programs run at
    once.
    """
    if q.dtype == torch.float32:
        return 1
    if is_scaled and splits == 1 and q.shape[2] <= 128:
        return 5
    is_crowded = splits > 1 and programs >= _PAIRS_PER_SM * num_multiprocessors(q.device)
    return 2 if is_crowded or q.shape[2] > 128 else 3


@triton.jit
def _context(kv_len: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    if FORM.first_position > 0:
        kv_len = tl.where(kv_len > FORM.first_position, kv_len, 0)
    return kv_len


@triton.jit
def _first_seen(kv_len: tl.tensor, q_len: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    if FORM.is_chunked:
        first = tl.maximum(kv_len - q_len, 0) // FORM.window * FORM.window
    else:
        first = tl.maximum(kv_len - q_len + 1 - FORM.window, 0)
    return first


@triton.jit
def _depth(words: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Number of set bits in each word below the row's own bit, at most 31."""
    # Rows that are not there have no bit.
    bits = words & ((1 << (row & 31)) - 1)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    bits += bits >> 8
    return (bits + (bits >> 16)) & 0x3F


@triton.jit(do_not_specialize=["layer", "splits", "earlier_rows"])
def _decode_kernel(
    partial: tl.tensor,
    sums: tl.tensor,
    q: tl.tensor,
    pool: tl.tensor,
    page_table: tl.tensor,
    cu_q_lens: tl.tensor,
    kv_lens: tl.tensor,
    ancestors: tl.tensor,
    sinks: tl.tensor,
    lse: tl.tensor,
    scale: float,
    layer: int,
    table_stride: int,
    splits: int,
    earlier_rows: int,
    FORM: tl.constexpr,
    IS_SETTLED: tl.constexpr,
    IS_EARLY: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_SUMMED: tl.constexpr,
    IS_ALIKE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = FORM.group
    DIM: tl.constexpr = FORM.dim
    BLOCK_DIM: tl.constexpr = FORM.block_dim
    PAGE_SIZE: tl.constexpr = FORM.page_size
    TILE: tl.constexpr = FORM.tile
    release_next()
    if not IS_SETTLED:
        wait_for_last()
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    split = tl.program_id(2)
    block = 0
    if ROWS > BLOCK_ROWS:
        block = request % (ROWS // BLOCK_ROWS) * BLOCK_ROWS
        request = request // (ROWS // BLOCK_ROWS)
    first_row = request
    q_len = 1
    if not IS_UNIFORM:
        first_row = tl.load(cu_q_lens + request)
        q_len = tl.load(cu_q_lens + request + 1) - first_row
    kv_len = _context(tl.load(kv_lens + request), FORM)
    if FORM.window > 0:
        first_seen = _first_seen(kv_len, q_len, FORM)
        walk = first_seen // TILE * TILE
    else:
        first_seen = 0
        walk = 0
    length = tl.cdiv(tl.cdiv(kv_len - walk, TILE), splits) * TILE
    begin = walk + split * length
    end = tl.minimum(begin + length, kv_len)

    table = page_table + request.to(tl.int64) * table_stride
    column = tl.arange(0, BLOCK_DIM)
    in_dim = column < DIM
    IS_SCALED: tl.constexpr = pool.dtype.element_ty.is_int()
    MORE: tl.constexpr = SCALE_BYTES if IS_SCALED else 0
    first = begin + tl.arange(0, TILE)
    if IS_EARLY:
        # The part of the first tile that earlier steps have written is loaded while the preceding
        # kernel ends.
        there = tl.where((q_len > block) & (q_len <= ROWS), end, begin)
        page = tl.load(table + first // PAGE_SIZE, mask=first < there, other=0)
        is_old = in_reach(first, there, first_seen, FORM)
        is_old = (is_old & (first < kv_len - q_len))[:, None] & in_dim[None, :]
        k_at = k_of_pages(pool, page, first, kv_head, layer, column, FORM)
        first_keys = tl.load(k_at, mask=is_old, other=0.0)
        first_values = tl.load(k_at + PAGE_SIZE * DIM, mask=is_old, other=0.0)
    if IS_SETTLED:
        wait_for_last()
    if (q_len <= block) | (q_len > ROWS):
        return
    if IS_SPLIT & (begin >= end):
        return

    # For each row of the request, the heads of this KV head.
    member = tl.arange(0, BLOCK_GROUP)
    in_request = block + member // GROUP
    num_rows = q_len
    if ROWS > BLOCK_ROWS:
        num_rows = tl.minimum(q_len - block, BLOCK_ROWS)
    is_there = member < num_rows * GROUP
    head = kv_head * GROUP + member % GROUP
    row = first_row.to(tl.int64) + in_request
    mask = is_there[:, None] & in_dim[None, :]
    heads = FORM.kv_heads * GROUP
    q_at = (row * heads + head)[:, None] * DIM + column[None, :]
    query = tl.load(q + q_at, mask=mask, other=0.0)
    if IS_SCALED:
        query, unit_of_query = query_in_units(query)
        unit = LEAST_UNIT

    largest = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    mixed = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    last_seen = kv_len - q_len + in_request
    at, words, root = last_seen, None, kv_len - q_len
    if ancestors is not None:
        root -= earlier_rows
        words = tl.load(ancestors + row, mask=is_there, other=-1).to(tl.int32)
        if FORM.window > 0:
            at = root + _depth(words, last_seen - root)
    rows = query, last_seen, at, words, root, scale
    if IS_EARLY:
        # The condition always holds: with a branch the compiler needs fewer registers.
        if begin < end:
            is_seen = in_reach(first, end, first_seen, FORM)
            is_new = (is_seen & (first >= kv_len - q_len))[:, None] & in_dim[None, :]
            keys = tl.load(k_at, mask=is_new, other=first_keys)
            values = tl.load(k_at + PAGE_SIZE * DIM, mask=is_new, other=first_values)
            largest, total, shrink, weights = _weigh_keys(
                largest, total, rows, keys, None, begin, first, is_seen, IS_SUMMED, IS_ALIKE, ROWS,
                FORM,
            )  # fmt: skip
            mixed = mixed * shrink[:, None]
            mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        begin += TILE
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        is_seen = in_reach(position, end, first_seen, FORM)
        page = tl.load(table + position // PAGE_SIZE, mask=is_seen, other=0)
        k_at = k_of_pages(pool, page, position, kv_head, layer, column, FORM)
        kv_mask = is_seen[:, None] & in_dim[None, :]
        keys = tl.load(k_at, mask=kv_mask, other=0)
        values = tl.load(k_at + PAGE_SIZE * (DIM + MORE), mask=kv_mask, other=0)
        k_scales = None
        if IS_SCALED:
            scale_at = scales_at(pool, page, position, kv_head, layer, FORM)
            k_scales = tl.load(scale_at, mask=is_seen, other=0.0) * unit_of_query
            to_v: tl.constexpr = PAGE_SIZE * (DIM + MORE) // MORE
            v_scales = tl.load(scale_at + to_v, mask=is_seen, other=0.0)
            keys = widened(keys, query.dtype)
            values = widened(values, query.dtype, True)
        largest, total, shrink, weights = _weigh_keys(
            largest, total, rows, keys, k_scales, start, position, is_seen, IS_SUMMED, IS_ALIKE,
            ROWS, FORM,
        )  # fmt: skip
        if IS_SCALED:
            weights, shrink, unit = weights_in_units(weights, v_scales, shrink, unit)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    if IS_SCALED:
        mixed = mixed * unit

    if IS_SPLIT:
        place = request.to(tl.int64)
        if ROWS > 1:
            place = place * ROWS + in_request
        index = (place * heads + head) * splits + split
        tl.store(partial + index[:, None] * DIM + column[None, :], mixed, mask=mask)
        tl.store(sums + 2 * index, largest, mask=is_there)
        tl.store(sums + 2 * index + 1, total, mask=is_there)
    else:
        if lse is not None:
            tl.store(lse + row * heads + head, log_of_sum(total, largest, scale), mask=is_there)
        if sinks is not None:
            total = with_sink(total, largest, sinks, tl.where(is_there, head, 0), scale)
        # No context at all: zeros.
        mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
        if (ROWS > 1) & (FORM.first_position > 0):
            mixed = tl.where((last_seen >= FORM.first_position)[:, None], mixed, 0.0)
        tl.store(partial + q_at, mixed.to(partial.dtype.element_ty), mask=mask)


@triton.jit
def _weigh_keys(
    largest: tl.tensor,
    total: tl.tensor,
    rows: tl.tuple,
    keys: tl.tensor,
    k_scales: tl.tensor,
    start: tl.tensor,
    position: tl.tensor,
    is_seen: tl.tensor,
    IS_SUMMED: tl.constexpr,
    IS_ALIKE: tl.constexpr,
    ROWS: tl.constexpr,
    FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Each member's largest score and sum of weights with one more tile, the factor on its earlier
    sums, and the tile's weights.

    Args:
        rows: The members' queries, the last position that each sees, the positions from which
            their windows count, their words of seen rows (None: a row sees all before it), the
            position of the first row that words name, and the factor on scores.
        k_scales: Of keys in 8 bits, or None.
    """
    query, _, _, _, root, scale = rows
    if IS_SUMMED:
        # Summed as a tree: a product's chain over the head would lose too much of float32.
        scores = tl.sum(query[:, None, :] * keys[None, :, :], axis=2)
    else:
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if k_scales is not None:
        scores = scores * k_scales[None, :]
    scores = capped(scores, FORM.softcap)
    if ROWS == 1:
        # As in _hide.
        hidden = float("-inf") if FORM.first_position == 0 else -1e30
        scores = tl.where(is_seen[None, :], scores, hidden)
    elif IS_ALIKE:
        # Tiles before all of the rows are seen by each of them.
        if start + FORM.tile > root:
            scores = _hide(scores, rows, position, is_seen, FORM)
    else:
        scores = _hide(scores, rows, position, is_seen, FORM)
    return weigh_tile(largest, total, scores, scale, False, False)  # type: ignore[no-any-return]


@triton.jit
def _hide(
    scores: tl.tensor,
    rows: tl.tuple,
    position: tl.tensor,
    is_seen: tl.tensor,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Hides positions of a tile that a row does not see: with words also the rows from `root` on
    that its word does not name. `rows` are as in `_weigh_keys`.
    """
    _, last_seen, at, words, root, _ = rows
    is_hidden = (position[None, :] > last_seen[:, None]) | (is_seen[None, :] == 0)
    if FORM.is_chunked:
        is_hidden |= position[None, :] < (at // FORM.window * FORM.window)[:, None]
    elif FORM.window > 0:
        is_hidden |= position[None, :] <= at[:, None] - FORM.window
    if words is not None:
        of_tree = position - root
        is_named = (words[:, None] >> (of_tree & 31)[None, :]) & 1
        is_hidden |= (of_tree >= 0)[None, :] & (is_named == 0)
    # Finite where a whole tile may be hidden: its weight vanishes next to any other tile's.
    return tl.where(is_hidden, -1e30, scores)


@triton.jit
def request_of(row: tl.tensor, cu_q_lens: tl.tensor, requests: int) -> tl.tensor:
    """The request that a row belongs to: the last one that does not begin after it."""
    low = 0
    high = requests
    while high - low > 1:
        middle = (low + high) // 2
        is_behind = tl.load(cu_q_lens + middle) > row
        low = tl.where(is_behind, low, middle)
        high = tl.where(is_behind, middle, high)
    return low


@triton.jit(do_not_specialize=["splits", "requests"])
def _merge_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    cu_q_lens: tl.tensor,
    kv_lens: tl.tensor,
    sinks: tl.tensor,
    lse: tl.tensor,
    scale: float,
    splits: int,
    heads: int,
    requests: int,
    FORM: tl.constexpr,
    IS_SETTLED: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    IS_BY_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
) -> None:
    DIM: tl.constexpr = FORM.dim
    TILE: tl.constexpr = FORM.tile
    release_next()
    if not IS_SETTLED:
        wait_for_last()
    if IS_BY_TOKEN:
        request = request_of(tl.program_id(0), cu_q_lens, requests)
        member = tl.program_id(0) - tl.load(cu_q_lens + request)
    else:
        request = tl.program_id(0) // ROWS
        member = tl.program_id(0) % ROWS
    head = tl.program_id(1)
    row = request
    q_len = 1
    if not IS_UNIFORM:
        row = tl.load(cu_q_lens + request)
        q_len = tl.load(cu_q_lens + request + 1) - row
        row += member
    kv_len = _context(tl.load(kv_lens + request), FORM)
    if IS_SETTLED:
        wait_for_last()
    if (q_len > ROWS) | (member >= q_len):
        return
    # The splits that had positions to walk, as in _decode_kernel.
    walk = _first_seen(kv_len, q_len, FORM) // TILE * TILE if FORM.window > 0 else 0
    tiles = tl.cdiv(kv_len - walk, TILE)
    used = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, splits), 1))

    split = tl.arange(0, BLOCK_SPLITS)
    column = tl.arange(0, FORM.block_dim)
    place = request.to(tl.int64) * ROWS + member
    index = (place * heads + head) * splits + split
    mask = (split < used)[:, None] & (column < DIM)[None, :]
    part = tl.load(partial + index[:, None] * DIM + column[None, :], mask=mask, other=0.0)
    part_largest = tl.load(sums + 2 * index, mask=split < used, other=float("-inf"))
    part_total = tl.load(sums + 2 * index + 1, mask=split < used, other=0.0)
    largest = tl.max(part_largest, axis=0)
    difference = part_largest - largest
    weight = tl.where(split < used, tl.exp2(difference * scale), 0.0)
    total = tl.sum(part_total * weight, axis=0)
    if lse is not None:
        tl.store(lse + row.to(tl.int64) * heads + head, log_of_sum(total, largest, scale))
    if sinks is not None:
        total = with_sink(total, largest, sinks, head, scale)
    mixed = tl.sum(part * weight[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    if (ROWS > 1) & (FORM.first_position > 0):
        mixed = tl.where(kv_len - q_len + member >= FORM.first_position, mixed, 0.0)
    at = (row.to(tl.int64) * heads + head) * DIM + column
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=column < DIM)
