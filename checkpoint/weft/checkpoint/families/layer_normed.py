"""Families with layer norms: StarCoder2, StableLM, Nemotron, Jais 2."""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.parts import (
    AttentionConfig,
    HeadNormConfig,
    MlpConfig,
    NamesConfig,
    NormConfig,
)


def read_starcoder2(family: Family) -> ModelConfig:
    """StarCoder2 (arXiv 2402.19173): biases everywhere, an MLP without gate."""
    fields, bias, dim = family.fields, family.fields.flag("use_bias", True), family.head_dim()
    layer = AttentionConfig(rope=family.rope(), scale=dim**-0.5, qkv_bias=bias, o_bias=bias)
    decoder = family.decoder(
        layer,
        NormConfig(eps=fields.number("norm_epsilon", 1e-5), kind="layer", has_bias=True),
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


def read_stablelm(family: Family) -> ModelConfig:
    """StableLM 2: a quarter of each head is rotated; heads may be normalised, and both blocks may
    read one norm.
    """
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
    decoder = replace(
        family.decoder(layer, norm),
        order="parallel" if fields.flag("use_parallel_residual", False) else "before",
    )
    return family.config(decoder, kv_heads=32)


def read_nemotron(family: Family) -> ModelConfig:
    """Nemotron 4 and Minitron, dense: layer norms by 1 + weight, an MLP of squared ReLU."""
    fields, dim = family.fields, family.head_dim()
    layer = family.attention(family.rope(partial=0.5), dim**-0.5)
    norm = NormConfig(
        eps=fields.number("norm_eps", 1e-5), kind="layer", has_bias=True, adds_one=True
    )
    mlp = MlpConfig(
        activation=family.activation("relu2"), is_gated=False, bias=fields.flag("mlp_bias", False)
    )
    decoder = family.decoder(layer, norm, mlp=mlp)
    return family.config(decoder, head_dim=dim)


def read_jais2(family: Family) -> ModelConfig:
    """Jais 2: Llama with layer norms, biases and an MLP of squared ReLU."""
    fields, dim = family.fields, family.head_dim()
    bias = fields.flag("attention_bias", True)
    layer = AttentionConfig(rope=family.rope(), scale=dim**-0.5, qkv_bias=bias, o_bias=bias)
    mlp = MlpConfig(
        activation=family.activation("relu2"), is_gated=False, bias=fields.flag("mlp_bias", True)
    )
    norm = NormConfig(eps=fields.number("layer_norm_eps", 1e-5), kind="layer", has_bias=True)
    decoder = family.decoder(layer, norm, mlp=mlp)
    return family.config(decoder, head_dim=dim)
