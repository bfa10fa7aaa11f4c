"""Granite 3 and 4 dense: Llama's layers with factors on embedding, scores, additions and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.engine.checkpoint.config import ModelConfig
from weft.engine.checkpoint.families.experts import mixtral_experts
from weft.engine.checkpoint.families.family import Family, same
from weft.engine.checkpoint.moe_config import MoEConfig, MoENamesConfig
from weft.engine.checkpoint.parts import AttentionConfig, DecoderConfig, MlpConfig, NamesConfig


def read_granite(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Granite."""
    return _config(Family(raw, generation, where))


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
    family: Family, moe: MoEConfig | None = None, names: NamesConfig | None = None
) -> ModelConfig:
    fields, bias = family.fields, family.fields.flag("attention_bias", False)
    layer = AttentionConfig(
        rope=family.rope(),
        scale=fields.number("attention_multiplier", 1.0),
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
