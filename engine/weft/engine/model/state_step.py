"""Reads and writes of recurrent layers in a step: blocks at page borders, and rings of inputs.

A request brings positions [start, end). A layer begins with the block of a page border at or before
`start`. It computes the positions between the border and `start` again, from inputs that the ring
of the request's slot has kept, and then the new positions. It writes blocks at some of the borders
that it passes:

    block       ring              new positions
    |-----------------------|-----------------|--------------------|
    border                start         another border            end
                                          a block is written here

A block is never overwritten while a step may read it, and the inputs of a position are written
once. So rejected drafts need no undoing: the next step's `start` is at most their first position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.slot_states import step_conv
from weft.kernels.ops.slot_states.spec import LayerMemory, SlotRows

FewRows = Callable[[SlotRows, LayerMemory, tuple[torch.Tensor, ...]], torch.Tensor]
"""Computes the first rows of a step, [T, ...] of each input, and updates a layer's states in place
(`weft.kernels.ops.slot_states`). Returns the outputs, as a `Scan` does.
"""
RingInputs = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""Turns a layer's inputs, [T, ...], into those of a `Scan`."""
Rows = torch.Tensor | slice
"""Row numbers, int64; or a range of consecutive rows, which are read without a copy."""


class Scan(Protocol):
    """The mathematics of a recurrent layer over ragged sequences. It changes no argument."""

    def __call__(
        self, inputs: Sequence[torch.Tensor], sequences: Sequences, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Continues S sequences, N positions in all.

        Args:
            inputs: For each part of `StatePlane.ring`, [N, *shape] in the part's dtype.
            sequences: Where each sequence's positions lie.
            states: For each part of `StatePlane.parts`, [S, *shape]: before the first position.

        Returns:
            Outputs, [N, ...], and the states after each sequence's last position, like `states`.
        """


@dataclass(frozen=True)
class StatePools:
    """The memory of a model's recurrent layers."""

    blocks: tuple[torch.Tensor, ...]
    """For each part of `StatePlane.parts`, [num_blocks, layers, *shape]; block 0 is zeros."""
    rings: tuple[torch.Tensor, ...]
    """For each part of `StatePlane.ring`, [slots + 1, ring_rows, layers, *shape]. Position p lies
    in row p % ring_rows.
    """
    row_blocks: tuple[torch.Tensor, ...] = ()
    """For each part of `StatePlane.rows`, [num_blocks, 1, *shape]."""
    row_rings: tuple[torch.Tensor, ...] = ()
    """For each part of `StatePlane.rows` in rings, [slots + 1, ring_rows, 1, *shape]."""
    found: tuple[torch.Tensor, ...] = ()
    """On a GPU: for each part of `StatePlane.found`, the same shape as in `rings`."""

    @cached_property
    def of_layers(self) -> tuple[LayerMemory, ...]:
        return tuple(
            LayerMemory(
                tuple(pool[:, layer] for pool in self.blocks),
                tuple(pool[:, :, layer] for pool in self.rings),
                tuple(pool[:, :, layer] for pool in self.found),
            )
            for layer in range(self.blocks[0].shape[1])
        )

    @cached_property
    def of_rows(self) -> StatePools:
        """The memory of `StatePlane.rows`, in the form of one layer's."""
        return StatePools(self.row_blocks, self.row_rings)


class StateRound(NamedTuple):
    """Sequences that one call of a `Scan` continues, at most one per request."""

    sequences: Sequences
    """The sequence to which each of the next rows of `StateStep.order` belongs."""
    begins: Rows
    """[S] int64: in the first round the block with which each sequence begins; in later rounds the
    sequence of the round before that it continues.
    """
    kept: Rows
    """[W] int64: sequences whose last states are written to blocks."""
    blocks: torch.Tensor
    """[W] int64: these blocks, all different."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStep:
    """The states of a step's requests. All tensors are on the model's device."""

    pools: StatePools
    ring_slots: torch.Tensor
    """[M] int64: slot of each ring row that is read."""
    ring_rows: torch.Tensor
    """[M] int64: its row in the slot's ring."""
    order: Rows
    """[N]: the ring rows that are read, followed by the step's rows, in the order of `rounds`."""
    rounds: tuple[StateRound, ...]
    """Together they have each of the rows of `order` once."""
    back: Rows
    """[T]: position of each step row's output among the outputs of `few`, followed by those of
    `rounds`.
    """
    new_rows: Rows
    """[K] int64: rows of the step whose inputs later steps need."""
    new_slots: torch.Tensor
    """[K] int64: their slots."""
    new_ring_rows: torch.Tensor
    """[K] int64: their rows in these slots' rings, all different for one slot."""
    few: SlotRows | None = None
    """The first requests, which have few rows and which the device continues by itself. All fields
    above except `back` describe the requests that follow, and count rows from their first row on.
    """
    num_few: int = 0
    """Rows of `few`, padding included."""

    def run(
        self,
        layer: int,
        inputs: Sequence[torch.Tensor],
        scan: Scan,
        few_rows: FewRows | None = None,
        ring_inputs: RingInputs | None = None,
    ) -> torch.Tensor:
        """Runs a recurrent layer: reads and writes blocks and rings. Returns the outputs of the
        step's rows, [T, ...].

        Args:
            layer: Index of the layer in the state plane.
            inputs: [T, ...] each, of the step's rows.
            few_rows: Does the work of `scan` in place, for `few`.
            ring_inputs: Turns the inputs into those of `scan`; None: they are equal.
        """
        memory, outputs = self.pools.of_layers[layer], list[torch.Tensor]()
        if self.few is not None:
            assert few_rows is not None, "a layer on a GPU has both forms"
            first = tuple(part[: self.num_few] for part in inputs)
            outputs.append(few_rows(self.few, memory, first))
            inputs = [part[self.num_few :] for part in inputs]
        if self.rounds:
            given = inputs if ring_inputs is None else ring_inputs(inputs)
            outputs += self._scan(memory, given, scan)
        return _at(outputs[0] if len(outputs) == 1 else torch.cat(outputs), self.back)

    def _scan(
        self, memory: LayerMemory, inputs: Sequence[torch.Tensor], scan: Scan
    ) -> list[torch.Tensor]:
        gathered = [new.to(ring.dtype) for ring, new in zip(memory.rings, inputs, strict=True)]
        if self.ring_slots.shape[0]:
            olds = [ring[self.ring_slots, self.ring_rows] for ring in memory.rings]
            gathered = [torch.cat(both) for both in zip(olds, gathered, strict=True)]
        gathered = [_at(each, self.order) for each in gathered]
        outputs, end = list[torch.Tensor](), 0
        states: Sequence[torch.Tensor] = ()
        for part in self.rounds:
            begin, end = end, end + part.sequences.num_rows
            if outputs:
                begins = [_at(state, part.begins) for state in states]
            else:
                begins = [pool[part.begins] for pool in memory.blocks]
            rows = [each[begin:end] for each in gathered]
            made, states = scan(rows, part.sequences, begins)
            outputs.append(made)
            if part.blocks.shape[0]:
                for pool, state in zip(memory.blocks, states, strict=True):
                    pool[part.blocks] = _at(state, part.kept).to(pool.dtype)
        if self.new_slots.shape[0]:
            for ring, new in zip(memory.rings, inputs, strict=True):
                ring[self.new_slots, self.new_ring_rows] = _at(new, self.new_rows).to(ring.dtype)
        return outputs

    def rows_before(self, rows: torch.Tensor) -> torch.Tensor:
        """For each row, the row of its request at the position before: [T, H] -> [T, H], zeros
        before position 0. Keeps the step's rows as `StatePlane.rows` says.
        """
        return replace(self, pools=self.pools.of_rows).run(0, (rows,), _last_rows, _rows_before)


def _at(each: torch.Tensor, rows: Rows) -> torch.Tensor:
    return each[rows] if isinstance(rows, slice) else each.index_select(0, rows)


def _rows_before(
    few: SlotRows, memory: LayerMemory, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """`_last_rows` in place, as a convolution over the row before."""
    (rows,), width = inputs, inputs[0].shape[1]
    weight = torch.zeros((2, width), dtype=torch.float32, device=rows.device)
    weight[0] = 1.0
    tails = LayerMemory(tuple(block[..., None] for block in memory.blocks), memory.rings)
    return step_conv(weight, None, few, tails, rows)


def _last_rows(
    inputs: Sequence[torch.Tensor], sequences: Sequences, states: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """A `Scan` whose state is the last row and whose output is the row before."""
    (rows,), (before,), cu_lens = inputs, states, sequences.cu_lens
    shifted = rows.roll(1, dims=0)
    shifted[cu_lens[:-1]] = before.to(rows.dtype)
    return shifted, (rows[cu_lens[1:] - 1],)
