"""GLM-4 (0414): half of each head is rotated, in adjacent pairs; norms around both blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.family import Family
from weft.checkpoint.parts import AttentionConfig, NamesConfig


def read_glm(family: Family) -> ModelConfig:
    """GLM-4-9B in its first layout: norms before the blocks only."""
    return _config(family, NamesConfig(gate_up="gate_up_proj"), "before")


def read_glm4(family: Family) -> ModelConfig:
    """GLM-4-0414."""
    names = NamesConfig(
        gate_up="gate_up_proj",
        mixer_post="post_self_attn_layernorm",
        feed_post="post_mlp_layernorm",
    )
    return _config(family, names, "around")


def _config(family: Family, names: NamesConfig, order: Any) -> ModelConfig:
    dim = family.head_dim(128)
    layer = AttentionConfig(
        rope=family.rope(partial=0.5, is_interleaved=True),
        scale=dim**-0.5,
        qkv_bias=family.fields.flag("attention_bias", True),
    )
    decoder = replace(family.decoder(layer, family.rms(eps=1.5625e-7)), order=order)
    return family.config(decoder, head_dim=dim, names=names, kv_heads=2)
