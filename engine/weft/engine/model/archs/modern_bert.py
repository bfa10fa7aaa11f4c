"""ModernBERT: pre-norm layers with rotary positions; most layers attend to near tokens only."""

from __future__ import annotations

from dataclasses import replace

import torch
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.encoder_config import EncoderConfig
from weft.checkpoint.rope import RopeConfig
from weft.engine.model.encoder import Encoder
from weft.engine.model.layers.encoder import (
    EncoderAttention,
    EncoderMLP,
    LayerNorm,
    PreNormLayer,
    Ragged,
)
from weft.engine.model.layers.rotary import cos_sin_table
from weft.engine.model.pooled_heads import DenseLayers, read_dense
from weft.engine.model.step import Step
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights

_WORDS = "embeddings.tok_embeddings"


class ModernBertModel(Encoder):
    """ModernBERT, with a classification head if the configuration has one."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        assert isinstance(config, EncoderConfig)
        super().__init__(config, weights.dtype)
        top = weights
        weights = weights.at("model") if weights.has(f"model.{_WORDS}.weight") else weights
        size, embeddings = config.hidden_size, weights.at("embeddings")
        self._words = embeddings.vocabulary("tok_embeddings", config.vocab_size, size)
        self._norm = _norm(config, embeddings, "norm")
        tables = {
            theta: _table(config, theta, weights.device)
            for theta in {config.rope.theta, config.local_theta}
        }
        layers = weights.at("layers")
        self._layers = [_layer(config, i, layers.at(i), tables) for i in range(config.num_layers)]
        self._final_norm = _norm(config, weights, "final_norm")
        self.classes = _classes(config, top) if config.head == "classes" else None

    def encode(self, step: Step, batch: Ragged) -> torch.Tensor:
        x = self._norm(self._words.index_select(0, step.token_ids))
        for layer in self._layers:
            x = layer(x, batch)
        return self._final_norm(x)


def _layer(
    config: EncoderConfig, number: int, weights: Weights, tables: dict[float, torch.Tensor]
) -> PreNormLayer:
    size, inner, attention = config.hidden_size, config.intermediate_size, weights.at("attn")
    mlp, sees_all = weights.at("mlp"), config.sees_all(number)
    return PreNormLayer(
        None if number == 0 else _norm(config, weights, "attn_norm"),
        EncoderAttention(
            layer=number,
            num_heads=config.num_heads,
            qkv=attention.linear(_spec("Wqkv", size, 3 * size, bias=config.qkv_bias)),
            out=attention.linear(_spec("Wo", size, size, bias=config.o_bias)),
            reach=None if sees_all else config.reach,
            cos_sin=tables[config.rope.theta if sees_all else config.local_theta],
        ),
        _norm(config, weights, "mlp_norm"),
        EncoderMLP(
            is_gated=True,
            layer=number,
            up=mlp.linear(_spec("Wi", size, 2 * inner, bias=config.mlp_bias)),
            down=mlp.linear(_spec("Wo", inner, size, bias=config.mlp_bias)),
            activation=config.activation,
            is_fixed=weights.arena.is_fixed,
        ),
    )


def _spec(name: str, in_features: int, out_features: int, *, bias: bool) -> LinearSpec:
    return LinearSpec(names=(name,), in_features=in_features, rows=(out_features,), bias=bias)


def _norm(config: EncoderConfig, weights: Weights, name: str) -> LayerNorm:
    return LayerNorm.read(weights, name, config.hidden_size, config.norm_eps, bias=config.norm_bias)


def _table(config: EncoderConfig, theta: float, device: torch.device) -> torch.Tensor:
    rope = RopeConfig(theta=theta)
    return cos_sin_table(rope, config.head_dim, config.max_position_embeddings).to(device)


def _classes(config: EncoderConfig, top: Weights) -> DenseLayers:
    size, bias = config.hidden_size, config.classifier_bias
    dense = read_dense(
        top, "head.dense", size, size, bias=bias, activation=config.classifier_activation
    )
    norm = _norm(config, top.at("head"), "norm")
    added = None if norm.bias is None else norm.bias.float()
    dense = replace(dense, norm=norm.weight.float(), norm_bias=added, norm_eps=norm.eps)
    return DenseLayers([dense, read_dense(top, "classifier", config.num_labels, size)])
