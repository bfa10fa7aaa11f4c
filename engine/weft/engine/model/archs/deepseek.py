"""DeepSeek V2 and V3, and models of their shape: latent attention, routed and shared experts."""

from __future__ import annotations

import re

from weft.engine.checkpoint.config import ModelConfig
from weft.engine.memory.layout import CacheLayout
from weft.engine.model.decoder_only import DecoderOnlyLM, sparse_mlp
from weft.engine.model.layers.latent import LatentAttention, latent_layout
from weft.engine.model.layers.moe import MoENames
from weft.engine.model.weights.weights import Weights

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def is_behind_layers(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is of a layer behind those that the model has: one that drafts (MTP)."""
    found = _LAYER.match(name)
    return found is not None and int(found[1]) >= config.num_layers


class DeepseekForCausalLM(DecoderOnlyLM):
    """DeepSeek V2, V3 and R1, Kimi K2 or GLM-4.7-Flash with its LM head."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights, LatentAttention.read, sparse_mlp(MoENames()))

    def kv_layout(self, page_size: int) -> CacheLayout:
        """See `Model.kv_layout`."""
        return latent_layout(self.config, str(self.dtype).removeprefix("torch."), page_size)

    @staticmethod
    def leaves_out(config: ModelConfig, name: str) -> bool:
        """See `ModelClass.leaves_out`."""
        return is_behind_layers(config, name)
