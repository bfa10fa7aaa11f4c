"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in most layers."""

from __future__ import annotations

from weft.checkpoint.config import ModelConfig
from weft.engine.model.archs.qwen3 import qwen3_attention
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.layers.mlp import GatedMLP
from weft.engine.model.layers.moe import SparseMLP
from weft.engine.model.weights.weights import Weights


def qwen3_moe_mlp(config: ModelConfig, layer: int, weights: Weights) -> GatedMLP | SparseMLP:
    """One MLP if the configuration says that the layer has no experts."""
    if config.moe is not None and config.moe.is_sparse(layer):
        return SparseMLP.read(config.moe, layer, config.hidden_size, weights)
    return GatedMLP.read(config, layer, weights)


class Qwen3MoeForCausalLM(DecoderOnlyLM):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights, qwen3_attention, qwen3_moe_mlp)
