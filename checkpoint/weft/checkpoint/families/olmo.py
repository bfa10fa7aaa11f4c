"""OLMo, OLMoE and FlexOlmo. The first OLMo has norms without weights. From OLMo 2 on there are
norms of q and k over all heads together, and mostly norms only after the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import olmoe_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family, same
from weft.checkpoint.moe_config import MoEConfig
from weft.checkpoint.parts import (
    AttentionConfig,
    DecoderConfig,
    HeadNormConfig,
    MlpConfig,
    NormConfig,
)
from weft.checkpoint.rope import RopeConfig, rope_config


def read_olmo(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """OLMo (arXiv 2402.00838): layer norms without weights; q, k and v may be bounded."""
    family = Family(raw, generation, where)
    fields, bias = family.fields, family.fields.flag("attention_bias", False)
    layer = AttentionConfig(
        rope=family.rope(),
        scale=family.head_dim() ** -0.5,
        qkv_bias=bias,
        o_bias=bias,
        clip=fields.number("clip_qkv") if "clip_qkv" in fields else None,
    )
    decoder = DecoderConfig(
        norm=NormConfig(eps=1e-5, kind="plain layer"),
        layers=same(layer, family.num_layers),
        mlp=MlpConfig(activation=family.activation()),
    )
    return family.config(decoder)


def read_olmo2(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """OLMo 2 (arXiv 2501.00656)."""
    family = Family(raw, generation, where)
    rope = family.rope()
    return _config(family, {FULL: rope}, (FULL,) * family.num_layers)


def read_olmo3(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """OLMo 3: windows in three of four layers; rope scaling applies only to the other layers."""
    family = Family(raw, generation, where)
    kinds = family.kinds(lambda layer: SLIDING if (layer + 1) % 4 else FULL)
    return _config(family, {kind: _olmo3_rope(family, kind) for kind in set(kinds)}, kinds)


def read_olmoe(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """OLMoE (arXiv 2409.02060): experts in every layer, norms before the blocks."""
    family = Family(raw, generation, where)
    family.only("clip_qkv", None)
    kinds = (FULL,) * family.num_layers
    moe = olmoe_experts(family.fields)
    return _config(family, {FULL: family.rope()}, kinds, order="before", moe=moe)


def read_flex_olmo(
    raw: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> ModelConfig:
    """FlexOlmo (arXiv 2507.07024): OLMo 2 with OLMoE's experts."""
    family = Family(raw, generation, where)
    rope = family.rope(theta=500_000.0)
    moe = olmoe_experts(family.fields)
    return _config(family, {FULL: rope}, (FULL,) * family.num_layers, moe=moe)


def _olmo3_rope(family: Family, kind: str) -> RopeConfig:
    fields, theta = family.fields, 500_000.0
    if kind == SLIDING and fields.get("rope_parameters") is None:
        return RopeConfig(theta=fields.number("rope_theta", theta))
    return rope_config(fields, kind=kind, theta=theta)


def _config(
    family: Family,
    ropes: Mapping[str, RopeConfig],
    kinds: tuple[str, ...],
    *,
    order: Literal["before", "after"] = "after",
    moe: MoEConfig | None = None,
) -> ModelConfig:
    dim, bias = family.head_dim(), family.fields.flag("attention_bias", False)
    norm = NormConfig(eps=family.rms(eps=1e-5).eps)
    layers = tuple(
        AttentionConfig(
            rope=ropes[kind],
            scale=dim**-0.5,
            qkv_bias=bias,
            o_bias=bias,
            head_norm=HeadNormConfig(norm=norm, over="width"),
        )
        for kind in kinds
    )
    mlp = MlpConfig(activation=family.activation())
    decoder = DecoderConfig(norm=norm, layers=layers, mlp=mlp, order=order)
    return family.config(decoder, head_dim=dim, window=family.window(kinds, 4096), moe=moe)
