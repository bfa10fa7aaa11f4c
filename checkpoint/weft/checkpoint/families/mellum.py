"""Mellum 2: Qwen3-MoE's parts, with windows and rotations by layer."""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import mellum_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.parts import HeadNormConfig, NamesConfig
from weft.checkpoint.rope import RopeConfig


def read_mellum(family: Family) -> ModelConfig:
    fields, dim = family.fields, family.head_dim(128)
    kinds = family.kinds(lambda layer: FULL)
    ropes = {FULL: RopeConfig(theta=5e5), SLIDING: RopeConfig(theta=1e4)}
    if "rope_parameters" in fields:
        ropes = {kind: family.rope(kind) for kind in sorted(set(kinds))}
    layers = tuple(
        replace(
            family.attention(ropes[kind], dim**-0.5), head_norm=HeadNormConfig(norm=family.rms())
        )
        for kind in kinds
    )
    decoder = family.decoder(layers)
    return family.config(
        decoder,
        head_dim=dim,
        window=family.window(kinds, 1024),
        names=NamesConfig(left_out=("mtp.",)),
        kv_heads=4,
        moe=mellum_experts(fields),
    )
