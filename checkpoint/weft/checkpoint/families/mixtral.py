"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import mixtral_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.moe_config import MoENamesConfig
from weft.checkpoint.parts import AttentionConfig, NamesConfig

LETTERS = MoENamesConfig(gate_up=("w1", "w3"), down="w2")


def read_mixtral(family: Family) -> ModelConfig:
    """Mixtral 8x7B and 8x22B (arXiv 2401.04088)."""
    has_window, dim = "sliding_window" in family.fields, family.head_dim()
    kinds = family.kinds(lambda layer: SLIDING if has_window else FULL)
    layer = AttentionConfig(rope=family.rope(theta=1e6), scale=dim**-0.5)
    decoder = family.decoder(layer, family.rms(eps=1e-5))
    return family.config(
        decoder,
        head_dim=dim,
        window=family.window(kinds),
        names=NamesConfig(feeds=("block_sparse_moe", "mlp"), moe=LETTERS),
        moe=mixtral_experts(family.fields),
        kv_heads=8,
    )
