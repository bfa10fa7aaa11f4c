"""Llama 4: layers that attend within chunks and rotate, layers that attend to all and do not,
experts.
"""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import llama4_experts
from weft.checkpoint.families.family import (
    CHUNKED,
    FULL,
    IMAGE_BODIES,
    IMAGE_HEADS,
    VISION,
    Family,
)
from weft.checkpoint.llama4_vision import read_llama4_vision
from weft.checkpoint.moe_config import MoENamesConfig
from weft.checkpoint.parts import HeadNormConfig, NamesConfig

_TOWER = tuple(f"{top}vision_model." for top in ("", "model."))


def read_llama4(family: Family) -> ModelConfig:
    """Scout and Maverick: layers without rotation attend to all positions, and their q grows with
    the position. The others attend to their chunk.
    """
    family = family.of_text()
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
    rope = family.rope(theta=500_000.0, is_interleaved=True)
    layers = tuple(
        replace(
            family.attention(rope if is_rotated else None, dim**-0.5),
            head_norm=norm if is_rotated else None,
            llama4_query_scale=None if is_rotated else growth,
            growth_counts_from=1,
        )
        for is_rotated in rotates
    )
    inner = fields.positive("intermediate_size_mlp", 16384)
    decoder = family.decoder(layers, family.rms(eps=1e-5))
    names = NamesConfig(
        bodies=IMAGE_BODIES,
        heads=IMAGE_HEADS,
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
    if family.fields is family.whole or "vision_config" not in family.raw:
        return config
    vision = read_llama4_vision(family.whole, config.hidden_size, config.vocab_size)
    return replace(config, vision=vision)
