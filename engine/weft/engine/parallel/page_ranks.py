"""Ranks of one host that divide the pages of their KV heads, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from weft.engine.parallel.segment import Segment
from weft.engine.parallel.shared import SharedGroup
from weft.kernels.ops.divided_pages.reference import merged_reference

_SLOT_FLOATS = 1 << 22
"""Most numbers that a rank exchanges at once. More are cut by rows."""
_TURNS = 2
"""Exchanges take turns with two memories. A rank that writes to one again has met the others since
they have read it.
"""


def memory_bytes(size: int) -> int:
    return _TURNS * size * _SLOT_FLOATS * 4


class HostPageRanks:
    """Implements `weft.kernels.ops.attention.spec.PageRanks` through shared memory. A call
    raises RanksLost if a rank is gone, or has not come in time.

    Args:
        group: The ranks that divide pages.
        memory: `memory_bytes(group.size)` bytes that all of them map.
    """

    has_one_pool = True

    def __init__(self, group: SharedGroup, memory: Segment) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        numbers = memory.bytes_at(0, memory_bytes(group.size))
        self._slots = torch.from_numpy(numbers).view(torch.float32).view(_TURNS, self.size, -1)
        self._turn = 0

    def gather(self, q: torch.Tensor) -> torch.Tensor:
        out = q.new_empty((q.shape[0], self.size, *q.shape[1:]))
        for rows, of_ranks in self._exchange(q):
            out[rows] = of_ranks.transpose(0, 1)
        return out.flatten(1, 2)

    def merge(
        self, values: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        heads = sums.shape[1] // self.size
        own = slice(self.rank * heads, (self.rank + 1) * heads)
        out = values.new_empty((values.shape[0], heads, values.shape[2]))
        for rows, of_ranks in self._exchange(torch.cat((values, sums.unsqueeze(2)), dim=2)):
            out[rows] = merged_reference(of_ranks[:, :, own, :-1], of_ranks[:, :, own, -1], sinks)
        return out

    def _exchange(self, values: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Pieces of the rows of `values`, each with all ranks' [size, rows, ...] float32, valid
        until the next piece.
        """
        shape, width = values.shape[1:], values[:1].numel()
        num_rows = _SLOT_FLOATS // max(1, width)
        for first in range(0, len(values), num_rows):
            rows = slice(first, min(first + num_rows, len(values)))
            count = rows.stop - first
            slots = self._slots[self._turn, :, : count * width].view(self.size, count, *shape)
            self._turn = 1 - self._turn
            slots[self.rank] = values[rows]
            self._group.meet()
            yield rows, slots
