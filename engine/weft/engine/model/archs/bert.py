"""BERT, RoBERTa and XLM-R: layers with a norm after each addition (post-norm)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from weft.engine.checkpoint.config import ModelConfig
from weft.engine.checkpoint.encoder_config import EncoderConfig
from weft.engine.model.encoder import Encoder
from weft.engine.model.layers.encoder import EncoderAttention, LayerNorm, PlainMLP, Ragged
from weft.engine.model.pooled_heads import DenseLayers, read_dense
from weft.engine.model.step import Step
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights

_PREFIXES = ("bert", "roberta")
_WORDS = "embeddings.word_embeddings"


class _Layer(NamedTuple):
    attention: EncoderAttention
    attention_norm: LayerNorm
    mlp: PlainMLP
    mlp_norm: LayerNorm

    def __call__(self, x: torch.Tensor, batch: Ragged) -> torch.Tensor:
        x = self.attention_norm(self.attention(x, batch, x))
        return self.mlp_norm(self.mlp(x, x))


class BertModel(Encoder):
    """BERT and its kin, with a classification head where the configuration has one."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        assert isinstance(config, EncoderConfig)
        super().__init__(config, weights.dtype)
        self._config = config
        top, size, eps = weights, config.hidden_size, config.norm_eps
        prefix = next((one for one in _PREFIXES if weights.has(f"{one}.{_WORDS}.weight")), None)
        weights = weights if prefix is None else weights.at(prefix)
        parts = weights.at("embeddings")
        rows = config.max_position_embeddings + config.position_offset
        self._words = parts.vocabulary("word_embeddings", config.vocab_size, size)
        self._positions = parts.vocabulary("position_embeddings", rows, size)
        self._types = parts.vocabulary("token_type_embeddings", config.num_token_types, size)
        self._norm = LayerNorm.read(parts, "LayerNorm", size, eps)
        layers = weights.at("encoder").at("layer")
        self._layers = [_layer(config, layers.at(i)) for i in range(config.num_layers)]
        self.classes = _classes(config, top, weights) if config.head == "classes" else None

    def encode(self, step: Step, batch: Ragged) -> torch.Tensor:
        """See `Encoder.encode`."""
        x = self._words.index_select(0, step.token_ids)
        x += self._positions.index_select(0, batch.positions + self._config.position_offset)
        if step.token_types is None or self._config.num_token_types == 1:
            x += self._types[0]
        else:
            x += self._types.index_select(0, step.token_types)
        x = self._norm(x)
        for layer in self._layers:
            x = layer(x, batch)
        return x


def _layer(config: EncoderConfig, weights: Weights) -> _Layer:
    size, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
    attention, output = weights.at("attention"), weights.at("output")
    qkv = LinearSpec(names=("query", "key", "value"), in_features=size, rows=(size,) * 3, bias=True)
    mixed = attention.at("output")
    return _Layer(
        EncoderAttention(
            num_heads=config.num_heads,
            qkv=attention.at("self").linear(qkv),
            out=mixed.linear(_dense(size, size)),
        ),
        LayerNorm.read(mixed, "LayerNorm", size, eps),
        PlainMLP(
            up=weights.at("intermediate").linear(_dense(size, inner)),
            down=output.linear(_dense(inner, size)),
            activation=config.activation,
            is_fixed=weights.arena.is_fixed,
        ),
        LayerNorm.read(output, "LayerNorm", size, eps),
    )


def _dense(in_features: int, out_features: int) -> LinearSpec:
    return LinearSpec(names=("dense",), in_features=in_features, rows=(out_features,), bias=True)


def _classes(config: EncoderConfig, top: Weights, weights: Weights) -> DenseLayers:
    size, labels = config.hidden_size, config.num_labels
    if top.has("classifier.out_proj.weight"):
        dense = read_dense(top, "classifier.dense", size, size, activation="tanh")
        return DenseLayers([dense, read_dense(top, "classifier.out_proj", labels, size)])
    dense = read_dense(weights, "pooler.dense", size, size, activation="tanh")
    return DenseLayers([dense, read_dense(top, "classifier", labels, size)])
