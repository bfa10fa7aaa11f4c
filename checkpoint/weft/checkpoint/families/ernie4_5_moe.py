"""ERNIE 4.5 with experts: adjacent pairs are rotated; routed and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import ernie_experts
from weft.checkpoint.families.family import Family, behind, same
from weft.checkpoint.moe_config import MoENamesConfig
from weft.checkpoint.mtp_config import ernie_head
from weft.checkpoint.parts import AttentionConfig, DecoderConfig, MlpConfig, NamesConfig


def read_ernie_moe(
    raw: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> ModelConfig:
    """ERNIE 4.5 21B-A3B and 300B-A47B."""
    family = Family(raw, generation, where)
    family.only("use_bias", False)
    dim = family.head_dim()
    rope = family.rope(theta=500_000.0, is_interleaved=True)
    decoder = DecoderConfig(
        norm=family.rms(eps=1e-5),
        layers=same(AttentionConfig(rope=rope, scale=dim**-0.5), family.num_layers),
        mlp=MlpConfig(activation=family.activation()),
    )
    statics = MoENamesConfig(correction="moe_statics.e_score_correction_bias", correction_axes=1)
    return family.config(
        decoder,
        head_dim=dim,
        names=NamesConfig(moe=statics, left_out=(*behind(family.num_layers), "model.mtp_")),
        moe=ernie_experts(family.fields),
        is_tied=True,
        kv_heads=4,
        mtp=ernie_head(),
    )
