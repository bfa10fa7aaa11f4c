"""The experts of a mixture on a GPU.

Few rows: each program takes one pair of a row and an expert and a few columns, and streams its part
of that expert's weight; nothing is sorted. More rows: pairs are sorted by expert and cut into
blocks, and a program multiplies one block by one tile of its expert's weight. No pair is dropped,
and a row's experts are summed in their order, so that results repeat.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.gpu.copied_tiles import can_copy, copied_tiles
from weft.kernels.gpu.dependent_launch import (
    LaunchOptions,
    launch_options,
    release_next,
    wait_for_last,
)
from weft.kernels.gpu.moe_combine import NormAfter, combine
from weft.kernels.gpu.moe_lora import down_additions, gate_up_additions
from weft.kernels.gpu.moe_lora_pairs import (
    Folded,
    activate_pairs,
    can_pair,
)
from weft.kernels.gpu.moe_lora_tiles import (
    can_tile,
    expand_items,
    pairs_of,
    shrink_items,
    tokens_of,
)
from weft.kernels.gpu.moe_route import is_sorted_at_once, route, route_and_sort
from weft.kernels.gpu.moe_sort import Blocks, sort_pairs
from weft.kernels.gpu.moe_tiles import Tiles, tiles_for
from weft.kernels.gpu.norm import add_rms_norm
from weft.kernels.lora import ExpertAddition
from weft.kernels.side_stream import SideStreamWork, is_forking

MIN_COPIED_ROWS = 128
"""Pairs of a block from which on the copy engine fetches weights: loads cost registers there."""
MAX_DIRECT_ROWS = 8
"""Most rows of the direct path: up to here rows rarely share an expert, so that sorting gains
nothing.
"""
MAX_FORKED_ROWS = 256
"""Most rows whose low-rank additions are computed beside the products, which leave the GPU room."""
MAX_PAIRED_ROWS = 256
"""Most rows whose low-rank additions are computed pair by pair between the products."""


class _DirectShape(NamedTuple):
    """How programs of the direct path cut the weights (measured on an H200, 1 to 8 rows)."""

    columns: int
    tile: int
    """Elements of K taken at once."""
    warps: int


_INNER_SHAPE = _DirectShape(columns=2, tile=2048, warps=4)
_OUT_SHAPE = _DirectShape(columns=2, tile=1024, warps=4)
_MAX_AT_ONCE = 1 << 13
"""Experts of a row times elements of K up to which all of a program's columns are loaded at once.
"""

TokenRanks = SideStreamWork[torch.Tensor]
"""Each token's ranks for gate and up, which all experts share, computed beside the router."""


class _Sorted(NamedTuple):
    """The products of sorted pairs, each times its share, and what is to be added to them."""

    products: torch.Tensor
    """[T * k, H]."""
    added: torch.Tensor | None
    """[T, H] or [T * k, H]."""
    folded: Folded | None
    options: LaunchOptions
    """Of the launch that sums them."""


def begin_ranks(
    x: torch.Tensor, lora: ExpertAddition | None, experts: int, inner: int, *, is_fixed: bool
) -> TokenRanks | None:
    """Ranks that need nothing of the router: begun before it, they are complete when it is.

    Args:
        x: [T, H], contiguous, the experts' input.
        lora: The tokens' adapters, or None.
        experts: E.
        inner: I.
        is_fixed: As in `moe`.

    Returns:
        Work for `routed_moe`; None where there is none.
    """
    if lora is None or not _is_paired(lora, x.shape[0], inner, is_fixed=is_fixed):
        return None
    if not all(part.is_a_shared for part in lora.w13):
        return None
    parts, layer, tokens = lora.w13, lora.layer, tokens_of(lora.token_slots, experts)
    options = launch_options(x.device, is_alone=is_forking(x.device))
    return SideStreamWork(x.device, lambda: shrink_items(x, parts, layer, tokens, options))


def _is_paired(lora: ExpertAddition, rows: int, inner: int, *, is_fixed: bool) -> bool:
    is_few = MAX_DIRECT_ROWS < rows <= MAX_PAIRED_ROWS
    return is_few and not is_fixed and can_pair(lora, inner)


def routed_moe(
    x: torch.Tensor,
    logits: torch.Tensor,
    top_k: int,
    w13: torch.Tensor,
    w2: torch.Tensor,
    after: NormAfter | None,
    lora: ExpertAddition | None = None,
    ranks: TokenRanks | None = None,
    *,
    renormalise: bool,
    is_fixed: bool = False,
) -> torch.Tensor:
    """Routing and `moe` of a layer, with what follows it, in as few launches as there may be.

    Args:
        x: As in `moe`, like those that are not named here.
        logits: [T, E] float32, of the router.
        top_k: k.
        w13: [E, 2 * I, H].
        w2: [E, H, I].
        after: What follows, or None.
        lora: The tokens' adapters, or None.
        ranks: From `begin_ranks` of the same arguments.
        renormalise: The shares of a row's experts add up to 1.
        is_fixed: As in `moe`.

    Returns:
        [T, H]: the sum of each row's experts, or, where a norm follows, its result.
    """
    rows, (experts, hidden, width) = x.shape[0], w2.shape
    if rows <= MAX_DIRECT_ROWS or is_fixed:
        # Norms add squares in one order only if they are all one kernel's.
        routed = route(logits, top_k, renormalise)
        out = moe(x, *routed, w13, w2, None, lora, is_fixed=is_fixed)
        return out if after is None else add_rms_norm(out, *after)[0]
    tiles, blocks = tiles_for(rows, top_k, experts, hidden, width), None
    if is_sorted_at_once(rows, experts):
        ids, shares, blocks = route_and_sort(logits, top_k, tiles.rows, renormalise=renormalise)
    else:
        ids, shares = route(logits, top_k, renormalise)
    return sorted_moe(x, ids, shares, w13, w2, None, tiles, lora, ranks, blocks=blocks, after=after)


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    residual: torch.Tensor | None,
    lora: ExpertAddition | None = None,
    *,
    is_fixed: bool = False,
) -> torch.Tensor:
    """`weft.kernels.moe.moe` for CUDA tensors.

    Args:
        x: [T, H], contiguous, T at least 1.
        ids: [T, k] int32, each below E.
        shares: [T, k] float32.
        w13: [E, 2 * I, H], rows of gate first.
        w2: [E, H, I].
        residual: [T, H] or None.
        lora: The tokens' adapters, or None.
        is_fixed: A row's result does not depend on the other rows: each element is one chain of
            tensor core instructions over K, which is the same for all tiles, and a residual is
            added to the rounded sum, as by a norm that follows.
    """
    if x.shape[0] <= MAX_DIRECT_ROWS and not is_fixed:
        return _direct(x, ids, shares, w13, w2, residual, lora)
    experts, _, inner = w2.shape
    ranks = begin_ranks(x, lora, experts, inner, is_fixed=is_fixed)
    tiles = tiles_for(*ids.shape, *w2.shape)
    return sorted_moe(x, ids, shares, w13, w2, residual, tiles, lora, ranks, is_fixed=is_fixed)


def _direct(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    residual: torch.Tensor | None,
    lora: ExpertAddition | None,
) -> torch.Tensor:
    (rows, hidden), width, (pairs, top_k) = x.shape, w2.shape[2], (ids.numel(), ids.shape[1])
    inner = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    options, added = launch_options(x.device), None
    if lora is not None:
        added = gate_up_additions(x, ids, width, w2.shape[0], lora, options)
    shape = _INNER_SHAPE
    _direct_inner_kernel[(pairs, triton.cdiv(width, shape.columns))](
        inner, x, w13, ids, added, width, K=hidden, TOP_K=top_k, COLUMNS=shape.columns,
        TILE=min(shape.tile, triton.next_power_of_2(hidden)), num_warps=shape.warps, **options,
    )  # fmt: skip
    shape, tile = _OUT_SHAPE, triton.next_power_of_2(width)
    is_whole = x.dtype.itemsize == 2 and triton.next_power_of_2(top_k) * tile <= _MAX_AT_ONCE
    _direct_out_kernel[(rows, triton.cdiv(hidden, shape.columns))](
        out, inner, w2, ids, shares, residual, hidden, K=width, TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k) if is_whole else 1, COLUMNS=shape.columns,
        TILE=tile if is_whole else min(shape.tile, tile), num_warps=shape.warps, **options,
    )  # fmt: skip
    if lora is not None:
        down_additions(inner, ids, shares, hidden, w2.shape[0], lora, options, out)
    return out


def sorted_moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    residual: torch.Tensor | None,
    tiles: Tiles,
    lora: ExpertAddition | None = None,
    ranks: TokenRanks | None = None,
    *,
    blocks: Blocks | None = None,
    after: NormAfter | None = None,
    is_fixed: bool = False,
) -> torch.Tensor:
    """`moe` over pairs sorted by expert, cut as `tiles` says.

    Args:
        x: As in `moe`, like those that follow.
        ids: [T, k].
        shares: [T, k].
        w13: [E, 2 * I, H].
        w2: [E, H, I].
        residual: [T, H] or None.
        tiles: How pairs and columns are cut.
        lora: The tokens' adapters, or None.
        ranks: As in `routed_moe`.
        blocks: The pairs in blocks of `tiles.rows`, if they are sorted already.
        after: What follows, whose result this is then, or None; not with `residual`.
        is_fixed: As in `moe`.
    """
    rows, (experts, _, inner) = x.shape[0], w2.shape
    blocks = blocks or sort_pairs(ids, experts, tiles.rows)
    given = (x, ids, shares, w13, w2, tiles, blocks)
    if lora is not None and _is_paired(lora, rows, inner, is_fixed=is_fixed):
        found = _paired(*given, lora, ranks)
    else:
        found = _in_turn(*given, lora, is_fixed=is_fixed)
    return combine(*found, ids.shape[1], residual, after, is_fixed=is_fixed)


def _in_turn(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    tiles: Tiles,
    blocks: Blocks,
    lora: ExpertAddition | None,
    *,
    is_fixed: bool,
) -> _Sorted:
    """Both products; what is added to the first one is computed before it."""
    (rows, hidden), (experts, _, width), top_k = x.shape, w2.shape, ids.shape[1]
    pairs = ids.numel()
    options, device = launch_options(x.device), x.device
    forked = launch_options(device, is_alone=is_forking(device))
    to_gate_up = to_down = added = added_down = None
    if lora is not None:
        more, is_few = (experts, lora, forked), rows <= MAX_FORKED_ROWS
        items = None
        if not is_fixed and can_tile((*lora.w13, *lora.w2)):
            items = pairs_of(lora.token_slots, ids, experts, blocks, tiles.rows)
        to_gate_up = SideStreamWork(
            device,
            lambda: gate_up_additions(x, ids, width, *more, items, is_fixed=is_fixed),
            is_forked=is_few,
        )
    inner = torch.empty((pairs, width), dtype=x.dtype, device=device)
    products = torch.empty((pairs, hidden), dtype=x.dtype, device=device)
    shared = (shares, *blocks)
    joined = options if lora is None else forked
    if to_gate_up is not None:
        added = to_gate_up.join()
    _multiply(inner, x, w13, shared, added, tiles, top_k, joined, is_gated=True)
    if lora is not None:
        to_down = SideStreamWork(
            device,
            lambda: down_additions(
                inner, ids, shares, hidden, *more, items=items, is_fixed=is_fixed
            ),
            is_forked=is_few,
        )
    _multiply(products, inner, w2, shared, None, tiles, 1, options, is_gated=False)
    if to_down is not None:
        added_down = to_down.join()
    return _Sorted(products, added_down, None, joined)


def _paired(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    tiles: Tiles,
    blocks: Blocks,
    lora: ExpertAddition,
    ranks: TokenRanks | None,
) -> _Sorted:
    """Both products, and additions pair by pair between them.

    `ranks`: what experts share; otherwise each pair's are computed beside the first product.
    """
    hidden, (experts, _, width), top_k = x.shape[1], w2.shape, ids.shape[1]
    pairs, device = ids.numel(), x.device
    options, alone = launch_options(device), launch_options(device, is_alone=True)
    forked = launch_options(device, is_alone=is_forking(device))
    items = pairs_of(lora.token_slots, ids, experts, blocks, tiles.rows)
    both = torch.empty((pairs, 2 * width), dtype=torch.float32, device=device)
    products = torch.empty((pairs, hidden), dtype=x.dtype, device=device)
    shared = (shares, *blocks)
    # The activation reads slots, experts and ranks before it waits: all of them are complete before
    # the first of these launches that is alone begins.
    if ranks is not None:
        given, activation = ranks.join(), options
        _multiply(both, x, w13, shared, None, tiles, top_k, alone, is_gated=True, is_raw=True)
    else:
        parts, layer = lora.w13, lora.layer
        work = SideStreamWork(device, lambda: shrink_items(x, parts, layer, items, forked, top_k))
        _multiply(both, x, w13, shared, None, tiles, top_k, options, is_gated=True, is_raw=True)
        activation, given = alone, work.join()
    inner, to_down = activate_pairs(both, given, ids, shares, lora, experts, activation)
    if to_down is None or lora.w2[0].is_b_shared:
        _multiply(products, inner, w2, shared, None, tiles, 1, options, is_gated=False)
        folded = None
        if to_down is not None:
            folded = Folded(to_down, lora.w2[0], lora.token_slots, experts, lora.layer)
        return _Sorted(products, None, folded, options)

    def expand() -> torch.Tensor:
        added, (found, sums) = torch.empty_like(products), to_down
        expand_items(added, found, lora.w2, lora.layer, items, forked, summed=sums)
        return added

    expanded = SideStreamWork(device, expand)
    _multiply(products, inner, w2, shared, None, tiles, 1, options, is_gated=False)
    return _Sorted(products, expanded.join(), None, forked)


def _multiply(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    pairs: tuple[torch.Tensor, ...],
    added: torch.Tensor | None,
    tiles: Tiles,
    top_k: int,
    options: LaunchOptions,
    *,
    is_gated: bool,
    is_raw: bool = False,
) -> None:
    """Sorted pairs times their experts' weights; `pairs`: shares, then `Blocks`.

    `is_raw`: gate and up as they are, [pairs, 2 * I].
    """
    experts, columns, depth = weight.shape
    columns = columns // 2 if is_gated else columns
    tile = tiles.up if is_gated else tiles.down
    # Tables are of two-byte elements; of wider ones a multiprocessor's memory holds fewer.
    inner = min(tile.depth * 2 // x.dtype.itemsize, triton.next_power_of_2(depth))
    weight_tiles = None
    flat = weight.view(-1, depth)
    if tiles.rows >= MIN_COPIED_ROWS and can_copy(flat):
        weight_tiles = copied_tiles(flat, tile.columns, inner)
    # Programs that run together share a block's rows and an expert's weights in the cache.
    _sorted_kernel[(triton.cdiv(columns, tile.columns), pairs[2].shape[0])](
        out, x, weight, weight_tiles, *pairs, added, columns, experts, K=depth, TOP_K=top_k,
        IS_GATED=is_gated, IS_RAW=is_raw, ROWS=tiles.rows, COLUMNS=tile.columns, TILE=inner,
        IS_EXACT=x.dtype == torch.float32,
        num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip


@triton.jit
def _direct_inner_kernel(
    inner: tl.tensor,
    x: tl.tensor,
    w13: tl.tensor,
    ids: tl.tensor,
    added: tl.tensor,
    width: int,
    IS_DEPENDENT: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """inner[pair] = silu(gate of x[row]) * up of x[row], a few columns of it."""
    wait_for_last(IS_DEPENDENT)
    # Only now: `_direct_out_kernel` reads ids and shares before its own wait.
    release_next(IS_DEPENDENT)
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, TILE)
    expert = tl.load(ids + pair).to(tl.int64)
    row = x + pair // TOP_K * K
    # Columns that do not exist read those of the last: cheaper than a mask on each load.
    gate_at = w13 + (expert * 2 * width + tl.minimum(column, width - 1)) * K
    up_at = gate_at + tl.cast(width, tl.int64) * K
    gate = tl.zeros([COLUMNS, TILE], tl.float32)
    up = tl.zeros([COLUMNS, TILE], tl.float32)
    for start in tl.static_range(0, K, TILE):
        at = start + part
        values = tl.load(row + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
        mask = (at < K)[None, :]
        gate += values * tl.load(gate_at[:, None] + at[None, :], mask=mask, other=0.0)
        up += values * tl.load(up_at[:, None] + at[None, :], mask=mask, other=0.0)
    gate_sum, up_sum = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if added is not None:
        added_at = added + pair * 2 * width + column
        gate_sum += tl.load(added_at, mask=column < width, other=0.0).to(tl.float32)
        up_sum += tl.load(added_at + width, mask=column < width, other=0.0).to(tl.float32)
    product = gate_sum / (1.0 + tl.exp(-gate_sum)) * up_sum
    tl.store(inner + pair * width + column, product.to(inner.dtype.element_ty), mask=column < width)


@triton.jit
def _direct_out_kernel(
    out: tl.tensor,
    inner: tl.tensor,
    w2: tl.tensor,
    ids: tl.tensor,
    shares: tl.tensor,
    residual: tl.tensor,
    hidden: int,
    IS_DEPENDENT: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """out[row] = residual[row] + share * down of inner, over the row's experts; BLOCK_K of them at
    a time, all of whose weights are then on their way before `inner` is there.
    """
    release_next(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    last = tl.minimum(column, hidden - 1)
    part = tl.arange(0, TILE)
    if BLOCK_K > 1:
        number = tl.arange(0, BLOCK_K)
        pair = row * TOP_K + number
        expert = tl.load(ids + pair, mask=number < TOP_K, other=0).to(tl.int64)
        share = tl.load(shares + pair, mask=number < TOP_K, other=0.0)
        mask = ((number < TOP_K)[:, None] & (part < K)[None, :])[:, None, :]
        begin = w2 + (expert[:, None] * hidden + last[None, :]) * K
        tiles = tl.load(begin[:, :, None] + part[None, None, :], mask=mask, other=0.0)
        wait_for_last(IS_DEPENDENT)
        at = (pair[:, None] * K + part[None, :])[:, None, :]
        values = tl.load(inner + at, mask=mask, other=0.0).to(tl.float32)
        total = tl.sum(tiles.to(tl.float32) * (values * share[:, None, None]), axis=0)
    else:
        wait_for_last(IS_DEPENDENT)
        total = tl.zeros([COLUMNS, TILE], tl.float32)
        for number in range(TOP_K):
            pair = row * TOP_K + number
            expert = tl.load(ids + pair).to(tl.int64)
            share = tl.load(shares + pair)
            begin = w2 + (expert * hidden + last) * K
            for start in range(0, K, TILE):
                at = start + part
                values = tl.load(inner + pair * K + at, mask=at < K, other=0.0).to(tl.float32)
                tile = tl.load(begin[:, None] + at[None, :], mask=(at < K)[None, :], other=0.0)
                total += (values * share)[None, :] * tile
    result = tl.sum(total, axis=1)
    mask = column < hidden
    if residual is not None:
        result += tl.load(residual + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sorted_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    weight_tiles: tl.tensor_descriptor,
    shares: tl.tensor,
    order: tl.tensor,
    block_expert: tl.tensor,
    block_begin: tl.tensor,
    block_end: tl.tensor,
    added: tl.tensor,
    columns: int,
    experts: int,
    IS_DEPENDENT: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_RAW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """Multiplies one block of pairs by one tile of columns; pair p reads row p // TOP_K of x.

    Raw: gate and up, side by side; gated: silu(gate) * up; else the product times the pair's share.
    """
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    block = tl.program_id(1)
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert >= experts:
        return
    place = tl.load(block_begin + block) + tl.arange(0, ROWS)
    is_pair = place < tl.load(block_end + block)
    pair = tl.load(order + place, mask=is_pair, other=0).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_out = column < columns
    part = tl.arange(0, TILE)
    row_at = x + (pair // TOP_K * K)[:, None]
    weight_rows = columns * 2 if IS_GATED else columns
    begin = weight + ((expert * weight_rows + tl.minimum(column, columns - 1)) * K)[:, None]
    up_at = begin + tl.cast(columns, tl.int64) * K
    first = expert.to(tl.int32) * weight_rows + tl.program_id(0) * COLUMNS
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, TILE):
        at = (start + part)[None, :]
        values = tl.load(row_at + at, mask=is_pair[:, None] & (at < K), other=0.0)
        if weight_tiles is not None:
            # Of columns that do not exist it fetches another expert's, which are not stored.
            tile = weight_tiles.load([first, start])
        else:
            tile = tl.load(begin + at, mask=at < K, other=0.0)
        product = _dot(values, tile, product, IS_EXACT)
        if IS_GATED:
            if weight_tiles is not None:
                tile = weight_tiles.load([first + columns, start])
            else:
                tile = tl.load(up_at + at, mask=at < K, other=0.0)
            up = _dot(values, tile, up, IS_EXACT)
    mask = is_pair[:, None] & in_out[None, :]
    out_width = columns
    if IS_RAW:
        out_width = 2 * columns
        at = pair[:, None] * out_width + column[None, :] + columns
        tl.store(out + at, up.to(out.dtype.element_ty), mask=mask)
    elif IS_GATED:
        if added is not None:
            added_at = added + (pair * 2 * columns)[:, None] + column[None, :]
            product += tl.load(added_at, mask=mask, other=0.0).to(tl.float32)
            up += tl.load(added_at + columns, mask=mask, other=0.0).to(tl.float32)
        product = product / (1.0 + tl.exp(-product)) * up
    else:
        product *= tl.load(shares + pair, mask=is_pair, other=0.0)[:, None]
    at = pair[:, None] * out_width + column[None, :]
    tl.store(out + at, product.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _dot(values: tl.tensor, tile: tl.tensor, total: tl.tensor, IS_EXACT: tl.constexpr) -> tl.tensor:
    if IS_EXACT:
        total = tl.dot(values, tl.trans(tile), total, input_precision="ieee")
    else:
        total = tl.dot(values, tl.trans(tile), total)
    return total
