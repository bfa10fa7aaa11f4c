"""OLMo, OLMoE and FlexOlmo. The first OLMo has norms without weights. From OLMo 2 on there are
norms of q and k over all heads together, and mostly norms only after the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import olmoe_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.moe_config import MoEConfig
from weft.checkpoint.parts import HeadNormConfig, NormConfig
from weft.checkpoint.rope import RopeConfig, rope_config


def read_olmo(family: Family) -> ModelConfig:
    """OLMo (arXiv 2402.00838): layer norms without weights; q, k and v may be bounded."""
    fields = family.fields
    layer = replace(
        family.attention(family.rope(), family.head_dim() ** -0.5),
        clip=fields.number("clip_qkv") if "clip_qkv" in fields else None,
    )
    decoder = family.decoder(layer, NormConfig(eps=1e-5, kind="plain layer"))
    return family.config(decoder)


def read_olmo2(family: Family) -> ModelConfig:
    """OLMo 2 (arXiv 2501.00656)."""
    rope = family.rope()
    return _config(family, {FULL: rope}, (FULL,) * family.num_layers)


def read_olmo3(family: Family) -> ModelConfig:
    """OLMo 3: windows in three of four layers; rope scaling applies only to the other layers."""
    kinds = family.kinds(lambda layer: SLIDING if (layer + 1) % 4 else FULL)
    return _config(family, {kind: _olmo3_rope(family, kind) for kind in set(kinds)}, kinds)


def read_olmoe(family: Family) -> ModelConfig:
    """OLMoE (arXiv 2409.02060): experts in every layer, norms before the blocks."""
    family.only("clip_qkv", None)
    kinds = (FULL,) * family.num_layers
    moe = olmoe_experts(family.fields)
    return _config(family, {FULL: family.rope()}, kinds, order="before", moe=moe)


def read_flex_olmo(family: Family) -> ModelConfig:
    """FlexOlmo (arXiv 2507.07024): OLMo 2 with OLMoE's experts."""
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
    dim = family.head_dim()
    norm = NormConfig(eps=family.rms(eps=1e-5).eps)
    layers = tuple(
        replace(
            family.attention(ropes[kind], dim**-0.5),
            head_norm=HeadNormConfig(norm=norm, over="width"),
        )
        for kind in kinds
    )
    decoder = replace(family.decoder(layers, norm), order=order)
    return family.config(decoder, head_dim=dim, window=family.window(kinds, 4096), moe=moe)
