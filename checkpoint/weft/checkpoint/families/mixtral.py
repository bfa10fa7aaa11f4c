"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import mixtral_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family, same
from weft.checkpoint.moe_config import MoENamesConfig
from weft.checkpoint.parts import AttentionConfig, DecoderConfig, MlpConfig, NamesConfig

LETTERS = MoENamesConfig(gate_up=("w1", "w3"), down="w2")


def read_mixtral(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Mixtral 8x7B and 8x22B (arXiv 2401.04088)."""
    family = Family(raw, generation, where)
    has_window, dim = "sliding_window" in family.fields, family.head_dim()
    kinds = family.kinds(lambda layer: SLIDING if has_window else FULL)
    layer = AttentionConfig(rope=family.rope(theta=1e6), scale=dim**-0.5)
    decoder = DecoderConfig(
        norm=family.rms(eps=1e-5),
        layers=same(layer, family.num_layers),
        mlp=MlpConfig(activation=family.activation()),
    )
    return family.config(
        decoder,
        head_dim=dim,
        window=family.window(kinds),
        names=NamesConfig(feeds=("block_sparse_moe", "mlp"), moe=LETTERS),
        moe=mixtral_experts(family.fields),
        kv_heads=8,
    )
