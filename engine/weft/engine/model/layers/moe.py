"""The sparse feed-forward part of a decoder layer: a router and its experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from weft.engine.checkpoint.config import MoEConfig
from weft.engine.model.weights.weights import Weights
from weft.kernels.decoder_layer import SparseMlpWeight
from weft.kernels.linear import pack_linear
from weft.kernels.lora import LoraStep
from weft.kernels.moe import pack_experts

_FUSED = "gate_up_proj"


class SparseMLP:
    """A mixture of experts: routed gated MLPs, weighted by the router and added to the residual
    stream.
    """

    def __init__(self, config: MoEConfig, hidden: int, weights: Weights) -> None:
        """Reads the router and all experts.

        Args:
            config: Counts and sizes.
            hidden: Width of the stream.
            weights: Parameters of the block: `gate`, and `experts` either each by its number or
                all in one tensor a projection.
        """
        gate = weights.at("gate").tensor("weight", config.num_experts, hidden)
        router = pack_linear(gate, arena=weights.arena)
        experts = weights.at("experts")
        read = _fused_experts if experts.has(_FUSED) else _split_experts
        packed = pack_experts(read(config, hidden, experts), config.num_experts, weights.arena)
        self.weight = SparseMlpWeight(
            router, packed, config.num_experts_per_tok, config.norm_topk_prob
        )
        """All parameters, for a stack of layers run as one operation."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, lora: LoraStep | None, layer: int
    ) -> torch.Tensor:
        """[M, hidden], [M, hidden] -> [M, hidden], with these M tokens' adapters of a layer."""
        return self.weight(x, residual, lora, layer)


def _split_experts(
    config: MoEConfig, hidden: int, weights: Weights
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    inner = config.intermediate_size
    for number in range(config.num_experts):
        expert = weights.at(number)
        names = ("gate_proj.weight", "up_proj.weight")
        yield (
            expert.fused(names, (inner, inner), hidden),
            expert.tensor("down_proj.weight", hidden, inner),
        )


def _fused_experts(
    config: MoEConfig, hidden: int, weights: Weights
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    inner = config.intermediate_size
    for number in range(config.num_experts):
        yield (
            weights.part(_FUSED, number, config.num_experts, 2 * inner, hidden),
            weights.part("down_proj", number, config.num_experts, hidden, inner),
        )
