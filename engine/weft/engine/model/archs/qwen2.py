"""Qwen2 and Qwen2.5, dense: Llama's layers with a bias on q, k and v."""

from __future__ import annotations

from weft.checkpoint.config import ModelConfig
from weft.engine.model.archs.llama import llama_attention
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.weights.weights import Weights


class Qwen2ForCausalLM(DecoderOnlyLM):
    """Qwen2 with its LM head; `ModelConfig.qkv_bias` is always set for it."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights, llama_attention)
