"""Mellum 2: Qwen3-MoE's parts, with windows and rotations by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import mellum_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.parts import (
    AttentionConfig,
    DecoderConfig,
    HeadNormConfig,
    MlpConfig,
    NamesConfig,
)
from weft.checkpoint.rope import RopeConfig


def read_mellum(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    family = Family(raw, generation, where)
    fields, dim = family.fields, family.head_dim(128)
    kinds, bias = family.kinds(lambda layer: FULL), fields.flag("attention_bias", False)
    ropes = {FULL: RopeConfig(theta=5e5), SLIDING: RopeConfig(theta=1e4)}
    if "rope_parameters" in fields:
        ropes = {kind: family.rope(kind) for kind in sorted(set(kinds))}
    layers = tuple(
        AttentionConfig(
            rope=ropes[kind],
            scale=dim**-0.5,
            qkv_bias=bias,
            o_bias=bias,
            head_norm=HeadNormConfig(norm=family.rms()),
        )
        for kind in kinds
    )
    decoder = DecoderConfig(
        norm=family.rms(), layers=layers, mlp=MlpConfig(activation=family.activation())
    )
    return family.config(
        decoder,
        head_dim=dim,
        window=family.window(kinds, 1024),
        names=NamesConfig(left_out=("mtp.",)),
        kv_heads=4,
        moe=mellum_experts(fields),
    )
