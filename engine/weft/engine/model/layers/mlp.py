"""The feed-forward part of a decoder layer, gated or plain."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from weft.checkpoint.config import ModelConfig
from weft.engine.model.layers.layer import shape_of
from weft.engine.model.step import Step
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.activation import activate
from weft.kernels.ops.activation.spec import XIELU, Activation, Gating, GaussianTopK
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.stream import can_fold
from weft.kernels.ops.stream.additions import Computed, GatedSum, Normed, Sum


def gate_up_spec(
    hidden: int,
    inner: int,
    *,
    bias: bool = False,
    names: tuple[str, str] = ("gate_proj", "up_proj"),
    fused: str | None = None,
    is_gated: bool = True,
) -> LinearSpec:
    """The gate and up projections of a gated MLP. `is_gated`: the product applies SiLU gating."""
    return LinearSpec(
        names=names,
        in_features=hidden,
        rows=(inner, inner),
        split="out",
        bias=bias,
        is_gated=is_gated,
        fused=fused,
    )


def up_spec(hidden: int, inner: int, *, bias: bool = False, name: str = "up_proj") -> LinearSpec:
    return LinearSpec(names=(name,), in_features=hidden, rows=(inner,), split="out", bias=bias)


def down_spec(
    hidden: int, inner: int, *, bias: bool = False, name: str = "down_proj"
) -> LinearSpec:
    return LinearSpec(names=(name,), in_features=inner, rows=(hidden,), split="in", bias=bias)


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """down(silu(gate(x)) * up(x)): a `FeedForward`."""

    layer: int
    gate_up_proj: LinearWeight
    down_proj: LinearWeight

    @classmethod
    def read(cls, config: ModelConfig, layer: int, weights: Weights) -> GatedMLP:
        sizes = (config.hidden_size, config.intermediate_size)
        return cls.of_size(layer, *sizes, weights, bias=config.mlp_bias)

    @classmethod
    def of_size(
        cls,
        layer: int,
        hidden: int,
        inner: int,
        weights: Weights,
        *,
        bias: bool = False,
        fused: str | None = None,
        down: str = "down_proj",
    ) -> GatedMLP:
        """As `read`, with another inner width than the configuration's. `fused` and `down` are
        names of parameters.
        """
        gate_up_proj = weights.linear(gate_up_spec(hidden, inner, bias=bias, fused=fused))
        of_down = down_spec(hidden, inner, bias=bias, name=down)
        return cls(layer, gate_up_proj, weights.linear(of_down))

    def __call__(self, x: Normed, step: Step) -> GatedSum:
        to_gate_up = step.added("gate_up", self.layer)
        to_down = step.added("down", self.layer)
        return GatedSum(x, self.gate_up_proj, self.down_proj, to_gate_up, to_down)

    def unchanged(self, x: Normed) -> GatedSum:
        """A call without the step's additions to the products (LoRA)."""
        return GatedSum(x, self.gate_up_proj, self.down_proj, None, None)

    def folds(self, rows: int, step: Step) -> bool:
        to_gate_up, to_down = (step.added(name, self.layer) for name in ("gate_up", "down"))
        return can_fold(rows, self.gate_up_proj, to_gate_up, self.down_proj, to_down)

    def shape_key(self) -> object:
        return GatedMLP, shape_of(self.gate_up_proj), shape_of(self.down_proj)


@dataclass(frozen=True, slots=True, eq=False)
class PlainMLP:
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)) where the activation is
    computed apart from the product: a `FeedForward`.
    """

    layer: int
    up_proj: LinearWeight
    """If the MLP has a gate, the gate is the first half of the outputs."""
    down_proj: LinearWeight
    activation: Activation | Gating | XIELU | GaussianTopK
    is_gated: bool = field(kw_only=True)
    factors: tuple[float, float] = field(default=(1.0, 1.0), kw_only=True)
    """Factors on the gate before its activation, and on the result."""

    def __call__(self, x: Normed, step: Step) -> Sum | Computed:
        inner = x.linear(self.up_proj, step.added("gate_up", self.layer))
        added = Sum(self._made(inner), self.down_proj, step.added("down", self.layer))
        if self.factors[1] == 1.0:
            return added
        value = added.value() * self.factors[1]
        return Computed(value, is_partial=True)

    def unchanged(self, x: Normed) -> Sum:
        """A call without the step's additions to the products (LoRA) and without the factor on the
        result.
        """
        return Sum(self._made(x.linear(self.up_proj, None)), self.down_proj, None)

    def _made(self, inner: torch.Tensor) -> torch.Tensor:
        if self.factors[0] != 1.0:
            inner[:, : inner.shape[1] // 2] *= self.factors[0]
        if isinstance(self.activation, str):
            return activate(inner, self.activation, is_gated=self.is_gated)
        return self.activation.of(inner)

    def folds(self, rows: int, step: Step) -> bool:
        return False

    def shape_key(self) -> object:
        products = shape_of(self.up_proj), shape_of(self.down_proj)
        # Comparing xIELU's tensors would wait for a device, and `check_weights` loads no numbers.
        learned = isinstance(self.activation, XIELU)
        activation = id(self.activation) if learned else self.activation
        return PlainMLP, products, activation, self.is_gated
