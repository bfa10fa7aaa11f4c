"""Granite 3 and 4 dense, and HyperCLOVA X: Llama's layers with factors on embedding, scores,
additions and logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.engine.checkpoint.config import ModelConfig
from weft.engine.checkpoint.families.experts import mixtral_experts
from weft.engine.checkpoint.families.family import Family, same
from weft.engine.checkpoint.moe_config import MoEConfig, MoENamesConfig
from weft.engine.checkpoint.parts import AttentionConfig, DecoderConfig, MlpConfig, NamesConfig


def read_granite(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Granite."""
    return _config(Family(raw, generation, where))


def read_hyperclovax(
    raw: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> ModelConfig:
    """HyperCLOVA X SEED Think: norms around both blocks; the factor of logits multiplies."""
    family = Family(raw, generation, where)
    fields, names = family.fields, NamesConfig(mixer_post="post_norm1", feed_post="post_norm2")
    config = _config(family, names=names, scale=family.head_dim() ** -0.5)
    assert config.decoder is not None
    is_around = fields.flag("use_post_norm", True)
    factor = fields.number("logits_scaling", 1.0)
    order: Any = "around" if is_around else "before"
    return replace(config, decoder=replace(config.decoder, order=order, logit_multiplier=factor))


def read_granite_moe(
    raw: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> ModelConfig:
    """Granite 3 with experts in every layer."""
    family = Family(raw, generation, where)
    names = MoENamesConfig(
        router="router.layer",
        stacked=("input_linear.weight", "output_linear.weight"),
        experts="",
    )
    moe = mixtral_experts(family.fields)
    return _config(family, moe, NamesConfig(feeds=("block_sparse_moe",), moe=names))


def _config(
    family: Family,
    moe: MoEConfig | None = None,
    names: NamesConfig | None = None,
    *,
    scale: float = 1.0,
) -> ModelConfig:
    fields, bias = family.fields, family.fields.flag("attention_bias", False)
    layer = AttentionConfig(
        rope=family.rope(),
        scale=fields.number("attention_multiplier", scale),
        qkv_bias=bias,
        o_bias=bias,
    )
    decoder = DecoderConfig(
        norm=family.rms(),
        layers=same(layer, family.num_layers),
        mlp=MlpConfig(activation=family.activation(), bias=fields.flag("mlp_bias", False)),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logit_multiplier=1.0 / fields.number("logits_scaling", 1.0),
    )
    return family.config(decoder, moe=moe, names=names)
