"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from weft.engine.checkpoint.config import ModelConfig
from weft.engine.model.archs.llama import llama_attention
from weft.engine.model.decoder_only import DecoderOnlyLM, sparse_mlp
from weft.engine.model.layers.moe import MoENames
from weft.engine.model.weights.weights import Weights

MIXTRAL_NAMES = MoENames(gate_up=("w1", "w3"), down="w2")


class MixtralForCausalLM(DecoderOnlyLM):
    """Mixtral with its LM head."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        build = sparse_mlp(MIXTRAL_NAMES)
        super().__init__(config, weights, llama_attention, build, "block_sparse_moe")
