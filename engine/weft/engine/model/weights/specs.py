"""A model's description of its products, and each rank's share in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import torch
from weft.contract.errors import ModelError
from weft.engine.model.weights.reader import TensorSlice
from weft.kernels.ops.activation.spec import SILU, Gating
from weft.kernels.ops.moe.spec import CYCLES
from weft.kernels.ops.peers.spec import Peers


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of every divided product that this process reads."""

    rank: int = 0
    size: int = 1

    @classmethod
    def among(cls, peers: Peers | None) -> Shard:
        """This process's share among ranks; None: it has everything."""
        return cls() if peers is None else cls(peers.rank, peers.size)

    def of(self, length: int, unit: int, *, may_repeat: bool) -> slice:
        """This rank's share of an axis.

        Args:
            unit: Entries that stay together.
            may_repeat: Whether several ranks may have the same unit if there are fewer units than
                ranks.

        Raises:
            ModelError: The units cannot be divided evenly.
        """
        num_units = length // unit
        if length % unit == 0 and num_units % self.size == 0:
            share = length // self.size
            return slice(self.rank * share, (self.rank + 1) * share)
        if length % unit == 0 and may_repeat and self.size % num_units == 0:
            begin = self.rank * num_units // self.size * unit
            return slice(begin, begin + unit)
        raise ModelError(f"{length} in units of {unit} cannot be divided among {self.size} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """One or more projections of the same input, computed as one product."""

    names: tuple[str, ...]
    """Submodules, in the order of the output's columns."""
    in_features: int
    """Width of the input, over all ranks."""
    rows: tuple[int, ...]
    """Width of each projection's output, over all ranks."""
    split: Literal["none", "out", "in"] = "none"
    """Division among ranks: none; out: each rank has a part of each output; in: each rank has a
    part of the input, and the results must be added up.
    """
    unit: int = 1
    """Rows, or columns where the input is split, that stay together: those of one head. Where
    outputs have fewer units than there are ranks, several ranks have the same one.
    """
    bias: bool = False
    is_gated: bool = False
    """Whether the product is gate and up of an MLP, computed with the activation."""
    fused: str | None = None
    """Submodule that has the rows of all projections, one after another; None: the checkpoint does
    not fuse them.
    """
    order: tuple[int, ...] = ()
    """The projections in the order of the fused rows; empty: that of `names`."""
    groups: int = 1
    """Consecutive parts of the fused rows, each of which has an equal share of every projection's
    rows. More than 1 where the checkpoint keeps all rows of a head together.
    """
    is_gate: bool = False
    """Whether the product is a router or a gate, which checkpoints may leave in floats without
    saying so.
    """

    @property
    def modules(self) -> tuple[str, ...]:
        """Submodules as the checkpoint has them."""
        return self.names if self.fused is None else (self.fused,)

    @property
    def parts(self) -> tuple[LinearSpec, ...]:
        """Each projection as a separate product."""
        pairs = zip(self.names, self.rows, strict=True)
        return tuple(replace(self, names=(name,), rows=(rows,)) for name, rows in pairs)

    def last(self, count: int) -> LinearSpec:
        """The product of the last `count` projections alone."""
        assert self.fused is None, "parts of a fused tensor have no names"
        return replace(self, names=self.names[-count:], rows=self.rows[-count:])

    def weights(self, shard: Shard) -> list[TensorSlice]:
        """A shard of each projection's weight, [rows, columns]."""
        columns = self.columns_of(shard)
        return [
            TensorSlice(f"{name}.weight", (rows, self.in_features), (own, columns))
            for name, rows, own in self._parts(shard)
        ]

    def biases(self, shard: Shard) -> list[TensorSlice]:
        """A shard of each projection's bias, [rows]."""
        return [TensorSlice(f"{name}.bias", (n,), (own,)) for name, n, own in self._parts(shard)]

    def channel_scales(self, shard: Shard) -> list[TensorSlice]:
        """A shard of each projection's scales, [rows, 1]: one per row of its weight."""
        return [
            TensorSlice(f"{name}.weight_scale", (rows, 1), (own,))
            for name, rows, own in self._parts(shard)
        ]

    def stacked_weights(self, name: str, index: int, count: int, shard: Shard) -> list[TensorSlice]:
        """`weights` where one tensor, [count, all rows, columns], holds this product at `index`."""
        shape, columns = (count, sum(self.rows), self.in_features), self.columns_of(shard)
        return [TensorSlice(name, shape, (index, own, columns)) for own in self._stacked(shard)]

    def _parts(self, shard: Shard) -> list[tuple[str, int, slice]]:
        """The module of each projection, its rows in the checkpoint, and the share of them."""
        if self.fused is not None:
            rows = sum(self.rows)
            return [(self.fused, rows, own) for own in self._stacked(shard)]
        return [
            (name, rows, self._rows(rows, shard))
            for name, rows in zip(self.names, self.rows, strict=True)
        ]

    def _stacked(self, shard: Shard) -> list[slice]:
        shares = [self._rows(rows, shard) for rows in self.rows]
        if self.groups > 1:
            return self._stacked_groups(shares)
        begins = self._begins(self.rows)
        return [
            slice(at + own.start, at + own.stop) for at, own in zip(begins, shares, strict=True)
        ]

    def _stacked_groups(self, shares: Sequence[slice]) -> list[slice]:
        found, stride = list[slice](), sum(self.rows) // self.groups
        widths = [rows // self.groups for rows in self.rows]
        for width, begin, own in zip(widths, self._begins(widths), shares, strict=True):
            for group in range(own.start // width, -(-own.stop // width)):
                # From the group's first row of this projection on.
                first, last = (
                    max(own.start - group * width, 0),
                    min(own.stop - group * width, width),
                )
                at = group * stride + begin
                found.append(slice(at + first, at + last))
        return found

    def _begins(self, widths: Sequence[int]) -> list[int]:
        order = self.order or tuple(range(len(widths)))
        begins = dict(zip(order, accumulate((widths[n] for n in order), initial=0), strict=False))
        return [begins[number] for number in range(len(widths))]

    def share_of(self, whole: torch.Tensor, shard: Shard) -> torch.Tensor:
        """A shard of the product's matrix, [all rows, columns]."""
        return self.rows_of(whole, shard)[:, self.columns_of(shard)].contiguous()

    def rows_of(self, whole: torch.Tensor, shard: Shard) -> torch.Tensor:
        """A shard of each projection's rows, [all rows, ...]."""
        assert not self.order, "only stacked rows have another order"
        assert self.groups == 1, "only stacked rows are in groups"
        parts = torch.split(whole, list(self.rows))
        return torch.cat([part[self._rows(part.shape[0], shard)] for part in parts])

    def _rows(self, rows: int, shard: Shard) -> slice:
        if self.split != "out":
            return slice(0, rows)
        return shard.of(rows, self.unit, may_repeat=True)

    def columns_of(self, shard: Shard) -> slice:
        """A shard of the columns. Raises ModelError if they do not divide."""
        if self.split != "in":
            return slice(0, self.in_features)
        return shard.of(self.in_features, self.unit, may_repeat=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """The gated MLPs of a mixture of experts."""

    num_experts: int
    """Experts over all ranks."""
    gate_up: LinearSpec
    down: LinearSpec
    stacked: tuple[str, ...] = ("gate_up_proj", "down_proj")
    """Names of the tensors of all experts, in checkpoints that stack them. Gate and up may be two
    tensors.
    """
    is_transposed: bool = False
    """Whether stacked tensors are [experts, columns, rows]."""
    is_interleaved: bool = False
    """Whether rows of gate and up alternate in stacked tensors."""
    bias: bool = False
    """Whether products have biases, `<stacked>_bias`, [experts, rows]."""
    gating: Gating = SILU
    """Function of gate and up that is the input of the down projection."""
    shard: Shard = Shard()
    """The share of the experts that is read. Of each expert a rank reads the share that its
    products say.
    """
    spares: int = 0
    """Places after those of the share. They are filled with the experts that follow it."""

    @property
    def numbers(self) -> Sequence[int]:
        own = self.shard.of(self.num_experts, 1, may_repeat=False)
        spares = range(own.stop, own.stop + self.spares)
        return [*range(own.start, own.stop), *(n % self.num_experts for n in spares)]

    @property
    def count(self) -> int:
        return len(self.numbers)

    def placed(self, shard: Shard, spares: int = 0) -> ExpertSpec:
        """The experts of one rank, where each rank has some whole experts (expert parallelism)."""
        gate_up, down = (replace(part, split="none") for part in (self.gate_up, self.down))
        return replace(self, gate_up=gate_up, down=down, shard=shard, spares=spares)

    def placement(self) -> torch.Tensor | None:
        """`ExpertWeights.placement` with which a rank begins, whose spare places nobody uses."""
        if self.shard.size == 1:
            return None
        own = self.shard.of(self.num_experts, 1, may_repeat=False)
        placement = torch.full((self.num_experts,), self.count, dtype=torch.int32)
        placement[own] = torch.arange(own.stop - own.start, dtype=torch.int32)
        return placement.repeat(CYCLES, 1) if self.spares else placement
