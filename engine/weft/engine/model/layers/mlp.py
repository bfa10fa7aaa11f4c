"""The gated feed-forward part of a decoder layer."""

from __future__ import annotations

from weft.engine.checkpoint.config import ModelConfig
from weft.engine.model.layers.layer import shape_of
from weft.engine.model.step import Step
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.linear import LinearWeight
from weft.kernels.lora import LoraStep, addition_to
from weft.kernels.stream import GatedSum, Normed, can_fold


def gate_up_spec(
    hidden: int,
    inner: int,
    *,
    bias: bool = False,
    names: tuple[str, str] = ("gate_proj", "up_proj"),
) -> LinearSpec:
    """The gate and what it gates, of a gated MLP."""
    return LinearSpec(
        names=names,
        in_features=hidden,
        rows=(inner, inner),
        split="out",
        bias=bias,
        is_gated=True,
    )


def down_spec(
    hidden: int, inner: int, *, bias: bool = False, name: str = "down_proj"
) -> LinearSpec:
    """The projection of a gated MLP back to the hidden size."""
    return LinearSpec(names=(name,), in_features=inner, rows=(hidden,), split="in", bias=bias)


class GatedMLP:
    """down(silu(gate(x)) * up(x)): a `FeedForward`."""

    def __init__(self, layer: int, gate_up_proj: LinearWeight, down_proj: LinearWeight) -> None:
        """Assembles the block of a layer (its index) from its projections."""
        self.layer = layer
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    @classmethod
    def read(cls, config: ModelConfig, layer: int, weights: Weights) -> GatedMLP:
        """Reads the projections below one prefix of the names."""
        sizes = (config.hidden_size, config.intermediate_size)
        return cls.of_size(layer, *sizes, weights, bias=config.mlp_bias)

    @classmethod
    def of_size(
        cls, layer: int, hidden: int, inner: int, weights: Weights, *, bias: bool = False
    ) -> GatedMLP:
        """The same of another inner width than the configuration's."""
        gate_up_proj = weights.linear(gate_up_spec(hidden, inner, bias=bias))
        return cls(layer, gate_up_proj, weights.linear(down_spec(hidden, inner, bias=bias)))

    def __call__(self, x: Normed, step: Step) -> GatedSum:
        """See `FeedForward`."""
        to_gate_up = addition_to(step.lora, "gate_up", self.layer)
        to_down = addition_to(step.lora, "down", self.layer)
        return GatedSum(x, self.gate_up_proj, self.down_proj, to_gate_up, to_down)

    def unchanged(self, x: Normed) -> GatedSum:
        """The same where no adapter changes it."""
        return GatedSum(x, self.gate_up_proj, self.down_proj, None, None)

    def folds(self, rows: int, lora: LoraStep | None) -> bool:
        """See `Mixer.folds`."""
        to_gate_up, to_down = (addition_to(lora, name, self.layer) for name in ("gate_up", "down"))
        return can_fold(rows, self.gate_up_proj, to_gate_up, self.down_proj, to_down)

    def shape_key(self) -> object:
        """See `Mixer.shape_key`."""
        return GatedMLP, shape_of(self.gate_up_proj), shape_of(self.down_proj)
