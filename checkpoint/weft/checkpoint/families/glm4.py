"""GLM-4 (0414): half of each head is rotated, in adjacent pairs; norms around both blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.family import Family, same
from weft.checkpoint.parts import AttentionConfig, DecoderConfig, MlpConfig, NamesConfig


def read_glm(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """GLM-4-9B in its first layout: norms before the blocks only."""
    family = Family(raw, generation, where)
    return _config(family, NamesConfig(gate_up="gate_up_proj"), "before")


def read_glm4(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """GLM-4-0414."""
    names = NamesConfig(
        gate_up="gate_up_proj",
        mixer_post="post_self_attn_layernorm",
        feed_post="post_mlp_layernorm",
    )
    return _config(Family(raw, generation, where), names, "around")


def _config(family: Family, names: NamesConfig, order: Any) -> ModelConfig:
    dim = family.head_dim(128)
    layer = AttentionConfig(
        rope=family.rope(partial=0.5, is_interleaved=True),
        scale=dim**-0.5,
        qkv_bias=family.fields.flag("attention_bias", True),
    )
    decoder = DecoderConfig(
        norm=family.rms(eps=1.5625e-7),
        layers=same(layer, family.num_layers),
        mlp=MlpConfig(activation=family.activation()),
        order=order,
    )
    return family.config(decoder, head_dim=dim, names=names, kv_heads=2)
