"""Llama (2, 3, 3.x) and models of its shape, such as SmolLM2 and Mistral."""

from __future__ import annotations

import torch
from weft.checkpoint.config import ModelConfig
from weft.engine.model.decoder_only import DecoderOnlyLM, o_projection, qkv_projection
from weft.engine.model.layers.attention import Attention, attention_spec
from weft.engine.model.weights.weights import Weights


def llama_attention(
    config: ModelConfig, layer: int, weights: Weights, cos_sin: torch.Tensor
) -> Attention:
    return Attention(
        attention_spec(config, layer),
        layer,
        cos_sin,
        qkv_proj=qkv_projection(config, weights),
        o_proj=o_projection(config, weights),
    )


class LlamaForCausalLM(DecoderOnlyLM):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights, llama_attention)
