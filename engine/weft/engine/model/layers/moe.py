"""The sparse feed-forward part of a decoder layer: a router and its experts."""

from __future__ import annotations

import torch
from weft.engine.checkpoint.config import MoEConfig
from weft.engine.model.layers.mlp import down_spec, gate_up_spec
from weft.engine.model.weights.specs import ExpertSpec, LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.decoder_layer import SparseMlpWeight
from weft.kernels.lora import LoraStep


class SparseMLP:
    """A mixture of experts: routed gated MLPs, weighted by the router and added to the residual
    stream.
    """

    def __init__(self, config: MoEConfig, hidden: int, weights: Weights) -> None:
        """Reads the router and all experts.

        Args:
            config: Counts and sizes.
            hidden: Width of the stream.
            weights: Parameters of the block: `gate` and `experts`.
        """
        router = LinearSpec(names=("gate",), in_features=hidden, rows=(config.num_experts,))
        experts = ExpertSpec(
            num_experts=config.num_experts,
            gate_up=gate_up_spec(hidden, config.intermediate_size),
            down=down_spec(hidden, config.intermediate_size),
        )
        self.weight = SparseMlpWeight(
            weights.linear(router),
            weights.at("experts").experts(experts),
            config.num_experts_per_tok,
            config.norm_topk_prob,
        )
        """All parameters, for a stack of layers run as one operation."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, lora: LoraStep | None, layer: int
    ) -> torch.Tensor:
        """[M, hidden], [M, hidden] -> [M, hidden], with these M tokens' adapters of a layer."""
        return self.weight(x, residual, lora, layer)
