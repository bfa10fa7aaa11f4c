"""Laguna and Step 3.5: windows by layer, each kind of layer with its own rotation and number of
query heads, and a gate on attention's result.
"""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import laguna_experts, step3_experts
from weft.checkpoint.families.family import FULL, SLIDING, VISION, Family, behind
from weft.checkpoint.moe_config import MoENamesConfig
from weft.checkpoint.parts import GateConfig, HeadNormConfig, MlpConfig, NamesConfig
from weft.checkpoint.rope import RopeConfig, rope_config


def read_laguna(family: Family) -> ModelConfig:
    """Laguna (XS.2 and S-2.1): a softplus gate."""
    fields, count, dim = family.fields, family.num_layers, family.head_dim(128)
    family.only("moe_apply_router_weight_on_input", False)
    kinds = family.kinds(lambda layer: FULL)
    heads = fields.indices("num_attention_heads_per_layer") or (family.num_heads,) * count
    if len(heads) != count:
        raise fields.error("num_attention_heads_per_layer", f"expected {count} numbers")
    ropes = {FULL: RopeConfig(theta=5e5, partial=0.5), SLIDING: RopeConfig(theta=1e4)}
    if "rope_parameters" in fields:
        ropes = {kind: family.rope(kind, partial=1.0) for kind in sorted(set(kinds))}
    gating = fields.get("gating")
    if gating not in (None, True, "per-head", "per-element"):
        raise fields.error("gating", f"{gating!r} is not supported")
    gate = GateConfig(name="g_proj", activation="softplus", is_by_head=gating != "per-element")
    layers = tuple(
        replace(
            family.attention(ropes[kind], dim**-0.5),
            head_norm=HeadNormConfig(norm=family.rms()),
            heads=own,
            gate=gate,
        )
        for kind, own in zip(kinds, heads, strict=True)
    )
    decoder = family.decoder(layers)
    moe = MoENamesConfig(correction="experts.e_score_correction_bias", shared="shared_expert")
    return family.config(
        decoder,
        head_dim=dim,
        window=family.window(kinds, 512),
        names=NamesConfig(moe=moe, left_out=behind(count)),
        kv_heads=8,
        moe=laguna_experts(fields),
    )


def read_step3(family: Family) -> ModelConfig:
    """Step 3.5 Flash and Step 3.7 Flash, text: a gate on each head, MLPs limited by layer. Lists by
    layer may continue for the layers that predict further tokens.
    """
    family = family.of_text()
    fields, count = family.fields, family.num_layers
    kinds = family.kinds(lambda layer: FULL)
    dim = family.head_dim(128)
    other = fields.section("attention_other_setting")
    sliding_heads = other.positive("num_attention_heads", family.num_heads)
    sliding_heads = fields.positive("num_sliding_attention_heads", sliding_heads)
    scale = fields.number("query_pre_attn_scalar", float(dim)) ** -0.5
    norm = family.rms(adds_one=True, eps=1e-5)
    layers = tuple(
        replace(
            family.attention(_step3_rope(family, layer, kind), scale),
            head_norm=HeadNormConfig(norm=norm),
            heads=sliding_heads if kind == SLIDING else None,
            gate=GateConfig(name="g_proj", is_by_head=True),
        )
        for layer, kind in enumerate(kinds)
    )
    limits = family.numbers("swiglu_limits_shared")
    decoder = family.decoder(
        layers, norm, mlp=MlpConfig(activation=family.activation(), limits=limits)
    )
    names = NamesConfig(
        bodies=("model.language_model", "model"),
        left_out=(*VISION, "vision_model.", "vit_large_projector.", *behind(count)),
        feeds=("moe", "mlp"),
        moe=MoENamesConfig(
            correction="router_bias",
            stacked=("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
            experts="",
            shared="share_expert",
            is_shared_outside=True,
        ),
    )
    groups = fields.positive("num_attention_groups", fields.positive("num_key_value_heads", 8))
    moe = step3_experts(fields, family.numbers("swiglu_limits"), limits)
    return family.config(
        decoder,
        head_dim=dim,
        window=family.window(kinds),
        names=names,
        kv_heads=groups,
        moe=moe,
    )


def _step3_rope(family: Family, layer: int, kind: str) -> RopeConfig:
    """Files for its own code list bases and shares by layer; only layers without a window are
    scaled.
    """
    fields = family.fields
    if "rope_parameters" in fields:
        return family.rope(kind, partial=1.0)
    theta = family.of_layer("rope_theta", layer, 1e4)
    partial = family.of_layer("partial_rotary_factors", layer, 1.0)
    if kind == SLIDING:
        return RopeConfig(theta=theta, partial=partial)
    own = fields.replaced(rope_theta=theta, partial_rotary_factor=partial)
    return rope_config(own, partial=1.0)
