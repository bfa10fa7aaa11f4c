"""gpt-oss: attention with sinks and alternating windows, experts with biases and a limited gate."""

from __future__ import annotations

import torch
from weft.engine.checkpoint.config import ModelConfig
from weft.engine.model.decoder_only import (
    DecoderOnlyLM,
    o_projection,
    qkv_projection,
    sparse_mlp,
)
from weft.engine.model.layers.attention import Attention, attention_spec
from weft.engine.model.layers.moe import MoENames
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.weights import Weights

GPT_OSS_NAMES = MoENames(router="router", is_transposed=True, is_interleaved=True)


def gpt_oss_attention(
    config: ModelConfig, layer: int, weights: Weights, cos_sin: torch.Tensor
) -> Attention:
    """Grouped-query attention with a learnt sink a head."""
    sinks = weights.tensor(TensorSlice("sinks", (config.num_heads,)), torch.float32)
    return Attention(
        attention_spec(config, layer)._replace(sinks=sinks),
        layer,
        cos_sin,
        qkv_proj=qkv_projection(config, weights),
        o_proj=o_projection(config, weights),
    )


class GptOssForCausalLM(DecoderOnlyLM):
    """gpt-oss with its LM head."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights, gpt_oss_attention, sparse_mlp(GPT_OSS_NAMES))
