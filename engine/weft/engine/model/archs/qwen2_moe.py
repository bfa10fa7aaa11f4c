"""Qwen2-MoE and Qwen1.5-MoE: Qwen2's attention, routed experts and a shared one with a gate."""

from __future__ import annotations

from weft.engine.checkpoint.config import ModelConfig
from weft.engine.model.archs.llama import llama_attention
from weft.engine.model.decoder_only import DecoderOnlyLM, sparse_mlp
from weft.engine.model.layers.moe import MoENames
from weft.engine.model.weights.weights import Weights


class Qwen2MoeForCausalLM(DecoderOnlyLM):
    """Qwen2-MoE with its LM head."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        names = MoENames(shared="shared_expert")
        super().__init__(config, weights, llama_attention, sparse_mlp(names))
