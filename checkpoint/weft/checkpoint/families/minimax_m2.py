"""MiniMax M2: heads rotated in part, with one norm over all heads; experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import minimax_experts
from weft.checkpoint.families.family import Family, behind
from weft.checkpoint.families.mixtral import LETTERS
from weft.checkpoint.parts import AttentionConfig, HeadNormConfig, NamesConfig


def read_minimax_m2(family: Family) -> ModelConfig:
    """MiniMax M2 and M2.1."""
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
    decoder = family.decoder(layer, norm)
    names = NamesConfig(
        feeds=("block_sparse_moe", "mlp"),
        moe=replace(LETTERS, correction="e_score_correction_bias"),
        left_out=behind(family.num_layers),
    )
    moe = minimax_experts(fields)
    return family.config(decoder, head_dim=dim, names=names, moe=moe, kv_heads=8)
