"""Units of low-rank additions: 16 ranks of one of a tile's adapters, which follow each other.

Tokens of a tile are multiplied with all units of the tile; each uses what is its adapter's.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from weft.kernels.lora import LoraWeights

UNIT = 16
"""Ranks of a unit: the least that tensor cores multiply. An adapter has as many as it needs."""
NOTED = 128
"""Ranks of which rows are noted at once; all kernels take that many or fewer at once."""


class LoraLaunchConfig(NamedTuple):
    """Launch shape of a kernel."""

    block: int
    """Elements of K, or columns, that are taken at once."""
    group: int
    """Ranks that are taken at once, a power of two, UNIT to NOTED."""
    warps: int
    blocks: int = 1
    """Blocks of columns that a program takes one after the other."""
    sharers: int = 1
    """Programs that share a tile's groups of ranks."""
    stages: int = 1
    registers: int | None = None
    """Most registers per thread; with more, too few programs run at once."""

    def options(self) -> dict[str, int]:
        """Options of the launch."""
        most = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **most}


def tile_of(tokens: int) -> int:
    """Tokens that are multiplied together."""
    if tokens <= 256:
        return 16
    return 32 if tokens <= 1024 else 64


def unit_ranks(part: LoraWeights) -> int:
    """Ranks that a token has room for, whole units."""
    return -(-part.max_rank // UNIT) * UNIT


@triton.jit
def units_of(
    table: tl.tensor,
    max_rows: tl.tensor,
    slot: tl.tensor,
    count: tl.tensor,
    begin: tl.tensor,
    units: tl.tensor,
    start: int,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Owners [GROUP / RANKS] of units from rank `start` on, and rows [GROUP] of the pool's ranks.

    An owner is slot * 1024 + the unit's first rank, 0 for nobody; a row is -1 where no rank is.
    """
    unit = start // RANKS + tl.arange(0, GROUP // RANKS)[:, None]
    is_its = (unit >= begin[None, :]) & (unit < (begin + units)[None, :])
    its_slot = tl.sum(tl.where(is_its, slot[None, :], 0), axis=1)
    first = tl.sum(tl.where(is_its, (unit - begin[None, :]) * RANKS, 0), axis=1)
    limit = tl.sum(tl.where(is_its, 8 * count[None, :], 0), axis=1)
    rank = first[:, None] + tl.arange(0, RANKS)[None, :]
    is_rank = rank < limit[:, None]
    at = table + its_slot[:, None] * max_rows + rank // 8
    row = tl.load(at, mask=is_rank, other=0) * 8 + rank % 8
    return its_slot * 1024 + first, tl.reshape(tl.where(is_rank, row, -1), [GROUP])


@triton.jit
def own_ranks(
    ranks: tl.tensor,
    slot: tl.tensor,
    owner: tl.tensor,
    RANKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Offsets of the tokens' ranks in some units, and whether the ranks are the token's own: [T,
    UNITS, RANKS].

    Args:
        ranks: [T] pointers to the tokens' first ranks of a part.
        slot: [T].
        owner: [UNITS]: see `units_of`.
    """
    # A multiple of RANKS, as the compiler sees: sixteen are loaded or stored at once.
    first = owner % 1024 // RANKS * RANKS
    at = ranks[:, None, None] + first[None, :, None] + tl.arange(0, RANKS)[None, None, :]
    is_own = (slot[:, None] == (owner // 1024)[None, :]) & (slot > 0)[:, None]
    return at, tl.broadcast_to(is_own[:, :, None], at.shape)


@triton.jit
def load_units(
    ranks: tl.tensor,
    slot: tl.tensor,
    owner: tl.tensor,
    stride: int,
    SUMS: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    RANKS: tl.constexpr,
) -> tl.tensor:
    """[T, UNITS * RANKS]: the tokens' ranks of some units, those of others' as 0.

    Args:
        ranks: [T] pointers to the tokens' first ranks of a part, of the first sum.
        slot: [T].
        owner: [UNITS]: see `units_of`.
        stride: From one sum of the ranks to the next one.
        SUMS: How many.
        BLOCK_SUMS: A power of two, not less.
    """
    at, mask = own_ranks(ranks, slot, owner, RANKS)
    # All at once, in one load: the compiler would wait for each of several before the next one. A
    # sum of one too, since it would move waiting up to right after the load otherwise.
    number = tl.arange(0, BLOCK_SUMS)[:, None, None, None]
    at_all = at[None, :, :, :] + number * stride
    given = tl.load(at_all, mask=mask[None, :, :, :] & (number < SUMS), other=0.0)
    total = tl.sum(given, axis=0)
    return tl.reshape(total, [slot.shape[0], owner.shape[0] * RANKS])


@triton.jit
def store_units(
    ranks: tl.tensor, slot: tl.tensor, owner: tl.tensor, values: tl.tensor, RANKS: tl.constexpr
) -> None:
    """Stores each token's part of `values` [T, UNITS * RANKS], padding beyond its adapter's ranks
    included.
    """
    at, mask = own_ranks(ranks, slot, owner, RANKS)
    values = tl.reshape(values, at.shape)
    tl.store(at, values.to(ranks.dtype.element_ty), mask=mask)
