"""Low-rank additions within the kernel that reads a product next, which saves a launch.

It serves few tokens: each token reads its own rows of B, even if others read the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.lora.spec import LoraWeights
from weft.kernels.shared.launch_sizes import next_power_of_2

MAX_FOLDED_ROWS = 128
"""Most rows for which folding pays: reading B once per token then costs less than a launch."""
FOLDED = ["rank_width", "entry_width", "stride"]
"""Arguments for whose values Triton does not specialise kernels."""


class Folded(NamedTuple):
    """An addition to a product of T tokens whose columns all belong to one part."""

    ranks: torch.Tensor
    """[sums, T, ranks] float32 or dtype of the product; the sums are to be added up."""
    entries: torch.Tensor
    """[1, T, ...] int32, from `new_entries`."""
    part: LoraWeights
    is_alone: bool = False
    """Whether the consumer must not start early, because it waits for another stream."""

    @property
    def sums(self) -> tuple[int, int]:
        """Number of partial sums, and the smallest power of two that is not less."""
        count = self.ranks.shape[0]
        return count, next_power_of_2(count)

    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the kernel that reads the product."""
        _, tokens, width = self.ranks.shape
        return self.ranks, self.entries, self.part.b, width, self.entries.shape[2], tokens * width


NOTHING = (None, None, None, 0, 0, 0)
"""Arguments for a product to which nothing is added."""


def ranks_at_once(columns: int, element_bytes: int) -> int:
    """Number of ranks that a program multiplies by B at once, so that they fit the registers of at
    most 16 warps. `columns`, those of the program, are a power of two.
    """
    return max(1, min(16, (1 << 17) // (columns * element_bytes)))


@triton.jit
def added_to_row(
    ranks: tl.tensor,
    entry: tl.tensor,
    b: tl.tensor,
    features: int,
    column: tl.tensor,
    mask: tl.tensor,
    stride: int,
    SUMS: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> tl.tensor:
    """The addition to some columns of a row's product: [COLUMNS] float32.

    Args:
        ranks: Pointer to the row's ranks, of the first sum.
        entry: Pointer to the row's entry.
        b: [rows, 8, features].
        column: [COLUMNS].
        mask: [COLUMNS].
        stride: Distance between sums of the ranks.
        BLOCK_SUMS: A power of two, not less than SUMS.
        AT_ONCE: From `ranks_at_once`.
    """
    count = tl.load(entry)
    added = ranks, entry, count, b, features, column, mask, stride
    total = _times_some(added, 0, SUMS, BLOCK_SUMS, AT_ONCE)
    for start in range(AT_ONCE, 8 * count, AT_ONCE):
        total += _times_some(added, start, SUMS, BLOCK_SUMS, AT_ONCE)
    return total


@triton.jit
def _times_some(
    added: tl.tuple,
    start: int,
    SUMS: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> tl.tensor:
    """The part of AT_ONCE ranks from `start` on. `added`: the arguments of `added_to_row` in their
    order, with the entry's count after the entry.
    """
    ranks, entry, count, b, features, column, mask, stride = added
    rank = start + tl.arange(0, AT_ONCE)
    is_rank = rank < 8 * count
    # Entries beyond the count are not used.
    row = tl.load(entry + 1 + rank // 8).to(tl.int64) * 8 + rank % 8
    # This load runs while the ranks are added up.
    at = b + row[:, None] * features + column[None, :]
    tile = tl.load(at, mask=is_rank[:, None] & mask[None, :], other=0.0)
    number = tl.arange(0, BLOCK_SUMS)[:, None]
    at = ranks + number * stride + rank[None, :]
    given = tl.load(at, mask=(number < SUMS) & is_rank[None, :], other=0.0)
    given = tl.sum(given.to(tl.float32), axis=0)
    return tl.sum(tile.to(tl.float32) * given[:, None], axis=0)
