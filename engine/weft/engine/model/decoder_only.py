"""The common structure of decoder-only models: embedding, layers, final norm, LM head."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from weft.engine.checkpoint.config import ModelConfig
from weft.engine.memory.layout import CacheLayout, PagedPlane
from weft.engine.model.batch import ForwardBatch
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.decoder import DecoderLayer, DecoderStack
from weft.engine.model.layers.linear import Linear, LMHead
from weft.engine.model.layers.mlp import GatedMLP
from weft.engine.model.layers.moe import SparseMLP
from weft.engine.model.layers.norm import RMSNorm
from weft.engine.model.layers.rotary import cos_sin_table
from weft.engine.model.weights.weights import Weights
from weft.kernels.decoder_layer import Taps
from weft.kernels.lora import LoraStep, addition_to
from weft.kernels.replaced import hide_unknown_tokens, replaced_linear

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused parameter -> the checkpoint's modules, in the order in which they are stacked."""


BuildAttention = Callable[[ModelConfig, int, Weights, torch.Tensor], Attention]
"""Builds one layer's attention from configuration, layer number, the parameters below
`model.layers.<layer>.self_attn` and the table of cosines and sines."""
BuildMLP = Callable[[ModelConfig, int, Weights], GatedMLP | SparseMLP]
"""Builds one layer's feed-forward part from configuration, layer number and the parameters below
`model.layers.<layer>.mlp`."""


def gated_mlp(config: ModelConfig, layer: int, weights: Weights) -> GatedMLP:
    """The one gated MLP of a dense layer."""
    return GatedMLP(config, weights, FUSED["gate_up_proj"])


class DecoderOnlyLM:
    """A `Model` of pre-norm layers; models differ in their attention, some in their MLPs."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        attention: BuildAttention,
        mlp: BuildMLP = gated_mlp,
    ) -> None:
        """Reads all parameters, one layer after another."""
        self.config = config
        self.dtype = weights.dtype
        self.model = _build_stack(config, weights.at("model"), attention, mlp)
        head = self.model.embed_tokens
        if not config.tie_word_embeddings:
            head = _vocabulary_matrix(config, weights.at("lm_head"))
        self.lm_head = LMHead(head, weights.arena)

    def kv_layout(self, page_size: int) -> CacheLayout:
        """The shape of one page of this model's KV."""
        plane = PagedPlane(
            layers=self.config.num_layers,
            heads=self.config.num_kv_heads,
            dim=self.config.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
        )
        return CacheLayout.of_plane(plane, page_size)

    def forward(
        self, batch: ForwardBatch, pool: torch.Tensor, taps: Taps | None = None
    ) -> torch.Tensor:
        """Runs one ragged step: [L, hidden], final hidden states of `batch.logits_rows`.

        `taps` gets what enters the layers that it names; none of them is the number of layers.
        """
        return self.model(batch, pool, taps)

    def forward_all(self, batch: ForwardBatch, pool: torch.Tensor) -> torch.Tensor:
        """Like `forward`, but returns hidden states of all rows, [T, hidden], for which logits can
        be computed.
        """
        return self.model.of_all_rows(batch, pool)

    def logits(self, hidden: torch.Tensor, lora: LoraStep | None = None) -> torch.Tensor:
        """Computes logits: [L, hidden], these L rows' adapters -> [L, num_embeddings] float32."""
        added = addition_to(lora, "lm_head", 0)
        if lora is None or lora.heads is None:
            logits = self.lm_head(hidden, added)
        else:
            logits = replaced_linear(hidden, self.lm_head.weight, lora.heads, lora.segments, added)
        if self.config.num_added_tokens:
            hide_unknown_tokens(logits, self.config.vocab_size, lora)
        return logits


def qkv_projection(config: ModelConfig, weights: Weights) -> Linear:
    """The fused projection of q, k and v of all heads."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = (q_size, kv_size, kv_size)
    return Linear(weights, FUSED["qkv_proj"], config.hidden_size, rows, config.qkv_bias)


def o_projection(config: ModelConfig, weights: Weights) -> Linear:
    """The projection of all heads back to the hidden size."""
    q_size = config.num_heads * config.head_dim
    return Linear(weights, ("o_proj",), q_size, (config.hidden_size,), config.o_bias)


def _vocabulary_matrix(config: ModelConfig, weights: Weights) -> torch.Tensor:
    """The embedding or the LM head, [num_embeddings, hidden]."""
    size, num_zeros = (config.vocab_size, config.hidden_size), config.num_added_tokens
    return weights.tensor("weight", *size, num_zeros=num_zeros)


def _build_stack(
    config: ModelConfig, weights: Weights, attention: BuildAttention, mlp: BuildMLP
) -> DecoderStack:
    cos_sin = cos_sin_table(config.rope, config.head_dim, config.max_position_embeddings)
    cos_sin = cos_sin.to(weights.device)
    embed_tokens = _vocabulary_matrix(config, weights.at("embed_tokens"))
    size, eps = config.hidden_size, config.rms_norm_eps
    layers = []
    for index in range(config.num_layers):
        layer = weights.at("layers").at(index)
        layers.append(
            DecoderLayer(
                RMSNorm(layer.at("input_layernorm"), size, eps),
                attention(config, index, layer.at("self_attn"), cos_sin),
                RMSNorm(layer.at("post_attention_layernorm"), size, eps),
                mlp(config, index, layer.at("mlp")),
            )
        )
    return DecoderStack(embed_tokens, layers, RMSNorm(weights.at("norm"), size, eps))
