"""Low-rank additions to experts on a GPU while tokens decode: in the kernels between the products.

Among a few hundred tokens, each with an adapter of its own, hardly two pairs of a token and an
expert share an adapter's expert. Pairs then share no reads of A and B, and an additional launch
takes longer than the reads. So the launch that computes the activation of gate and up also adds
their ranks times B, and computes the ranks of down. If experts share the B of down, the launch that
sums a token's pairs multiplies the ranks by it.

Both launches load slots, experts and B before they wait for the preceding product. Therefore
either that product or `activate_pairs` must not begin early.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.activation.triton_activation import silu_and
from weft.kernels.ops.lora.spec import ExpertAddition, LoraWeights
from weft.kernels.ops.lora.triton_parts import AdapterRows, max_rows
from weft.kernels.ops.moe.triton_lora_tiles import can_tile
from weft.kernels.shared.dependent_launch import LaunchOptions, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_UNIT = 16
"""Ranks that a program multiplies at once, two rows of the pool (`unit_of`)."""


class PairLaunchConfig(NamedTuple):
    """Launch shape of the activation."""

    columns: int
    """Columns of a pair that a program takes."""
    warps: int


LAUNCH_CONFIG = PairLaunchConfig(256, 1)
"""One warp adds up all ranks of a column, so that there are no barriers; and all programs of 64
tokens run at once.
"""


class DownRanks(NamedTuple):
    """The ranks of each pair's activation for down, times the pair's share."""

    ranks: torch.Tensor
    """[1, T * k * sums, ranks] float32: the sums of a pair follow one another, to be added up;
    undefined for a pair without ranks.
    """
    sums: int


class Folded(NamedTuple):
    """What adapters add to the sum of a token's pairs, with a B that their experts share."""

    down: DownRanks
    part: LoraWeights
    token_slots: torch.Tensor
    places: int
    """Entries of an adapter in a layer's table (`ExpertWeights.num_places`)."""
    layer: int

    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the kernel that sums, except the number of sums."""
        part = self.part
        return (
            self.down.ranks, self.token_slots, AdapterRows.of_b(part), max_rows(part), self.layer,
            part.table.shape[1], self.down.ranks.shape[2], self.places,
        )  # fmt: skip


NOTHING = (None, None, None, 0, 0, 0, 0, 0)
"""Arguments where nothing is added."""
FOLDED = ["most", "layer", "slots", "rank_width", "places"]
"""Arguments for whose values Triton does not specialise kernels."""


def can_pair(lora: ExpertAddition, inner: int) -> bool:
    """Whether `activate_pairs` takes these additions; gate and up must both have some."""
    places = [(part.column, part.out_features) for part in lora.w13]
    return places == [(0, inner), (inner, inner)] and can_tile((*lora.w13, *lora.w2))


def activate_pairs(
    both: torch.Tensor,
    ranks: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    lora: ExpertAddition,
    experts: int,
    options: LaunchOptions,
    *,
    is_share: bool = False,
) -> tuple[torch.Tensor, DownRanks | None]:
    """silu(gate) * up of each pair with what adapters add to both, and the pair's ranks for down.

    All arguments except `both` are read before the preceding launch is complete, so that either
    that one or this one must not begin early.

    Args:
        both: [T * k, 2 * I] float32: gate and up of each pair, without adapters.
        ranks: [1, T, ranks of gate and up] float32 if experts share A, else [1, T * k, ...].
        ids: [T, k] int32, each below E; if experts are a share also E, for experts of other ranks.
        shares: [T, k] float32.
        lora: Additions that `can_pair` accepts.
        experts: E.

    Returns:
        [T * k, I], dtype of the parameters, undefined for experts of other ranks; and the ranks,
        None if nothing is added to down.
    """
    (pairs, width), (gate, up) = both.shape, lora.w13
    width //= 2
    down = lora.w2[0] if lora.w2 else None
    inner = torch.empty((pairs, width), dtype=gate.b.dtype, device=both.device)
    columns = min(LAUNCH_CONFIG.columns, next_power_of_2(width))
    sums = cdiv(width, columns)
    to_down = None
    of_down: tuple[Any, ...] = (None, 0)
    if down is not None:
        size = (1, pairs * sums, down.max_rank)
        make = torch.zeros if is_share and down.is_b_shared else torch.empty
        to_down = DownRanks(make(size, dtype=torch.float32, device=both.device), sums)
        of_down = (AdapterRows.of_a(down), max_rows(down))
    _activate_kernel[(pairs, sums)](
        inner, None if to_down is None else to_down.ranks, both, ranks, lora.token_slots, ids,
        shares, AdapterRows.of_b(gate), max_rows(gate), AdapterRows.of_b(up), max_rows(up),
        *of_down,
        ranks.shape[2], lora.layer, gate.table.shape[1], experts + is_share, WIDTH=width,
        TOP_K=ids.shape[1], RANKS_TOP_K=pairs // ranks.shape[1], COLUMNS=columns, UNIT=_UNIT,
        num_warps=LAUNCH_CONFIG.warps, **options,
    )  # fmt: skip
    return inner, to_down


@triton.jit
def unit_of(
    rows: tl.tuple,
    start: int,
    column: tl.tensor,
    inside: tl.tensor,
    UNIT: tl.constexpr,
) -> tl.tensor:
    """Some columns of an adapter's ranks from `start` on: [UNIT, COLUMNS], 0 for ranks that do not
    exist.

    It loads two numbers of the table instead of sixteen, which would pass through shared memory
    before the pool's loads could begin. It loads them whether or not they are rows, without waiting
    for `count`.

    Args:
        rows: The pool [rows, 8, features], a pointer to the adapter's rows in its table, the number
            of these rows, the number that the table has room for, and the pool's columns.
        start: A multiple of UNIT.
        column: [COLUMNS].
        inside: [COLUMNS]: which columns exist.
        UNIT: A power of two, up to 16.
    """
    pool, table, count, most, features = rows
    rank = start % 8 + tl.arange(0, UNIT)
    number = start // 8
    low = tl.load(table + number, mask=number < most, other=0)
    high = tl.load(table + number + 1, mask=number + 1 < most, other=0)
    row = tl.where(rank < 8, low, high).to(tl.int64)
    at = pool + (row * 8 * features + rank % 8 * features)[:, None] + column[None, :]
    return tl.load(at, mask=(number + rank // 8 < count)[:, None] & inside[None, :], other=0.0)


@triton.jit
def times_unit(given: tl.tensor, tile: tl.tensor) -> tl.tensor:
    """[UNIT] times [UNIT, COLUMNS]: [COLUMNS] float32."""
    return tl.sum(tile.to(tl.float32) * given[:, None], axis=0)


@triton.jit
def summed_ranks(
    ranks: tl.tensor,
    count: tl.tensor,
    start: int,
    rank_width: int,
    SUMS: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    UNIT: tl.constexpr,
) -> tl.tensor:
    """A token's ranks from `start` on, summed over all its pairs: [UNIT] float32.

    Args:
        ranks: Pointer to the ranks of its first pair.
        count: Rows of its adapter.
        start: A multiple of UNIT.
        rank_width: Ranks that there is room for.
        SUMS: Number of sums of all its pairs.
        BLOCK_SUMS: A power of two, not less than SUMS.
    """
    number, rank = tl.arange(0, BLOCK_SUMS)[:, None], start + tl.arange(0, UNIT)[None, :]
    mask = (number < SUMS) & (rank < 8 * count)
    return tl.sum(tl.load(ranks + number * rank_width + rank, mask=mask, other=0.0), axis=0)


@triton.jit
def rows_of(counts: tl.tensor, group: tl.tensor, slot: tl.tensor) -> tl.tensor:
    """Rows that the adapter in a slot has for an expert; 0 for slot 0."""
    return tl.load(counts + group, mask=slot > 0, other=0)


@triton.jit
def _given_to(ranks: tl.tensor, count: tl.tensor, start: int, UNIT: tl.constexpr) -> tl.tensor:
    rank = start + tl.arange(0, UNIT)
    return tl.load(ranks + rank, mask=rank < 8 * count, other=0.0)


@triton.jit(do_not_specialize=["most0", "most1", "most2", "rank_width", "layer", "slots", "places"])
def _activate_kernel(
    inner: tl.tensor,
    to_down: tl.tensor,
    both: tl.tensor,
    ranks: tl.tensor,
    token_slots: tl.tensor,
    ids: tl.tensor,
    shares: tl.tensor,
    of_gate: AdapterRows,
    most0: int,
    of_up: AdapterRows,
    most1: int,
    of_down: AdapterRows,
    most2: int,
    rank_width: int,
    layer: int,
    slots: int,
    places: int,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    RANKS_TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """Some columns of one pair, and their part of its ranks for down."""
    release_next()
    pair, part = tl.program_id(0), tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    slot = tl.load(token_slots + pair // TOP_K)
    expert = tl.load(ids + pair)
    share = tl.load(shares + pair)
    group = layer * slots + slot * places + expert
    count0 = rows_of(of_gate.counts, group, slot)
    count1 = rows_of(of_up.counts, group, slot)
    table0 = of_gate.table + group * most0
    table1 = of_up.table + group * most1
    gate_rows = of_gate.pool, table0, count0, most0, WIDTH
    up_rows = of_up.pool, table1, count1, most1, WIDTH
    # All loads for the first ranks, of which most adapters have no more, are issued before any of
    # them is used.
    gate_tile = unit_of(gate_rows, 0, column, inside, UNIT)
    up_tile = unit_of(up_rows, 0, column, inside, UNIT)
    count2 = 0
    if to_down is not None:
        count2 = rows_of(of_down.counts, group, slot)
        down_rows = of_down.pool, of_down.table + group * most2, count2, most2, WIDTH
        a_tile = unit_of(down_rows, 0, column, inside, UNIT)
    gate_ranks = ranks + (pair // RANKS_TOP_K).to(tl.int64) * rank_width
    up_ranks = gate_ranks + 8 * most0
    gate = times_unit(_given_to(gate_ranks, count0, 0, UNIT), gate_tile)
    up = times_unit(_given_to(up_ranks, count1, 0, UNIT), up_tile)
    for start in range(UNIT, 8 * tl.maximum(count0, count1), UNIT):
        gate_tile = unit_of(gate_rows, start, column, inside, UNIT)
        up_tile = unit_of(up_rows, start, column, inside, UNIT)
        gate += times_unit(_given_to(gate_ranks, count0, start, UNIT), gate_tile)
        up += times_unit(_given_to(up_ranks, count1, start, UNIT), up_tile)
    wait_for_last()
    gate_at = both + pair.to(tl.int64) * 2 * WIDTH + column
    gate += tl.load(gate_at, mask=inside, other=0.0)
    up += tl.load(gate_at + WIDTH, mask=inside, other=0.0)
    result = silu_and(gate, up).to(inner.dtype.element_ty)
    tl.store(inner + pair.to(tl.int64) * WIDTH + column, result, mask=inside)
    if to_down is not None:
        # Rounded, as the product reads it.
        weighed = result.to(tl.float32) * share
        to = to_down + (pair * tl.num_programs(1) + part).to(tl.int64) * (8 * most2)
        rank = tl.arange(0, UNIT)
        given = tl.sum(a_tile.to(tl.float32) * weighed[None, :], axis=1)
        tl.store(to + rank, given, mask=rank < 8 * count2)
        for start in range(UNIT, 8 * count2, UNIT):
            a_tile = unit_of(down_rows, start, column, inside, UNIT)
            given = tl.sum(a_tile.to(tl.float32) * weighed[None, :], axis=1)
            tl.store(to + start + rank, given, mask=start + rank < 8 * count2)
