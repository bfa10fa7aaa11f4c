"""MiniMax M2: heads rotated in part, with one norm over all heads; experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import minimax_experts
from weft.checkpoint.families.family import Family, behind, same
from weft.checkpoint.families.mixtral import LETTERS
from weft.checkpoint.parts import (
    AttentionConfig,
    DecoderConfig,
    HeadNormConfig,
    MlpConfig,
    NamesConfig,
)


def read_minimax_m2(
    raw: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> ModelConfig:
    """MiniMax M2 and M2.1."""
    family = Family(raw, generation, where)
    fields, dim, norm = family.fields, family.head_dim(128), family.rms()
    family.only("use_qk_norm", True)
    family.only("qk_norm_type", "per_layer")
    family.only("attn_type_list", [1] * family.num_layers)
    partial = fields.count("rotary_dim", dim) / dim
    layer = AttentionConfig(
        rope=family.rope(theta=5e6, partial=partial),
        scale=dim**-0.5,
        head_norm=HeadNormConfig(norm=norm, over="width"),
    )
    decoder = DecoderConfig(
        norm=norm,
        layers=same(layer, family.num_layers),
        mlp=MlpConfig(activation=family.activation()),
    )
    names = NamesConfig(
        feeds=("block_sparse_moe", "mlp"),
        moe=replace(LETTERS, correction="e_score_correction_bias"),
        left_out=behind(family.num_layers),
    )
    moe = minimax_experts(fields)
    return family.config(decoder, head_dim=dim, names=names, moe=moe, kv_heads=8)
