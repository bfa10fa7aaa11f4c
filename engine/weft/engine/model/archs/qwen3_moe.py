"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in most layers."""

from __future__ import annotations

from weft.engine.checkpoint.config import ModelConfig
from weft.engine.model.archs.qwen3 import qwen3_attention
from weft.engine.model.decoder_only import DecoderOnlyLM, sparse_mlp
from weft.engine.model.layers.moe import MoENames
from weft.engine.model.weights.weights import Weights


class Qwen3MoeForCausalLM(DecoderOnlyLM):
    """Qwen3-MoE with its LM head."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights, qwen3_attention, sparse_mlp(MoENames()))
