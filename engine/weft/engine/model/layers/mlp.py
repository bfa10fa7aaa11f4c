"""The gated feed-forward part of a decoder layer."""

from __future__ import annotations

import torch
from weft.engine.checkpoint.config import ModelConfig
from weft.engine.model.layers.linear import GateUp, Linear
from weft.engine.model.weights.weights import Weights
from weft.kernels.decoder_layer import GatedMlpWeight
from weft.kernels.lora import LoraStep, addition_to


class GatedMLP:
    """down(silu(gate(x)) * up(x)), added to the residual stream."""

    def __init__(self, config: ModelConfig, weights: Weights, gate_up: tuple[str, ...]) -> None:
        """Reads the projections; `gate_up` names the two that are fused."""
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = GateUp(weights, gate_up, hidden, inner, bias)
        self.down_proj = Linear(weights, ("down_proj",), inner, (hidden,), bias)

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
