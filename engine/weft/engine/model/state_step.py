"""What recurrent layers read and write in a step: blocks at page borders, and rings of inputs.

Of a request that brings positions [start, end), a layer begins with the block of a page border at
or before `start`. It computes again the positions between, whose inputs are in the ring of the
request's slot, then the new ones. Blocks are written at some of the borders that it passes:

    block       ring              new positions
    |-----------------------|-----------------|--------------------|
    border                start         another border            end
                                          a block is written here

A block is never written over while anything may read it, and the inputs of a position are written
once. So drafts that are not accepted need no undoing: the next step's `start` leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from weft.kernels.slot_states import LayerMemory, SlotRows, step_conv

FewRows = Callable[[SlotRows, LayerMemory, tuple[torch.Tensor, ...]], torch.Tensor]
"""Takes the first rows of a step, [T, *shape] of each part of the ring, through a layer's states in
place; see `weft.kernels.slot_states`. Returns what a `Scan` does.
"""


class Scan(Protocol):
    """The mathematics of a recurrent layer over ragged sequences; changes none of its arguments."""

    def __call__(
        self, inputs: Sequence[torch.Tensor], cu_lens: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Continues S sequences, N positions in all.

        Args:
            inputs: For each part of `StatePlane.ring`, [N, *shape] in the part's dtype.
            cu_lens: [S + 1] int64: where each sequence begins; each has at least one position.
            states: For each part of `StatePlane.parts`, [S, *shape]: before the first position.

        Returns:
            [N, ...]: outputs; and the states behind each sequence's last position, like `states`.
        """


class StatePools(NamedTuple):
    """The memory of a model's recurrent layers."""

    blocks: tuple[torch.Tensor, ...]
    """For each part of `StatePlane.parts`, [num_blocks, layers, *shape]; block 0 is zeros."""
    rings: tuple[torch.Tensor, ...]
    """For each part of `StatePlane.ring`, [slots + 1, ring_rows, layers, *shape]; position p lies
    in row p % ring_rows.
    """
    row_blocks: tuple[torch.Tensor, ...] = ()
    """For each part of `StatePlane.rows`, [num_blocks, 1, *shape]."""
    row_rings: tuple[torch.Tensor, ...] = ()
    """The same of rings, [slots + 1, ring_rows, 1, *shape]."""
    found: tuple[torch.Tensor, ...] = ()
    """On a GPU, for each part of `StatePlane.found`, like rings."""


class StateRound(NamedTuple):
    """Sequences that one call of a `Scan` continues, at most one of each request."""

    rows: torch.Tensor | None
    """[N] int64: rows of the gathered ring rows followed by the step's rows; None: all in order."""
    cu_lens: torch.Tensor
    """[S + 1] int64."""
    begins: torch.Tensor
    """[S] int64: blocks with which they begin; in rounds after the first, sequences of the round
    before.
    """
    kept: torch.Tensor
    """[W] int64: sequences whose last states are written to blocks."""
    blocks: torch.Tensor
    """[W] int64: these blocks, all different."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStep:
    """The states of a step's requests. All tensors live on the model's device."""

    pools: StatePools
    ring_slots: torch.Tensor
    """[M] int64: slot of each ring row that is read."""
    ring_rows: torch.Tensor
    """[M] int64: its row in the slot's ring."""
    rounds: tuple[StateRound, ...]
    """Together they have each row of the step once, but for those of `few`."""
    new_rows: torch.Tensor
    """[K] int64: rows of the step whose inputs later steps need."""
    new_slots: torch.Tensor
    """[K] int64: their slots."""
    new_ring_rows: torch.Tensor
    """[K] int64: their rows in these slots' rings, all different for one slot."""
    few: SlotRows | None = None
    """The first requests, where the device takes them through the states by itself; the fields
    above are of the others, and count rows from these on.
    """
    num_few: int = 0
    """Rows of these requests, and padding."""

    def run(
        self,
        layer: int,
        inputs: Sequence[torch.Tensor],
        scan: Scan,
        few_rows: FewRows | None = None,
    ) -> torch.Tensor:
        """Runs a recurrent layer: reads and writes blocks and rings.

        Args:
            layer: Index of the layer in the state plane.
            inputs: For each part of `StatePlane.ring`, [T, *shape], of the step's rows.
            scan: The layer's mathematics.
            few_rows: The same in place, for `few`.

        Returns:
            [T, ...]: outputs of the step's rows.
        """
        if self.few is None:
            return self._scan(layer, inputs, scan)
        assert few_rows is not None, "a layer on a GPU has both forms"
        memory = LayerMemory(
            tuple(pool[:, layer] for pool in self.pools.blocks),
            tuple(pool[:, :, layer] for pool in self.pools.rings),
            tuple(pool[:, :, layer] for pool in self.pools.found),
        )
        first = few_rows(self.few, memory, tuple(part[: self.num_few] for part in inputs))
        if not self.rounds:
            return first
        rest = self._scan(layer, [part[self.num_few :] for part in inputs], scan)
        return torch.cat([first, rest])

    def _scan(self, layer: int, inputs: Sequence[torch.Tensor], scan: Scan) -> torch.Tensor:
        """`run` of the rows behind those of `few`."""
        blocks, rings = self.pools.blocks, self.pools.rings
        num_old = self.ring_slots.shape[0]
        gathered = [new.to(ring.dtype) for ring, new in zip(rings, inputs, strict=True)]
        if num_old:
            olds = [ring[self.ring_slots, self.ring_rows, layer] for ring in rings]
            gathered = [torch.cat(both) for both in zip(olds, gathered, strict=True)]
        outputs: torch.Tensor | None = None
        states: Sequence[torch.Tensor] = ()
        for number, part in enumerate(self.rounds):
            begins = [pool[part.begins, layer] for pool in blocks]
            if number:
                begins = [state.index_select(0, part.begins) for state in states]
            if part.rows is None:
                outputs, states = scan(gathered, part.cu_lens, begins)
            else:
                rows = [each.index_select(0, part.rows) for each in gathered]
                made, states = scan(rows, part.cu_lens, begins)
                if outputs is None:
                    outputs = made.new_empty((gathered[0].shape[0], *made.shape[1:]))
                outputs.index_copy_(0, part.rows, made)
            if part.kept.shape[0]:
                for pool, state in zip(blocks, states, strict=True):
                    pool[part.blocks, layer] = state.index_select(0, part.kept).to(pool.dtype)
        for ring, new in zip(rings, inputs, strict=True):
            kept = new.index_select(0, self.new_rows).to(ring.dtype)
            ring[self.new_slots, self.new_ring_rows, layer] = kept
        assert outputs is not None, "a step has rows"
        return outputs[num_old:]

    def rows_before(self, rows: torch.Tensor) -> torch.Tensor:
        """Keeps the step's rows as `StatePlane.rows` says, and returns the row of each one's
        request before it, [T, H] -> [T, H]; zeros before position 0.
        """
        of_rows = StatePools(self.pools.row_blocks, self.pools.row_rings)
        return replace(self, pools=of_rows).run(0, (rows,), _last_rows, _rows_before)


def _rows_before(
    few: SlotRows, memory: LayerMemory, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """`_last_rows` in place: a convolution that takes the row before alone."""
    (rows,), width = inputs, inputs[0].shape[1]
    weight = torch.zeros((2, width), dtype=torch.float32, device=rows.device)
    weight[0] = 1.0
    tails = LayerMemory(tuple(block[..., None] for block in memory.blocks), memory.rings)
    return step_conv(weight, None, few, tails, rows)


def _last_rows(
    inputs: Sequence[torch.Tensor], cu_lens: torch.Tensor, states: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """A `Scan` whose state is the last row and whose output the row before."""
    (rows,), (before,) = inputs, states
    shifted = rows.roll(1, dims=0)
    shifted[cu_lens[:-1]] = before.to(rows.dtype)
    return shifted, (rows[cu_lens[1:] - 1],)
