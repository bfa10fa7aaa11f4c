"""Qwen3, dense: each head of q and k is normalised before the rotation."""

from __future__ import annotations

import torch
from weft.checkpoint.config import ModelConfig
from weft.engine.model.decoder_only import DecoderOnlyLM, o_projection, qkv_projection
from weft.engine.model.layers.attention import Attention, attention_spec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.norm import Norm


def qwen3_attention(
    config: ModelConfig, layer: int, weights: Weights, cos_sin: torch.Tensor
) -> Attention:
    return Attention(
        attention_spec(config, layer),
        layer,
        cos_sin,
        qkv_proj=qkv_projection(config, weights),
        o_proj=o_projection(config, weights),
        q_norm=Norm(weights.norm("q_norm", config.head_dim), config.rms_norm_eps),
        k_norm=Norm(weights.norm("k_norm", config.head_dim), config.rms_norm_eps),
    )


class Qwen3ForCausalLM(DecoderOnlyLM):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights, qwen3_attention)
