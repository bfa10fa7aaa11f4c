"""Units of low-rank additions: 16 ranks each, of one of a tile's adapters, one after another.

The tokens of a tile are multiplied by all units of the tile; each token uses those of its adapter.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from weft.kernels.ops.lora.spec import LoraWeights

UNIT = 16
"""Ranks of a unit, the fewest that tensor cores multiply. An adapter has as many units as it
needs.
"""
NOTED = 128
"""Ranks whose rows are written at once; all kernels take that many or fewer at once."""


class LoraLaunchConfig(NamedTuple):
    """Launch shape of a kernel."""

    block: int
    """Elements of K, or columns, that are taken at once."""
    group: int
    """Ranks that are taken at once, a power of two from UNIT to NOTED."""
    warps: int
    blocks: int = 1
    """Blocks of columns that a program takes one after another."""
    sharers: int = 1
    """Number of programs that share a tile's groups of ranks."""
    stages: int = 1
    registers: int | None = None
    """Most registers of a thread; with more, too few programs would run at once."""

    def options(self) -> dict[str, int]:
        most = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **most}


def tile_of(tokens: int) -> int:
    """Number of tokens that are multiplied together."""
    if tokens <= 256:
        return 16
    return 32 if tokens <= 1024 else 64


def unit_ranks(part: LoraWeights) -> int:
    """Most ranks of a token in this part, in whole units."""
    return -(-part.max_rank // UNIT) * UNIT


@triton.jit
def units_of(
    adapters: tl.tuple,
    start: int,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Owners [GROUP / RANKS] of the units from rank `start` on, and rows [GROUP] of the pool's
    ranks.

    An owner is slot * 1024 + the unit's first rank, or 0 for no owner; a row is -1 where there is
    no rank.

    Args:
        adapters: The table of rows and its width; of each of a tile's tokens the slot, the number
            of its rows, its adapter's first unit in the tile, and the number of its units.
    """
    table, max_rows, slot, count, begin, units = adapters
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
    """[T, UNITS, RANKS] each: offsets of the tokens' ranks in some units, and whether these ranks
    are the token's own.

    Args:
        ranks: [T] pointers to the tokens' first ranks of a part.
        slot: [T].
        owner: [UNITS], from `units_of`.
    """
    # Marked for the compiler as a multiple of RANKS, so that sixteen are loaded or stored at once.
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
    """[T, UNITS * RANKS]: the tokens' ranks in some units, 0 in units of other adapters.

    Args:
        ranks: [T] pointers to the tokens' first ranks of a part, of the first sum.
        slot: [T].
        owner: [UNITS], from `units_of`.
        stride: Distance between sums of the ranks.
        BLOCK_SUMS: A power of two, not less than SUMS.
    """
    at, mask = own_ranks(ranks, slot, owner, RANKS)
    # All sums in one load, since the compiler would wait for each of several loads before the next
    # one. A single sum is loaded alike, since the compiler would otherwise wait right after the
    # load.
    number = tl.arange(0, BLOCK_SUMS)[:, None, None, None]
    at_all = at[None, :, :, :] + number * stride
    given = tl.load(at_all, mask=mask[None, :, :, :] & (number < SUMS), other=0.0)
    total = tl.sum(given, axis=0)
    return tl.reshape(total, [slot.shape[0], owner.shape[0] * RANKS])


@triton.jit
def store_units(
    ranks: tl.tensor, slot: tl.tensor, owner: tl.tensor, values: tl.tensor, RANKS: tl.constexpr
) -> None:
    """Stores each token's part of `values`, [T, UNITS * RANKS], with the padding after its
    adapter's ranks.
    """
    at, mask = own_ranks(ranks, slot, owner, RANKS)
    values = tl.reshape(values, at.shape)
    tl.store(at, values.to(ranks.dtype.element_ty), mask=mask)
