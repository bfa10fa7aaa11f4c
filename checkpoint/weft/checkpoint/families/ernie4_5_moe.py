"""ERNIE 4.5 with experts: adjacent pairs are rotated; routed and shared experts."""

from __future__ import annotations

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import ernie_experts
from weft.checkpoint.families.family import Family, behind
from weft.checkpoint.moe_config import MoENamesConfig
from weft.checkpoint.mtp_config import ernie_head
from weft.checkpoint.parts import AttentionConfig, NamesConfig


def read_ernie_moe(family: Family) -> ModelConfig:
    """ERNIE 4.5 21B-A3B and 300B-A47B."""
    family.only("use_bias", False)
    dim = family.head_dim()
    rope = family.rope(theta=500_000.0, is_interleaved=True)
    decoder = family.decoder(AttentionConfig(rope=rope, scale=dim**-0.5), family.rms(eps=1e-5))
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
