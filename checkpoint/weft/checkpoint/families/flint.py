"""Flint: normalised heads, sinks, windows in most layers, routed experts and a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import flint_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.moe_config import MoENamesConfig
from weft.checkpoint.parts import (
    AttentionConfig,
    DecoderConfig,
    HeadNormConfig,
    MlpConfig,
    NamesConfig,
)


def read_flint(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Flint: layers without a window do not rotate."""
    family = Family(raw, generation, where)
    fields, dim, last = family.fields, family.head_dim(128), family.num_layers - 1
    kinds = family.kinds(lambda n: FULL if n in (0, last) or n % 4 == 1 else SLIDING)
    bias, rope = fields.flag("attention_bias", False), family.rope()
    layers = tuple(
        AttentionConfig(
            rope=rope if kind == SLIDING else None,
            scale=dim**-0.5,
            qkv_bias=bias,
            o_bias=bias,
            head_norm=HeadNormConfig(norm=family.rms()),
            has_sinks=True,
        )
        for kind in kinds
    )
    decoder = DecoderConfig(
        norm=family.rms(), layers=layers, mlp=MlpConfig(activation=family.activation())
    )
    return family.config(
        decoder,
        head_dim=dim,
        window=family.window(kinds, 513),
        names=NamesConfig(sinks="softmax_offset", moe=MoENamesConfig(shared="shared_expert")),
        moe=flint_experts(fields),
        kv_heads=4,
    )
