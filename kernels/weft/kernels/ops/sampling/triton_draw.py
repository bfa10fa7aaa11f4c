"""Draws tokens on a GPU, the same tokens as csrc/sampling.c and `reference.py`.

No row is sorted and nothing waits for the host. A row goes through these launches, most of which
have no work for it:

1. scan: the largest logit of each chunk of 64 and of each tile; mass of each tile.
2. bound: greedy rows are finished. Rows with top_k or top_p get a bound that at least top_k (or
   `NUCLEUS`) logits reach, found among the largest ones of the chunks.
3. collect: the logits that reach it, `CAPACITY` at most.
4. decide: filters and draws among these few. Rows whose nucleus is larger, or with too many equal
   logits, go on to
5. search: the exact threshold, by dividing the range of keys.
6. draw, finish: rows without a list, tile by tile; tokens are counted.
7. count: for rows that follow drafts, whose tokens count only once the tokens of earlier rows are
known.

A key is a float32 logit as an integer of the same order (`key_of`). What is drawn does not depend
on the order in which programs run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.sampling.reference import NOISE_SPREAD
from weft.kernels.ops.sampling.spec import (
    ERROR_NO_CANDIDATE,
    ERROR_NOT_FINITE,
    GREEDY_TEMPERATURE,
    MASKED_LOGIT,
    DraftedRows,
    Field,
    SlotTensors,
)
from weft.kernels.ops.sampling.triton_noise import (
    exp_of_negative,
    gumbel_noise,
    gumbel_run,
    key_of,
    natural_log,
    value_of,
)
from weft.kernels.ops.sampling.triton_row import (
    CHAINS,
    NOT_DRAFTED,
    TREES,
    Source,
    is_before,
    load_keys,
    load_logits,
    real_field,
    whole_field,
)
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

TILE = 1024
CHUNK = 64
CAPACITY = 1024
NUCLEUS = 256
SEARCH_TILE = 4096

_TEMPERATURE = tl.constexpr(int(Field.TEMPERATURE))
_TOP_P = tl.constexpr(int(Field.TOP_P))
_GAP = tl.constexpr(int(Field.GAP))
_TOP_N_SIGMA = tl.constexpr(int(Field.TOP_N_SIGMA))
_SEED = tl.constexpr(int(Field.SEED))
_TOP_K = tl.constexpr(int(Field.TOP_K))
_COUNT_ROW = tl.constexpr(int(Field.COUNT_ROW))
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_MASKED = tl.constexpr(MASKED_LOGIT)
_NOT_DRAFTED = tl.constexpr(NOT_DRAFTED)
_TREES = tl.constexpr(TREES)
_NOT_FINITE = tl.constexpr(ERROR_NOT_FINITE)
_NO_CANDIDATE = tl.constexpr(ERROR_NO_CANDIDATE)
_SPREAD = tl.constexpr(NOISE_SPREAD)
_MIN_KEY = tl.constexpr(-(2**31))
_LARGEST_INT = tl.constexpr(2**31 - 1)
_MODE, _BOUND, _COUNT, _BEST = (tl.constexpr(i) for i in range(4))
"""Columns of `Work.states`. The bound is a key: first of the list, then of what may be drawn."""
_NUM_STATES = tl.constexpr(4)
_DONE, _LIST, _SEARCH, _ALL = (tl.constexpr(i) for i in range(4))
"""Remaining work of a row."""
_MASS_UNIT = tl.constexpr(2.0**52)
"""Masses of listed tokens are multiples of its inverse; the token with the largest logit has mass
1.
"""


class Work(NamedTuple):
    """Intermediate results passed from launch to launch: T tiles and C chunks per row."""

    tile_keys: torch.Tensor
    """[L, T] int32: largest key of each tile."""
    tile_ids: torch.Tensor
    """[L, T] int32: lowest id of the largest key, or ERROR_NOT_FINITE; then the id drawn."""
    tile_reals: torch.Tensor
    """[L, T] float64: mass in units of the largest; then the best score."""
    tile_sums: torch.Tensor
    """[L, T, 3] float64: number, sum and sum of squares of the logits that are not masked, for
    `top_n_sigma`.
    """
    chunk_keys: torch.Tensor
    """[L, C] int32: largest key of each chunk."""
    candidates: torch.Tensor
    """[L, CAPACITY] int64: key, then 2^31 - 1 - id, in any order."""
    states: torch.Tensor
    """[L, 4] int64: state of each row."""
    totals: torch.Tensor
    """[L] float64: mass of all tokens in units of the largest."""
    gaps: torch.Tensor
    """[L] float64: the least (z - max z) / T that is kept."""


def draw_rows(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tables: SlotTensors,
    drafted: DraftedRows | None = None,
) -> torch.Tensor:
    """`weft.kernels.ops.sampling.device.draw_rows` for CUDA tensors, or in Triton's interpreter."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    tiles = cdiv(vocab, TILE)
    # Entries of other kinds are not read.
    firsts, row_tokens, words = drafted or (slots, slots, None)
    kind = NOT_DRAFTED if drafted is None else CHAINS if words is None else TREES
    rest = (firsts, row_tokens, slots if words is None else words, kind)
    source = Source(logits, logits.stride(0), vocab, slots, positions, *tables, *rest)
    work = _new_work(rows, tiles, logits.device)
    tiled, padded_tiles = (rows, tiles), next_power_of_2(tiles)
    exact = {"enable_fp_fusion": False}
    _scan_kernel[tiled](source, work, TILE=TILE, CHUNK=CHUNK, **exact)
    _bound_kernel[(rows,)](
        source, work, tokens, tiles,
        TILES=padded_tiles, CHUNKS=padded_tiles * (TILE // CHUNK),
        CAPACITY=CAPACITY, NUCLEUS=NUCLEUS, num_warps=8, **exact,
    )  # fmt: skip
    _collect_kernel[tiled](source, work, TILE=TILE, CAPACITY=CAPACITY, **exact)
    _decide_kernel[(rows,)](source, work, tokens, CAPACITY=CAPACITY, num_warps=8, **exact)
    _search_kernel[(rows,)](source, work, TILE=SEARCH_TILE, num_warps=16, **exact)
    _draw_kernel[tiled](source, work, TILE=TILE, **exact)
    _finish_kernel[(rows,)](source, work, tokens, tiles, TILES=padded_tiles, num_warps=1, **exact)
    if drafted is not None:
        _count_kernel[(rows,)](source, tokens, num_warps=1)
    return tokens


def _new_work(rows: int, tiles: int, device: torch.device) -> Work:
    def empty(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((rows, width), dtype=dtype, device=device)

    return Work(
        empty(tiles, torch.int32),
        empty(tiles, torch.int32),
        empty(tiles, torch.float64),
        empty(tiles * 3, torch.float64),
        empty(tiles * (TILE // CHUNK), torch.int32),
        empty(CAPACITY, torch.int64),
        empty(int(_NUM_STATES), torch.int64),
        empty(1, torch.float64),
        empty(1, torch.float64),
    )


@triton.jit
def _state(work: Work, row: tl.tensor, WHICH: tl.constexpr) -> tl.tensor:
    return tl.load(work.states + row * _NUM_STATES + WHICH)


@triton.jit
def _set_state(work: Work, row: tl.tensor, WHICH: tl.constexpr, value: tl.tensor) -> None:
    tl.store(work.states + row * _NUM_STATES + WHICH, value)


@triton.jit
def _largest_logit(work: Work, row: tl.tensor) -> tl.tensor:
    return value_of(_state(work, row, _BEST).to(tl.int32)).to(tl.float64)


@triton.jit
def _scan_kernel(source: Source, work: Work, TILE: tl.constexpr, CHUNK: tl.constexpr) -> None:
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(source.slots + row)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < source.vocab
    logits, is_bad = load_logits(source, row, slot, column)
    keys = tl.where(inside, key_of(logits), _MIN_KEY)
    num_chunks: tl.constexpr = TILE // CHUNK
    of_chunks = tl.max(tl.reshape(keys, (num_chunks, CHUNK)), axis=1)
    at = row * tl.num_programs(1) + tile
    tl.store(work.chunk_keys + at * num_chunks + tl.arange(0, num_chunks), of_chunks)
    best = tl.max(keys, axis=0)
    token = tl.min(tl.where(keys == best, column, _LARGEST_INT), axis=0)
    num_bad = tl.sum(is_bad.to(tl.int32), axis=0)
    tl.store(work.tile_keys + at, best)
    tl.store(work.tile_ids + at, tl.where(num_bad > 0, _NOT_FINITE, token))
    temperature = real_field(source, slot, _TEMPERATURE)
    if (temperature >= _GREEDY) & (real_field(source, slot, _TOP_P) < 1.0):
        below = logits.to(tl.float64) - value_of(best).to(tl.float64)
        weights = tl.where(inside, exp_of_negative(below * (1.0 / temperature)), 0.0)
        tl.store(work.tile_reals + at, tl.sum(weights, axis=0))
    if (temperature >= _GREEDY) & (real_field(source, slot, _TOP_N_SIGMA) > 0.0):
        is_counted = inside & (logits > _MASKED)
        wide = tl.where(is_counted, logits.to(tl.float64), 0.0)
        tl.store(work.tile_sums + at * 3, tl.sum(is_counted.to(tl.float64), axis=0))
        tl.store(work.tile_sums + at * 3 + 1, tl.sum(wide, axis=0))
        tl.store(work.tile_sums + at * 3 + 2, tl.sum(wide * wide, axis=0))


@triton.jit
def _bound_kernel(
    source: Source,
    work: Work,
    tokens: tl.tensor,
    tiles: int,
    TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    NUCLEUS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(source.slots + row)
    tile = tl.arange(0, TILES)
    at, is_tile = row * tiles + tile, tile < tiles
    keys = tl.load(work.tile_keys + at, mask=is_tile, other=_MIN_KEY)
    ids = tl.load(work.tile_ids + at, mask=is_tile, other=_LARGEST_INT)
    best = tl.max(keys, axis=0)
    largest = value_of(best)
    token = tl.min(tl.where(keys == best, ids, _LARGEST_INT), axis=0)
    token = tl.where(largest == _MASKED, _NO_CANDIDATE, token)
    token = tl.where(tl.min(ids, axis=0) < 0, _NOT_FINITE, token)
    tl.store(tokens + row, token.to(tl.int64))
    temperature = real_field(source, slot, _TEMPERATURE)
    top_k, top_p = whole_field(source, slot, _TOP_K), real_field(source, slot, _TOP_P)
    has_top_k = (top_k > 0) & (top_k < source.vocab)
    num_chunks = tiles * (CHUNKS // TILES)
    wanted = tl.where(has_top_k, top_k, tl.minimum(num_chunks, NUCLEUS).to(tl.int64))
    zero = best.to(tl.int64) * 0
    mode, bound = zero + _LIST, zero + _MIN_KEY
    if (token < 0) | (temperature < _GREEDY):
        mode = zero + _DONE
    elif (top_p >= 1.0) & (has_top_k == 0):
        mode = zero + _ALL
    elif source.vocab > CAPACITY:
        if (wanted > num_chunks) | (wanted > CAPACITY // 2):
            mode = zero + _SEARCH
        else:
            chunk = tl.arange(0, CHUNKS)
            of_chunks = tl.load(
                work.chunk_keys + row * num_chunks + chunk,
                mask=chunk < num_chunks,
                other=_MIN_KEY,
            )
            # At least as many chunks as wanted hold a key of at least `bound`.
            beyond = best.to(tl.int64) + 1
            while beyond - bound > 1:
                middle = bound + (beyond - bound) // 2
                is_reached = tl.sum((of_chunks >= middle).to(tl.int32), axis=0) >= wanted
                bound = tl.where(is_reached, middle, bound)
                beyond = tl.where(is_reached, beyond, middle)
    if (mode != _DONE) & (top_p < 1.0):
        masses = tl.load(work.tile_reals + at, mask=is_tile, other=0.0)
        below = value_of(keys).to(tl.float64) - largest.to(tl.float64)
        shares = exp_of_negative(tl.where(is_tile, below * (1.0 / temperature), 0.0))
        tl.store(work.totals + row, tl.sum(masses * shares, axis=0))
    gap, num_sigmas = real_field(source, slot, _GAP), real_field(source, slot, _TOP_N_SIGMA)
    if (mode != _DONE) & (num_sigmas > 0.0):
        sums = work.tile_sums + at * 3
        count = tl.sum(tl.load(sums, mask=is_tile, other=0.0), axis=0)
        mean = tl.sum(tl.load(sums + 1, mask=is_tile, other=0.0), axis=0) / count
        square = tl.sum(tl.load(sums + 2, mask=is_tile, other=0.0), axis=0) / count
        sigma = tl.sqrt(tl.maximum(square - mean * mean, 0.0))
        gap = tl.maximum(gap, -(num_sigmas * sigma) / temperature)
    tl.store(work.gaps + row, gap)
    _set_state(work, row, _MODE, mode)
    _set_state(work, row, _BOUND, bound)
    _set_state(work, row, _COUNT, 0)
    _set_state(work, row, _BEST, best)


@triton.jit
def _collect_kernel(source: Source, work: Work, TILE: tl.constexpr, CAPACITY: tl.constexpr) -> None:
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bound = _state(work, row, _BOUND)
    is_reached = tl.load(work.tile_keys + row * tl.num_programs(1) + tile) >= bound
    if (_state(work, row, _MODE) == _LIST) & is_reached:
        slot = tl.load(source.slots + row)
        column = tile * TILE + tl.arange(0, TILE)
        keys = load_keys(source, row, slot, column)
        is_taken = (keys >= bound) & (column < source.vocab)
        taken = is_taken.to(tl.int32)
        count = tl.sum(taken, axis=0).to(tl.int64)
        first = tl.atomic_add(work.states + row * _NUM_STATES + _COUNT, count)
        place = first + tl.cumsum(taken, axis=0) - 1
        packed = (keys.to(tl.int64) << 32) | (column ^ _LARGEST_INT).to(tl.int64)
        tl.store(
            work.candidates + row * CAPACITY + place, packed, mask=is_taken & (place < CAPACITY)
        )


@triton.jit
def _decide_kernel(source: Source, work: Work, tokens: tl.tensor, CAPACITY: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    if _state(work, row, _MODE) == _LIST:
        slot = tl.load(source.slots + row)
        count = _state(work, row, _COUNT)
        index = tl.arange(0, CAPACITY)
        kept, is_whole = index < count, count <= CAPACITY
        best = _state(work, row, _BEST)
        unlisted = (best - 1) << 32
        packed = tl.load(work.candidates + row * CAPACITY + index, mask=kept, other=unlisted)
        keys = (packed >> 32).to(tl.int32)
        ids = ((packed & _LARGEST_INT) ^ _LARGEST_INT).to(tl.int32)
        temperature = real_field(source, slot, _TEMPERATURE)
        largest = _largest_logit(work, row)
        logits = value_of(keys).to(tl.float64)
        top_k, top_p = whole_field(source, slot, _TOP_K), real_field(source, slot, _TOP_P)
        below = _state(work, row, _BOUND) - 1
        has_top_k = (top_k > 0) & (top_k < source.vocab)
        if has_top_k:
            ones = kept.to(tl.int64)
            kept = kept & (keys >= _threshold_of_few(keys, ones, below, best, top_k.to(tl.float64)))
        if top_p < 1.0:
            # Whole numbers, whose sum does not depend on the order of the list.
            weights = exp_of_negative((logits - largest) * (1.0 / temperature)) * _MASS_UNIT
            weights = tl.where(kept, weights.to(tl.int64), 0)
            mass = tl.sum(weights, axis=0).to(tl.float64)
            limit = top_p * tl.where(has_top_k, mass, tl.load(work.totals + row) * _MASS_UNIT)
            is_whole = is_whole & (mass >= limit)
            kept = kept & (keys >= _threshold_of_few(keys, weights, below, best, limit))
        kept = kept & ((logits - largest) / temperature >= tl.load(work.gaps + row))
        noise = gumbel_noise(whole_field(source, slot, _SEED), tl.load(source.positions + row), ids)
        scores = tl.where(kept, logits / temperature + noise, float("-inf"))
        best = tl.max(scores, axis=0)
        token = tl.min(tl.where(kept & (scores == best), ids, _LARGEST_INT), axis=0)
        tl.store(tokens + row, token.to(tl.int64), mask=is_whole)
        _set_state(work, row, _MODE, tl.where(is_whole, _DONE, _SEARCH))


@triton.jit
def _threshold_of_few(
    keys: tl.tensor, weights: tl.tensor, below: tl.tensor, best: tl.tensor, limit: tl.tensor
) -> tl.tensor:
    """The least key in (below, best] for which the weights of larger keys sum to less than
    `limit`.
    """
    while best - below > 1:
        middle = below + (best - below) // 2
        mass = tl.sum(tl.where(keys > middle, weights, 0), axis=0)
        is_light = mass.to(tl.float64) < limit
        best = tl.where(is_light, middle, best)
        below = tl.where(is_light, below, middle)
    return best


@triton.jit
def _search_kernel(source: Source, work: Work, TILE: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    if _state(work, row, _MODE) == _SEARCH:
        slot = tl.load(source.slots + row)
        best = _state(work, row, _BEST)
        largest = _largest_logit(work, row)
        temperature = real_field(source, slot, _TEMPERATURE)
        inverse = 1.0 / temperature
        top_k, top_p = whole_field(source, slot, _TOP_K), real_field(source, slot, _TOP_P)
        below = best * 0 + _MIN_KEY - 1
        last = below + 1
        total = 1.0 * largest
        if (top_k > 0) & (top_k < source.vocab):
            last = _threshold(
                source, row, slot, below, best, top_k.to(tl.float64), largest, inverse, 0, TILE
            )
            total = _mass_above(source, row, slot, last - 1, largest, inverse, TILE)
        elif top_p < 1.0:
            total = tl.load(work.totals + row)
        if top_p < 1.0:
            # Tokens that are each lighter than (1 - p) / vocabulary of the total are dropped.
            lightest = (1.0 - top_p) * 0.999999 / source.vocab * total
            cut = tl.maximum(largest + natural_log(lightest) * temperature, _MASKED)
            below = tl.maximum(last - 1, key_of(cut.to(tl.float32)).to(tl.int64) - 2)
            last = _threshold(
                source, row, slot, below, best, top_p * total, largest, inverse, 1, TILE
            )
        _set_state(work, row, _BOUND, last)
        _set_state(work, row, _MODE, _ALL)


@triton.jit
def _threshold(
    source: Source,
    row: tl.tensor,
    slot: tl.tensor,
    below: tl.tensor,
    best: tl.tensor,
    limit: tl.tensor,
    largest: tl.tensor,
    inverse: tl.tensor,
    BY_WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The least key in (below, best] for which larger keys have less than `limit`, in tokens or
    mass.
    """
    while best - below > 1:
        step = (best - below + 3) // 4
        first = below + step
        second, third = tl.minimum(first + step, best), tl.minimum(first + 2 * step, best)
        sums1 = tl.zeros((TILE,), tl.float64)
        sums2 = tl.zeros((TILE,), tl.float64)
        sums3 = tl.zeros((TILE,), tl.float64)
        for begin in range(0, source.vocab, TILE):
            column = begin + tl.arange(0, TILE)
            keys = load_keys(source, row, slot, column)
            weights = (column < source.vocab).to(tl.float64)
            if BY_WEIGHT:
                away = tl.minimum((value_of(keys).to(tl.float64) - largest) * inverse, 0.0)
                weights = weights * exp_of_negative(away)
            sums1 += tl.where(keys > first, weights, 0.0)
            sums2 += tl.where(keys > second, weights, 0.0)
            sums3 += tl.where(keys > third, weights, 0.0)
        is1, is2 = tl.sum(sums1, axis=0) < limit, tl.sum(sums2, axis=0) < limit
        is3 = tl.sum(sums3, axis=0) < limit
        best = tl.where(is1, first, tl.where(is2, second, tl.where(is3, third, best)))
        below = tl.where(is1, below, tl.where(is2, first, tl.where(is3, second, third)))
    return best


@triton.jit
def _mass_above(
    source: Source,
    row: tl.tensor,
    slot: tl.tensor,
    bound: tl.tensor,
    largest: tl.tensor,
    inverse: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    sums = tl.zeros((TILE,), tl.float64)
    for begin in range(0, source.vocab, TILE):
        column = begin + tl.arange(0, TILE)
        keys = load_keys(source, row, slot, column)
        away = tl.minimum((value_of(keys).to(tl.float64) - largest) * inverse, 0.0)
        is_above = (keys > bound) & (column < source.vocab)
        sums += tl.where(is_above, exp_of_negative(away), 0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def _draw_kernel(source: Source, work: Work, TILE: tl.constexpr) -> None:
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _state(work, row, _MODE) == _ALL:
        slot = tl.load(source.slots + row)
        at = row * tl.num_programs(1) + tile
        bound = _state(work, row, _BOUND)
        temperature = real_field(source, slot, _TEMPERATURE)
        largest = _largest_logit(work, row)
        key = tl.load(work.tile_keys + at)
        nearest = (value_of(key).to(tl.float64) - largest) / temperature
        gap = tl.maximum(tl.load(work.gaps + row), -_SPREAD)
        best, token = nearest * 0.0 + float("-inf"), key * 0 + _LARGEST_INT
        if (key >= bound) & (nearest >= gap):
            first = tile * TILE
            column = first + tl.arange(0, TILE)
            keys = load_keys(source, row, slot, column)
            logits = value_of(keys).to(tl.float64)
            kept = (column < source.vocab) & (keys >= bound)
            kept = kept & ((logits - largest) / temperature >= gap)
            seed = whole_field(source, slot, _SEED)
            noise = gumbel_run(seed, tl.load(source.positions + row), first, TILE)
            scores = tl.where(kept, logits / temperature + noise, float("-inf"))
            best = tl.max(scores, axis=0)
            token = tl.min(tl.where(kept & (scores == best), column, _LARGEST_INT), axis=0)
        tl.store(work.tile_reals + at, best)
        tl.store(work.tile_ids + at, token)


@triton.jit
def _finish_kernel(
    source: Source, work: Work, tokens: tl.tensor, tiles: int, TILES: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    if _state(work, row, _MODE) == _ALL:
        tile = tl.arange(0, TILES)
        at, is_tile = row * tiles + tile, tile < tiles
        scores = tl.load(work.tile_reals + at, mask=is_tile, other=float("-inf"))
        ids = tl.load(work.tile_ids + at, mask=is_tile, other=_LARGEST_INT)
        best = tl.max(scores, axis=0)
        token = tl.min(tl.where(scores == best, ids, _LARGEST_INT), axis=0).to(tl.int64)
        tl.store(tokens + row, token)
    count_row = whole_field(source, tl.load(source.slots + row), _COUNT_ROW)
    if (count_row >= 0) & (token >= 0) & (source.drafted == _NOT_DRAFTED):
        count = source.counts + count_row * source.vocab + token
        tl.store(count, tl.load(count) + 2)


@triton.jit
def _count_kernel(source: Source, tokens: tl.tensor) -> None:
    row = tl.program_id(0).to(tl.int64)
    count_row = whole_field(source, tl.load(source.slots + row), _COUNT_ROW)
    token = tl.load(tokens + row)
    if (count_row >= 0) & (token >= 0):
        first = tl.load(source.firsts + row)
        last, is_accepted = first, token >= 0
        one = tl.full([], 1, tl.int64)
        for at in range(first + 1, row + 1):
            is_its = is_before(source, row, first, at)
            is_right = tl.load(tokens + last) == tl.load(source.row_tokens + at)
            is_accepted = is_accepted & (is_right | (is_its == 0))
            last = tl.where(is_its, at, last)
            if source.drafted == _TREES:
                # Among siblings with the same token the first one is accepted.
                own = tl.load(source.words + row) ^ (one << (row - first))
                other = tl.load(source.words + at) ^ (one << (at - first))
                is_same = tl.load(source.row_tokens + at) == tl.load(source.row_tokens + row)
                is_accepted = is_accepted & ((at == row) | (own != other) | (is_same == 0))
        # Several rows may draw the same token.
        tl.atomic_add(source.counts + count_row * source.vocab + token, 2, mask=is_accepted)
