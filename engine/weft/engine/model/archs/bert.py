"""BERT and related encoders: layers with a norm after each addition (post-norm)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from weft.checkpoint.architectures import encoder_stem
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.encoder_config import BODIES, EncoderConfig
from weft.engine.model.encoder import Encoder
from weft.engine.model.layers.encoder import EncoderAttention, EncoderMLP, LayerNorm, Ragged
from weft.engine.model.layers.rotary import cos_sin_table
from weft.engine.model.pooled_heads import DenseLayers, read_dense
from weft.engine.model.step import Step
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights

_WORDS = "embeddings.word_embeddings"


class _Names(NamedTuple):
    layers: str
    qkv: tuple[str, ...]
    o: str
    attention_norm: str
    up: tuple[str, ...]
    """Names of the first products of the MLP. In a gated block the first product is activated, and
    the second is its factor.
    """
    down: str
    mlp_norm: str
    norm: str = "embeddings.LayerNorm"
    activates_last: bool = False
    """Whether `up` is one tensor, whose second half is the activated one."""


_BERT = _Names(
    layers="encoder.layer",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    o="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
_FLASH = _Names(
    layers="encoder.layers",
    qkv=("mixer.Wqkv",),
    o="mixer.out_proj",
    attention_norm="norm1",
    up=("mlp.fc1",),
    down="mlp.fc2",
    mlp_norm="norm2",
    norm="emb_ln",
)
_ROTARY = _Names(
    layers="layers",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    o="self_attn.o_proj",
    attention_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    mlp_norm="post_mlp_layernorm",
)
_GTE = _Names(
    layers="encoder.layer",
    qkv=("attention.qkv_proj",),
    o="attention.o_proj",
    attention_norm="attn_ln",
    up=("mlp.up_gate_proj",),
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
    activates_last=True,
)
_NOMIC = _FLASH._replace(qkv=("attn.Wqkv",), o="attn.out_proj", up=("mlp.fc12", "mlp.fc11"))
_JINA_2 = _BERT._replace(up=("mlp.gated_layers",), down="mlp.wo", mlp_norm="mlp.layernorm")
_JINA_3 = _ROTARY._replace(up=("mlp.fc1",), down="mlp.fc2")
_NAMES: Mapping[str, tuple[_Names, ...]] = {
    "Bert": (_BERT,),
    "Gte": (_ROTARY, _GTE),
    "JinaBert": (_JINA_2,),
    "JinaEmbeddingsV3": (_JINA_3, _FLASH),
    "New": (_GTE,),
    "NomicBert": (_ROTARY, _NOMIC),
    "Roberta": (_BERT,),
    "XLMRoberta": (_BERT, _FLASH),
}
"""The names that an architecture's checkpoints may use: transformers' first, then their authors'.
"""


class _Layer(NamedTuple):
    attention: EncoderAttention
    attention_norm: LayerNorm
    mlp: EncoderMLP
    mlp_norm: LayerNorm

    def __call__(self, x: torch.Tensor, batch: Ragged) -> torch.Tensor:
        x = self.attention_norm.of_sum(self.attention(x, batch), x)
        return self.mlp_norm.of_sum(self.mlp(x, batch), x)


class BertModel(Encoder):
    """BERT and related encoders, with a classification head if the configuration has one."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        assert isinstance(config, EncoderConfig)
        super().__init__(config, weights.dtype)
        self._config = config
        top, size, eps = weights, config.hidden_size, config.norm_eps
        prefix = next((one for one in BODIES if weights.has(f"{one}.{_WORDS}.weight")), None)
        weights = weights if prefix is None else weights.at(prefix)
        parts = weights.at("embeddings")
        self._words = parts.vocabulary("word_embeddings", config.vocab_size, size)
        self._positions = self._types = None
        if config.positions == "table":
            rows = config.max_position_embeddings + config.position_offset
            self._positions = parts.vocabulary("position_embeddings", rows, size)
        if config.num_token_types:
            self._types = parts.vocabulary("token_type_embeddings", config.num_token_types, size)
        names = _names_of(config, weights)
        self._norm = LayerNorm.read(weights, names.norm, size, eps)
        cos_sin, slopes = _cos_sin(config, weights.device), _slopes(config, weights.device)
        layers = weights.at(names.layers)
        self._layers = [
            _layer(config, names, i, layers.at(i), cos_sin, slopes)
            for i in range(config.num_layers)
        ]
        self.classes = _classes(config, top, weights) if config.head == "classes" else None

    def encode(self, step: Step, batch: Ragged) -> torch.Tensor:
        x = self._words.index_select(0, step.token_ids)
        if self._positions is not None:
            places = step.positions + self._config.position_offset
            x += self._positions.index_select(0, places)
        if self._types is not None:
            if step.token_types is None:
                x += self._types[0]
            else:
                x += self._types.index_select(0, step.token_types)
        x = self._norm(x)
        for layer in self._layers:
            x = layer(x, batch)
        return x


def _names_of(config: EncoderConfig, weights: Weights) -> _Names:
    known = _NAMES[encoder_stem(config.architecture)]
    return next((one for one in known if weights.at(one.layers).has(f"0.{one.o}.weight")), known[0])


def _cos_sin(config: EncoderConfig, device: torch.device) -> torch.Tensor | None:
    if config.positions != "rotary":
        return None
    table = cos_sin_table(config.rope, config.head_dim, config.max_position_embeddings)
    return table.to(device)


def _slopes(config: EncoderConfig, device: torch.device) -> torch.Tensor | None:
    """ALiBi's slopes (arXiv 2108.12409): 2^(-8 i / n) for n heads. Where n is no power of 2: those
    of the next lower power, then every other slope of the next higher one.
    """
    if config.positions != "alibi":
        return None
    heads = config.num_heads
    lower = 1 << int(math.log2(heads))
    exact = [2.0 ** (-8 * i / lower) for i in range(1, lower + 1)]
    further = [2.0 ** (-4 * i / lower) for i in range(1, 2 * lower + 1, 2)]
    return torch.tensor([*exact, *further][:heads], device=device)


def _layer(
    config: EncoderConfig,
    names: _Names,
    number: int,
    weights: Weights,
    cos_sin: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> _Layer:
    size, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps

    def product(names: tuple[str, ...], columns: int, rows: int, *, bias: bool) -> LinearSpec:
        shares = (rows // len(names),) * len(names)
        return LinearSpec(names=names, in_features=columns, rows=shares, bias=bias)

    attention = EncoderAttention(
        layer=number,
        num_heads=config.num_heads,
        qkv=weights.linear(product(names.qkv, size, 3 * size, bias=config.qkv_bias)),
        out=weights.linear(product((names.o,), size, size, bias=config.o_bias)),
        cos_sin=cos_sin,
        slopes=slopes,
    )
    attention_norm = LayerNorm.read(weights, names.attention_norm, size, eps)
    width = 2 * inner if config.is_gated else inner
    spec = product(names.up, size, width, bias=config.mlp_bias)
    if names.activates_last:
        spec = replace(
            spec, names=("gate", "up"), rows=(inner, inner), fused=names.up[0], order=(1, 0)
        )
    up = weights.linear(spec)
    down = weights.linear(product((names.down,), inner, size, bias=config.down_bias))
    mlp = EncoderMLP(
        layer=number,
        up=up,
        down=down,
        activation=config.activation,
        is_gated=config.is_gated,
        is_fixed=weights.arena.is_fixed,
    )
    return _Layer(
        attention, attention_norm, mlp, LayerNorm.read(weights, names.mlp_norm, size, eps)
    )


def _classes(config: EncoderConfig, top: Weights, weights: Weights) -> DenseLayers:
    size, labels = config.hidden_size, config.num_labels
    if top.has("classifier.out_proj.weight"):
        dense = read_dense(top, "classifier.dense", size, size, activation="tanh")
        return DenseLayers([dense, read_dense(top, "classifier.out_proj", labels, size)])
    dense = read_dense(weights, "pooler.dense", size, size, activation="tanh")
    return DenseLayers([dense, read_dense(top, "classifier", labels, size)])
