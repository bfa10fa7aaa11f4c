"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, routed experts and a shared one with a gate."""

from __future__ import annotations

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import qwen2_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.moe_config import MoENamesConfig
from weft.checkpoint.parts import AttentionConfig, NamesConfig


def read_qwen2_moe(family: Family) -> ModelConfig:
    """Qwen2-57B-A14B and Qwen1.5-MoE-A2.7B."""
    fields, dim = family.fields, family.head_dim()
    has_window = fields.flag("use_sliding_window", False)
    last = fields.count("max_window_layers", 28)
    kinds = family.kinds(
        lambda layer: SLIDING if has_window and layer % 2 == 0 and layer < last else FULL
    )
    if SLIDING in kinds and not has_window:
        raise fields.error("layer_types", "there is a window without use_sliding_window")
    layer = AttentionConfig(
        rope=family.rope(), scale=dim**-0.5, qkv_bias=fields.flag("qkv_bias", True)
    )
    decoder = family.decoder(layer)
    return family.config(
        decoder,
        head_dim=dim,
        window=family.window(kinds, 4096),
        names=NamesConfig(moe=MoENamesConfig(shared="shared_expert")),
        moe=qwen2_experts(fields),
    )
