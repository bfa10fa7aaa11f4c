"""Hunyuan, whose heads are normalised after the rotation, and Hy3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import hunyuan_experts, hy3_experts
from weft.checkpoint.families.family import Family, behind, same
from weft.checkpoint.moe_config import MoEConfig, MoENamesConfig
from weft.checkpoint.parts import (
    AttentionConfig,
    DecoderConfig,
    HeadNormConfig,
    MlpConfig,
    NamesConfig,
)
from weft.checkpoint.rope import RopeConfig


def read_hunyuan(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Hunyuan (0.5B to 7B)."""
    return _config(Family(raw, generation, where))


def read_hunyuan_moe(
    raw: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> ModelConfig:
    """Hunyuan A13B: routed experts and a shared one in every layer."""
    family = Family(raw, generation, where)
    names = MoENamesConfig(router="gate.wg", shared="shared_mlp")
    return _config(family, hunyuan_experts(family.fields), NamesConfig(moe=names))


def read_hy3(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Hy3: norms before the rotation, sigmoids that choose experts."""
    family = Family(raw, generation, where)
    fields, dim, norm = family.fields, family.head_dim(128), family.rms(eps=1e-5)
    bias = fields.flag("attention_bias", False)
    layer = AttentionConfig(
        rope=family.rope(theta=11_158_840.0),
        scale=dim**-0.5,
        qkv_bias=bias,
        o_bias=bias,
        head_norm=HeadNormConfig(norm=norm),
    )
    decoder = DecoderConfig(
        norm=norm,
        layers=same(layer, family.num_layers),
        mlp=MlpConfig(activation=family.activation(), bias=fields.flag("mlp_bias", False)),
    )
    names = NamesConfig(
        left_out=behind(family.num_layers),
        moe=MoENamesConfig(router="router.gate", correction="expert_bias", shared="shared_mlp"),
    )
    return family.config(decoder, head_dim=dim, names=names, moe=hy3_experts(fields), kv_heads=8)


def _config(
    family: Family, moe: MoEConfig | None = None, names: NamesConfig | None = None
) -> ModelConfig:
    dim, norm = family.head_dim(), family.rms(eps=1e-5)
    family.only("use_qk_norm", True)
    family.only("use_cla", False)
    bias = family.fields.flag("attention_bias", False)
    layer = AttentionConfig(
        rope=_rope(family, dim),
        scale=dim**-0.5,
        qkv_bias=bias,
        o_bias=bias,
        head_norm=HeadNormConfig(
            norm=norm, is_after_rotation=True, q_name="query_layernorm", k_name="key_layernorm"
        ),
    )
    mlp = MlpConfig(activation=family.activation())
    decoder = DecoderConfig(norm=norm, layers=same(layer, family.num_layers), mlp=mlp)
    return family.config(decoder, head_dim=dim, moe=moe, names=names)


def _rope(family: Family, dim: int) -> RopeConfig:
    """Type `dynamic` with an alpha means a larger base at every length."""
    name = next((n for n in ("rope_parameters", "rope_scaling") if family.fields.get(n)), "")
    values = family.fields.section(name)
    kind = values.text("rope_type", values.text("type", "default"))
    if kind != "dynamic" or not values.get("alpha"):
        return family.rope()
    theta = values.number("rope_theta", family.fields.number("rope_theta", 1e4))
    return replace(RopeConfig(theta=1.0), theta=theta * values.number("alpha") ** (dim / (dim - 2)))
