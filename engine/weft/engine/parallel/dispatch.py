"""Experts of a layer over engines that each have rows of their own.

Each rank has whole experts, and computes them for the rows of all ranks. In each layer a rank
writes its rows to memory that all of them map, together with the experts that its router chose and
their shares. All ranks meet, compute, write what their experts add to each row, and meet again.
Then each adds up what its rows get, in the order of the ranks.

A rank sends its rows in one of two forms, which the others need not know: *gathered*, all rows once
for all ranks, or *dispatched*, to each rank the rows that it has experts for, each row once a rank.
Both give equal bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from weft.engine.parallel.lockstep import Lockstep, lockstep_bytes
from weft.engine.parallel.segment import Segment
from weft.kernels.ops.moe import moe
from weft.kernels.ops.moe.spec import ExpertWeights, Routing

PIECE_ROWS = 256
"""Most rows that a rank brings to one meeting. Longer steps meet several times a layer."""
LEAST_RANKS, LEAST_ROWS = 4, 32
"""Ranks and rows from which rows are dispatched (`bench/expert_exchange.py`): with fewer ranks
nearly every row has experts on each, and fewer rows cost less than choosing among them.
"""
_PAGE = 4096


class ExchangeShape(NamedTuple):
    size: int
    """Ranks."""
    hidden: int
    top_k: int
    num_experts: int
    """Of all ranks."""

    @property
    def num_rows(self) -> int:
        """Rows of a rank's part of the memory."""
        return self.size * PIECE_ROWS

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the header, the rows, their experts, the shares, and of what experts add."""
        rows, pairs = self.num_rows * self.hidden * 4, self.num_rows * self.top_k * 4
        header = (1 + 2 * self.size) * 8
        return tuple(-(-size // _PAGE) * _PAGE for size in (header, rows, pairs, pairs, rows))

    @property
    def num_bytes(self) -> int:
        """Bytes of the segment, the counters of the ranks included."""
        return lockstep_bytes(self.size) + self.size * sum(self.sizes)


class _Part:
    """What one rank writes: its rows to all others, and what its experts add to theirs."""

    def __init__(self, segment: Segment, rank: int, shape: ExchangeShape) -> None:
        begin = lockstep_bytes(shape.size) + rank * sum(shape.sizes)
        parts: list[torch.Tensor] = []
        for size in shape.sizes:
            parts.append(torch.from_numpy(segment.bytes_at(begin, size)))
            begin += size
        header, self._x, ids, shares, self._added = parts
        numbers = header[: (1 + 2 * shape.size) * 8].view(torch.int64)
        self.header = numbers.numpy()
        """Rows that are left for later meetings; then, for each rank, the first row of those for it
        and their number.
        """
        self._hidden = shape.hidden
        of_pairs = shape.num_rows * shape.top_k
        self.ids = ids.view(torch.int32)[:of_pairs].view(-1, shape.top_k)
        self.shares = shares.view(torch.float32)[:of_pairs].view(-1, shape.top_k)

    def x(self, dtype: torch.dtype) -> torch.Tensor:
        return self._rows(self._x, dtype)

    def added(self, dtype: torch.dtype) -> torch.Tensor:
        return self._rows(self._added, dtype)

    def _rows(self, memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        typed = memory.view(dtype)
        return typed[: typed.numel() // self._hidden * self._hidden].view(-1, self._hidden)

    def rows_for(self, rank: int) -> slice:
        begin, count = self.header[1 + 2 * rank : 3 + 2 * rank].tolist()
        return slice(begin, begin + count)

    def num_for(self, rank: int) -> int:
        return int(self.header[2 + 2 * rank])


class ExpertDispatch(ABC):
    """Implements `weft.kernels.ops.moe.spec.ExpertExchange`."""

    def __init__(self, lockstep: Lockstep, shape: ExchangeShape, device: torch.device) -> None:
        self.lockstep = lockstep
        self.layers: Sequence[ExpertWeights] = ()
        """This rank's experts of each layer that has some, in the order of the layers."""
        self._shape = shape
        self._device = device
        self._num_done = 0

    @property
    def rank(self) -> int:
        return self.lockstep.rank

    @property
    def size(self) -> int:
        return self._shape.size

    @abstractmethod
    def __call__(
        self, x: torch.Tensor, routing: Routing, w: ExpertWeights, residual: torch.Tensor | None
    ) -> torch.Tensor: ...

    @abstractmethod
    def sent_rows(self) -> tuple[int, int]:
        """Rows of all layers so far that were gathered, and those dispatched, each counted once a
        rank it went to.
        """

    def _begin_layer(self, w: ExpertWeights) -> None:
        assert self.layers[self._num_done] is w, "layers compute in their order"
        self._num_done += 1

    def finish(self) -> None:
        """Takes part, without rows, in all layers that this step has not computed."""
        while self._num_done < len(self.layers) and not self.lockstep.is_alone:
            w = self.layers[self._num_done]
            pairs = torch.empty((0, self._shape.top_k), device=self._device)
            nothing = Routing(pairs.to(torch.int32), pairs)
            x = torch.empty((0, self._shape.hidden), dtype=w.dtype, device=self._device)
            self(x, nothing, w, None)
        self._num_done = 0


class HostDispatch(ExpertDispatch):
    """Rows that ranks on a CPU exchange in shared memory.

    Args:
        least_rows: Rows of a meeting from which they are dispatched; None: as measured.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        segment: Segment,
        shape: ExchangeShape,
        least_rows: int | None = None,
    ) -> None:
        super().__init__(lockstep, shape, torch.device("cpu"))
        self._parts = [_Part(segment, rank, shape) for rank in range(shape.size)]
        self._own = self._parts[lockstep.rank]
        self.num_gathered_rows = self.num_dispatched_rows = 0
        if least_rows is None:
            least_rows = LEAST_ROWS if shape.size >= LEAST_RANKS else PIECE_ROWS + 1
        self._least_rows = least_rows

    def __call__(
        self, x: torch.Tensor, routing: Routing, w: ExpertWeights, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Raises RanksLost if a rank is gone, or has not come in time."""
        if self.lockstep.is_alone:
            return moe(x, _placed(routing, w), w, residual)
        self._begin_layer(w)
        out = torch.empty_like(x)
        begin, rows, is_last = 0, x.shape[0], False
        while not is_last:
            own = slice(begin, min(begin + PIECE_ROWS, rows))
            piece = Routing(*(part[own] for part in routing))
            total, is_last = self._exchange(x[own], piece, w, rows - own.stop)
            out[own] = total if residual is None else total.add_(residual[own])
            begin = own.stop
        return out

    def sent_rows(self) -> tuple[int, int]:
        return self.num_gathered_rows, self.num_dispatched_rows

    def _exchange(
        self, x: torch.Tensor, routing: Routing, w: ExpertWeights, num_left: int
    ) -> tuple[torch.Tensor, bool]:
        """What all ranks' experts add, [T, H] float32, and whether no rank has further rows."""
        sent = self._send(x, routing)
        self._own.header[0] = num_left
        self.lockstep.meet()
        is_last = not any(part.header[0] for part in self._parts)
        counts = [[part.num_for(rank) for part in self._parts] for rank in range(self._shape.size)]
        self._compute(x, routing, sent[self.rank], w)
        self.lockstep.meet()
        total = torch.zeros(x.shape, dtype=torch.float32)
        for rank, (rows, part) in enumerate(zip(sent, self._parts, strict=True)):
            begin = sum(counts[rank][: self.rank])
            added = part.added(x.dtype)[begin : begin + counts[rank][self.rank]]
            if rows is None:
                total += added
            else:
                total.index_add_(0, rows, added.float())
        return total, is_last

    def _send(self, x: torch.Tensor, routing: Routing) -> list[torch.Tensor | None]:
        """Writes the rows for other ranks. Returns the numbers of each rank's rows; None: all."""
        own, (ids, shares) = self._own, routing
        count, size = x.shape[0], self._shape.size
        if count < self._least_rows:
            own.header[1:] = [0, count] * size
            own.x(x.dtype)[:count], own.ids[:count], own.shares[:count] = x, ids, shares
            self.num_gathered_rows += count * (size - 1)
            return [None] * size
        owners = ids.div(self._shape.num_experts // size, rounding_mode="floor")
        sent: list[torch.Tensor | None] = []
        begin = 0
        for rank in range(size):
            rows = (owners == rank).any(dim=1).nonzero().view(-1)
            sent.append(rows)
            own.header[1 + 2 * rank : 3 + 2 * rank] = begin, len(rows)
            if rank == self.rank:
                continue
            there = slice(begin, begin + len(rows))
            torch.index_select(x, 0, rows, out=own.x(x.dtype)[there])
            torch.index_select(ids, 0, rows, out=own.ids[there])
            torch.index_select(shares, 0, rows, out=own.shares[there])
            begin = there.stop
        self.num_dispatched_rows += begin
        return sent

    def _compute(
        self, x: torch.Tensor, routing: Routing, rows: torch.Tensor | None, w: ExpertWeights
    ) -> None:
        """Computes this rank's experts for all rows that were sent to it. `rows`: its own ones."""
        found: list[tuple[torch.Tensor, ...]] = []
        for rank, part in enumerate(self._parts):
            if not part.num_for(self.rank):
                continue
            if rank == self.rank:
                mine = (x, *routing)
                found.append(mine if rows is None else tuple(each[rows] for each in mine))
            else:
                there = part.rows_for(self.rank)
                found.append((part.x(x.dtype)[there], part.ids[there], part.shares[there]))
        if not found:
            return
        all_x, ids, shares = (torch.cat(parts) for parts in zip(*found, strict=True))
        added = moe(all_x, _placed(Routing(ids, shares), w), w)
        self._own.added(x.dtype)[: len(added)] = added


def _placed(routing: Routing, w: ExpertWeights) -> Routing:
    assert w.placement is not None
    return Routing(w.placement[routing.ids], routing.weights)
