"""Phi-3 and Phi-4: fused projections, rotations in part, LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.engine.checkpoint.config import ModelConfig
from weft.engine.checkpoint.families.family import FULL, SLIDING, Family, same
from weft.engine.checkpoint.parts import AttentionConfig, DecoderConfig, MlpConfig, NamesConfig


def read_phi3(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Phi-3 (arXiv 2404.14219)."""
    family = Family(raw, generation, where)
    family.only("attention_bias", False)
    dim = family.head_dim()
    layer = AttentionConfig(rope=family.rope(partial=1.0), scale=dim**-0.5)
    kind = SLIDING if "sliding_window" in family.fields else FULL
    decoder = DecoderConfig(
        norm=family.rms(eps=1e-5),
        layers=same(layer, family.num_layers),
        mlp=MlpConfig(activation=family.activation()),
    )
    names = NamesConfig(qkv="qkv_proj", gate_up="gate_up_proj")
    window = family.window((kind,) * family.num_layers)
    return family.config(decoder, head_dim=dim, window=window, names=names)
