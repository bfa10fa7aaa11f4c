"""Layers that keep a state of fixed size in place of K and V of all earlier rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from weft.contract.layout import StatePart, StatePlane
from weft.engine.model.layers.layer import Query, shape_of
from weft.engine.model.step import Step
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.pages.pool import PlaneInPage
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.slot_states.spec import LayerMemory, SlotRows
from weft.kernels.ops.stream.additions import Normed, Sum


class Projected(NamedTuple):
    """The part of a recurrent layer that is computed for each row by itself."""

    inputs: tuple[torch.Tensor, ...]
    """[T, ...] each: the inputs of the state, from which `ring_inputs` makes the ring's parts."""
    gate: torch.Tensor
    """[T, ...]: factor on the row's result, before its activation."""


@dataclass(eq=False, kw_only=True)
class RecurrentMixer(ABC):
    """A `Mixer` with a state: rows are projected, taken through the state, gated and projected
    back. All but the last projection happens in `write`, since a row's result depends on the rows
    before it.
    """

    kind: ClassVar[str]
    """Name of the state plane."""
    layer: int
    in_plane: int
    """Index among the layers of the state plane."""
    out_proj: LinearWeight
    """All heads, or channels, of this rank -> [hidden]."""
    dtype: str
    """Name of the model's dtype."""

    @property
    @abstractmethod
    def parts(self) -> tuple[StatePart, ...]:
        """Parts of the state in a block, as in `StatePlane.parts`."""

    @property
    @abstractmethod
    def ring(self) -> tuple[StatePart, ...]:
        """Parts of the ring, as in `StatePlane.ring`."""

    @property
    def found(self) -> tuple[StatePart, ...]:
        return ()

    @abstractmethod
    def project(self, x: Normed, step: Step) -> Projected:
        """Computes the part of the layer that needs no state."""

    def ring_inputs(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Turns `Projected.inputs` into the input of `scan`: [T, *shape] for each part of the
        ring.
        """
        return inputs

    @abstractmethod
    def scan(
        self, inputs: Sequence[torch.Tensor], sequences: Sequences, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Takes sequences of rows through their states: a `Scan`."""

    @abstractmethod
    def few_rows(
        self, rows: SlotRows, memory: LayerMemory, inputs: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """`scan` in place, on a GPU, from `Projected.inputs`: a `FewRows`."""

    @abstractmethod
    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The result of `scan`, [T, ...], and the gate -> [T, all heads], the input of the last
        projection.
        """

    def state_plane(self, layers: int) -> StatePlane:
        """The plane of `layers` layers of this shape."""
        parts, ring, found = self.parts, self.ring, self.found
        return StatePlane(name=self.kind, layers=layers, parts=parts, ring=ring, found=found)

    @property
    def has_own_kv(self) -> bool:
        return True

    def move(self, group: int, in_pool: int, plane: PlaneInPage | None = None) -> None:
        return

    def prepare(self, step: Step, rows: int, pool: torch.Tensor) -> Step:
        return step

    def write(self, x: Normed, step: Step, pool: torch.Tensor) -> Query:
        assert step.states is not None, "a model with recurrent layers has states"
        projected = self.project(x, step)
        forms = self.scan, self.few_rows, self.ring_inputs
        out = step.states.run(self.in_plane, projected.inputs, *forms)
        return Query(self.gated(out, projected.gate))

    def attend(self, query: Query, step: Step, pool: torch.Tensor) -> Sum:
        return Sum(query.q, self.out_proj, step.added("state_out", self.layer))

    def folds(self, rows: int, step: Step) -> bool:
        return False

    def shape_key(self) -> object:
        return type(self), shape_of(self.out_proj), self.parts


def by_head(whole: torch.Tensor, heads: int, widths: Sequence[int]) -> torch.Tensor:
    """Reorders rows that are sorted by kind, then head: [heads * sum(widths), ...] -> [heads,
    sum(widths), ...].

    Args:
        widths: Rows of one head of each kind.
    """
    kinds = torch.split(whole, [heads * width for width in widths])
    return torch.cat([torch.unflatten(kind, 0, (heads, -1)) for kind in kinds], dim=1)


def read_taps(weights: Weights, name: str, channels: int, taps: int) -> torch.Tensor:
    """The weight of a short convolution, [channels, taps] float32."""
    part = TensorSlice(f"{name}.weight", (channels, 1, taps))
    return weights.tensor(part, torch.float32)[:, 0]
