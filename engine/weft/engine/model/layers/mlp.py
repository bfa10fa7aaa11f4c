"""The gated feed-forward part of a decoder layer."""

from __future__ import annotations

import torch
from weft.engine.checkpoint.config import ModelConfig
from weft.engine.model.layers.linear import GateUp, Linear
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.decoder_layer import GatedMlpWeight
from weft.kernels.lora import LoraStep, addition_to


def gate_up_spec(hidden: int, inner: int, *, bias: bool = False) -> LinearSpec:
    """The gate and what it gates, of a gated MLP."""
    return LinearSpec(
        names=("gate_proj", "up_proj"),
        in_features=hidden,
        rows=(inner, inner),
        split="out",
        bias=bias,
        is_gated=True,
    )


def down_spec(hidden: int, inner: int, *, bias: bool = False) -> LinearSpec:
    """The projection of a gated MLP back to the hidden size."""
    return LinearSpec(
        names=("down_proj",), in_features=inner, rows=(hidden,), split="in", bias=bias
    )


class GatedMLP:
    """down(silu(gate(x)) * up(x)), added to the residual stream."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Reads the projections."""
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = GateUp(weights.linear(gate_up_spec(hidden, inner, bias=bias)))
        self.down_proj = Linear(weights.linear(down_spec(hidden, inner, bias=bias)))

    @property
    def weight(self) -> GatedMlpWeight:
        """The weights of both projections, for a stack of layers run as one operation."""
        return GatedMlpWeight(self.gate_up_proj.weight, self.down_proj.weight)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, lora: LoraStep | None, layer: int
    ) -> torch.Tensor:
        """[M, hidden], [M, hidden] -> [M, hidden], with these M tokens' adapters of a layer."""
        inner = self.gate_up_proj(x, addition_to(lora, "gate_up", layer))
        return self.down_proj(inner, residual, addition_to(lora, "down", layer))
