"""Llama 4: layers that attend within chunks and rotate, layers that attend to all and do not,
experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import llama4_experts
from weft.checkpoint.families.family import CHUNKED, FULL, VISION, Family
from weft.checkpoint.fields import Fields
from weft.checkpoint.llama4_vision import read_llama4_vision
from weft.checkpoint.moe_config import MoENamesConfig
from weft.checkpoint.parts import (
    AttentionConfig,
    DecoderConfig,
    HeadNormConfig,
    MlpConfig,
    NamesConfig,
)

_TOWER = tuple(f"{top}vision_model." for top in ("", "model."))


def read_llama4(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Scout and Maverick: layers without rotation attend to all positions, and their q grows with
    the position. The others attend to their chunk.
    """
    section = "text_config" if "text_config" in raw else None
    family = Family(raw, generation, where, section)
    fields, dim = family.fields, family.head_dim(128)
    rotates = family.rotated_layers()
    length = None
    if "attention_chunk_size" in fields or "attention_chunk_size" not in list(fields):
        length = fields.positive("attention_chunk_size", 8192)
    kinds = family.kinds(
        lambda layer: CHUNKED if rotates[layer] and length is not None else FULL, CHUNKED
    )
    growth = None
    if fields.flag("attn_temperature_tuning", True):
        growth = (fields.number("attn_scale", 0.1), fields.positive("floor_scale", 8192))
    norm = None
    if fields.flag("use_qk_norm", True):
        norm = HeadNormConfig(norm=family.rms(eps=1e-5), is_after_rotation=True, has_weight=False)
    bias = fields.flag("attention_bias", False)
    rope = family.rope(theta=500_000.0, is_interleaved=True)
    layers = tuple(
        AttentionConfig(
            rope=rope if is_rotated else None,
            scale=dim**-0.5,
            qkv_bias=bias,
            o_bias=bias,
            head_norm=norm if is_rotated else None,
            llama4_query_scale=None if is_rotated else growth,
            growth_counts_from=1,
        )
        for is_rotated in rotates
    )
    inner = fields.positive("intermediate_size_mlp", 16384)
    decoder = DecoderConfig(
        norm=family.rms(eps=1e-5),
        layers=layers,
        mlp=MlpConfig(activation=family.activation()),
    )
    names = NamesConfig(
        bodies=("model.language_model", "language_model.model", "model"),
        heads=("lm_head", "language_model.lm_head"),
        left_out=(*VISION, *_TOWER),
        feeds=("feed_forward",),
        moe=MoENamesConfig(router="router", shared="shared_expert", is_transposed=True),
    )
    window = None if length is None else family.window(kinds, length=length)
    config = family.config(
        decoder,
        head_dim=dim,
        window=window,
        names=names,
        kv_heads=8,
        moe=llama4_experts(fields),
        intermediate_size=inner,
    )
    if section is None or "vision_config" not in raw:
        return config
    vision = read_llama4_vision(Fields(raw, where), config.hidden_size, config.vocab_size)
    return replace(config, vision=vision)
