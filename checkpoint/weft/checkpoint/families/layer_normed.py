"""Families with layer norms: StarCoder2, StableLM, Nemotron, Jais 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.family import FULL, SLIDING, Family, same
from weft.checkpoint.parts import (
    AttentionConfig,
    DecoderConfig,
    HeadNormConfig,
    MlpConfig,
    NamesConfig,
    NormConfig,
)


def read_starcoder2(
    raw: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> ModelConfig:
    """StarCoder2 (arXiv 2402.19173): biases everywhere, an MLP without gate."""
    family = Family(raw, generation, where)
    fields, bias, dim = family.fields, family.fields.flag("use_bias", True), family.head_dim()
    layer = AttentionConfig(rope=family.rope(), scale=dim**-0.5, qkv_bias=bias, o_bias=bias)
    decoder = DecoderConfig(
        norm=NormConfig(eps=fields.number("norm_epsilon", 1e-5), kind="layer", has_bias=True),
        layers=same(layer, family.num_layers),
        mlp=MlpConfig(activation=family.activation("gelu_pytorch_tanh"), is_gated=False, bias=bias),
    )
    kind = SLIDING if "sliding_window" in fields else FULL
    return family.config(
        decoder,
        window=family.window((kind,) * family.num_layers),
        names=NamesConfig(up="c_fc", down="c_proj"),
        is_tied=True,
        kv_heads=2,
    )


def read_stablelm(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """StableLM 2: a quarter of each head is rotated; heads may be normalised, and both blocks may
    read one norm.
    """
    family = Family(raw, generation, where)
    fields, dim = family.fields, family.head_dim()
    norm = NormConfig(eps=fields.number("layer_norm_eps", 1e-5), kind="layer", has_bias=True)
    of_heads = HeadNormConfig(
        norm=NormConfig(eps=norm.eps, kind="layer"),
        over="each",
        q_name="q_layernorm.norms",
        k_name="k_layernorm.norms",
    )
    layer = AttentionConfig(
        rope=family.rope(partial=0.25),
        scale=dim**-0.5,
        qkv_bias=fields.flag("use_qkv_bias", False),
        head_norm=of_heads if fields.flag("qk_layernorm", False) else None,
    )
    decoder = DecoderConfig(
        norm=norm,
        layers=same(layer, family.num_layers),
        mlp=MlpConfig(activation=family.activation()),
        order="parallel" if fields.flag("use_parallel_residual", False) else "before",
    )
    return family.config(decoder, kv_heads=32)


def read_nemotron(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Nemotron 4 and Minitron, dense: layer norms by 1 + weight, an MLP of squared ReLU."""
    family = Family(raw, generation, where)
    fields, dim = family.fields, family.head_dim()
    bias = fields.flag("attention_bias", False)
    layer = AttentionConfig(
        rope=family.rope(partial=0.5), scale=dim**-0.5, qkv_bias=bias, o_bias=bias
    )
    norm = NormConfig(
        eps=fields.number("norm_eps", 1e-5), kind="layer", has_bias=True, adds_one=True
    )
    mlp = MlpConfig(
        activation=family.activation("relu2"), is_gated=False, bias=fields.flag("mlp_bias", False)
    )
    decoder = DecoderConfig(norm=norm, layers=same(layer, family.num_layers), mlp=mlp)
    return family.config(decoder, head_dim=dim)


def read_jais2(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Jais 2: Llama with layer norms, biases and an MLP of squared ReLU."""
    family = Family(raw, generation, where)
    fields, dim = family.fields, family.head_dim()
    bias = fields.flag("attention_bias", True)
    layer = AttentionConfig(rope=family.rope(), scale=dim**-0.5, qkv_bias=bias, o_bias=bias)
    mlp = MlpConfig(
        activation=family.activation("relu2"), is_gated=False, bias=fields.flag("mlp_bias", True)
    )
    norm = NormConfig(eps=fields.number("layer_norm_eps", 1e-5), kind="layer", has_bias=True)
    decoder = DecoderConfig(norm=norm, layers=same(layer, family.num_layers), mlp=mlp)
    return family.config(decoder, head_dim=dim)
