"""Sorts pairs of a row and an expert by expert and cuts them into blocks, in one to three
launches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_CHUNK = 128
"""Pairs of one program."""
_MAX_SUMMED_CHUNKS = 32
"""Most chunks whose counts each program sums itself; for more, a separate launch does it once."""
_SCANNED_CHUNKS, _SCANNED_BINS = 128, 8


class Blocks(NamedTuple):
    """Pairs sorted by expert, in blocks of one expert each."""

    order: torch.Tensor
    """[P] int32: pairs in the order of their experts, ascending; undefined after the last block."""
    expert: torch.Tensor
    """[B] int32: each block's expert; the number of experts for unused blocks."""
    begin: torch.Tensor
    """[B] int32: each block's first place in `order`; undefined for unused blocks."""
    end: torch.Tensor
    """[B] int32: where the pairs of the block's expert end; undefined for unused blocks."""


def num_blocks(pairs: int, experts: int, block: int) -> int:
    """An upper bound, since each expert has at most one block that is not full."""
    return pairs // block + min(pairs, experts)


def sort_pairs(ids: torch.Tensor, experts: int, block: int) -> Blocks:
    """Sorts pairs by counting. The number of blocks is an upper bound, so that graphs can capture
    it.

    Args:
        ids: [T, k] int32 on a GPU, contiguous, each below `experts`, or `experts` for a pair that
            belongs to no block; T at least 1.
        experts: E.
    """
    pairs = ids.numel()
    bound = num_blocks(pairs, experts, block)
    chunks, bins = cdiv(pairs, _CHUNK), next_power_of_2(experts + 1)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    table = torch.empty((3, bound), dtype=torch.int32, device=ids.device)
    counts = torch.empty((chunks + 1, bins), dtype=torch.int32, device=ids.device)
    options = launch_options(ids.device)
    if chunks > 1:
        _count_kernel[(chunks,)](
            counts, ids, pairs, experts, CHUNK=_CHUNK, BINS=bins, num_warps=4, **options
        )
    is_scanned = chunks > _MAX_SUMMED_CHUNKS
    if is_scanned:
        _scan_kernel[(cdiv(bins, _SCANNED_BINS),)](
            counts, chunks, BINS=bins, CHUNKS=_SCANNED_CHUNKS, PART=_SCANNED_BINS, num_warps=4,
            **options,
        )  # fmt: skip
    _place_kernel[(chunks,)](
        order,
        table,
        counts,
        ids,
        pairs,
        bound,
        experts,
        block,
        CHUNK=_CHUNK,
        BINS=bins,
        IS_ONE=chunks == 1,
        IS_SCANNED=is_scanned,
        num_warps=8,
        **options,
    )
    return Blocks(order, *table)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    counts: tl.tensor,
    ids: tl.tensor,
    pairs: int,
    experts: int,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """counts[chunk, e] = pairs of the chunk that have expert e."""
    release_next()
    wait_for_last()
    chunk = tl.program_id(0)
    chosen = _experts_of(ids, chunk, pairs, experts, CHUNK)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(chosen, BINS))


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(
    counts: tl.tensor,
    chunks: int,
    BINS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """counts[chunk, e] becomes the number of pairs before the chunk, and after the last chunk the
    total.
    """
    release_next()
    wait_for_last()
    number = tl.program_id(0) * PART + tl.arange(0, PART)
    before = tl.zeros([PART], tl.int32)
    for start in range(0, chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        at = counts + chunk[:, None] * BINS + number[None, :]
        mask = (chunk < chunks)[:, None] & (number < BINS)[None, :]
        part = tl.load(at, mask=mask, other=0)
        tl.store(at, before[None, :] + tl.cumsum(part, axis=0) - part, mask=mask)
        before += tl.sum(part, axis=0)
    tl.store(counts + chunks * BINS + number, before, mask=number < BINS)


@triton.jit(do_not_specialize=["pairs", "bound"])
def _place_kernel(
    order: tl.tensor,
    table: tl.tensor,
    counts: tl.tensor,
    ids: tl.tensor,
    pairs: int,
    bound: int,
    experts: int,
    block: int,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    IS_ONE: tl.constexpr,
    IS_SCANNED: tl.constexpr,
) -> None:
    """Puts a chunk's pairs in their places, and describes some of the blocks."""
    release_next()
    wait_for_last()
    chunk = tl.program_id(0)
    chosen = _experts_of(ids, chunk, pairs, experts, CHUNK)
    number = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    if IS_ONE:
        total += tl.histogram(chosen, BINS)
    elif IS_SCANNED:
        before += tl.load(counts + chunk * BINS + number)
        total += tl.load(counts + tl.num_programs(0) * BINS + number)
    else:
        for start in range(0, tl.num_programs(0), 16):
            row = start + tl.arange(0, 16)
            at = row[:, None] * BINS + number[None, :]
            part = tl.load(counts + at, mask=(row < tl.num_programs(0))[:, None], other=0)
            total += tl.sum(part, axis=0)
            before += tl.sum(tl.where((row < chunk)[:, None], part, 0), axis=0)
    total = tl.where(number < experts, total, 0)
    begin = tl.cumsum(total, axis=0) - total

    part_at = tl.arange(0, CHUNK)
    pair = chunk * CHUNK + part_at
    place = tl.gather(begin + before, chosen, 0)
    is_earlier = part_at[None, :] < part_at[:, None]
    place += tl.sum((is_earlier & (chosen[:, None] == chosen[None, :])).to(tl.int32), axis=1)
    tl.store(order + place, pair, mask=pair < pairs)

    # Each program describes some of every expert's blocks, and some of the unused ones.
    blocks = (total + (block - 1)) // block
    first = tl.cumsum(blocks, axis=0) - blocks
    for its in range(chunk, tl.max(blocks, axis=0), tl.num_programs(0)):
        at = table + first + its
        tl.store(at, number, mask=its < blocks)
        tl.store(at + bound, begin + its * block, mask=its < blocks)
        tl.store(at + 2 * bound, begin + total, mask=its < blocks)
    nothing = tl.zeros([CHUNK], tl.int32) + experts
    for start in range(chunk * CHUNK, bound, tl.num_programs(0) * CHUNK):
        at = start + part_at
        is_spare = (at >= tl.sum(blocks, axis=0)) & (at < bound)
        tl.store(table + at, nothing, mask=is_spare)


@triton.jit
def _experts_of(
    ids: tl.tensor, chunk: tl.tensor, pairs: int, experts: int, CHUNK: tl.constexpr
) -> tl.tensor:
    """Experts of a chunk's pairs; entries without a pair get the number of experts."""
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.load(ids + pair, mask=pair < pairs, other=experts)
