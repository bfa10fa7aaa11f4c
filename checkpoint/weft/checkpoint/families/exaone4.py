"""EXAONE 4: norms only after the blocks, normalised heads, layers without rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import deepseek_v3_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.moe_config import MoEConfig, MoENamesConfig
from weft.checkpoint.parts import AttentionConfig, HeadNormConfig, NamesConfig


def read_exaone4(family: Family) -> ModelConfig:
    """EXAONE 4.0: if there are windows, layers without one do not rotate."""
    return _config(family)


def read_exaone_moe(family: Family) -> ModelConfig:
    """K-EXAONE: norms before the blocks, and DeepSeek V3's experts."""
    fields = family.fields
    named = fields.replaced(
        num_local_experts=fields.positive("num_experts"),
        n_shared_experts=fields.count("num_shared_experts", 1),
        n_routed_experts=None,
    )
    return _config(family, "before", deepseek_v3_experts(named, num_dense=1))


def _config(
    family: Family, order: Literal["after", "before"] = "after", moe: MoEConfig | None = None
) -> ModelConfig:
    fields = family.fields
    has_window = fields.get("sliding_window") is not None or "sliding_window" not in list(fields)
    kinds = (FULL,) * family.num_layers
    if has_window:
        kinds = family.kinds(lambda layer: _kind(family, layer))
    dim, norm, rope = family.head_dim(), family.rms(eps=1e-5), family.rope()
    layers = tuple(
        AttentionConfig(
            rope=rope if kind == SLIDING or not has_window else None,
            scale=dim**-0.5,
            head_norm=HeadNormConfig(norm=norm),
        )
        for kind in kinds
    )
    decoder = replace(family.decoder(layers, norm), order=order)
    names = NamesConfig(
        left_out=("mtp.",), moe=MoENamesConfig(correction="e_score_correction_bias")
    )
    window = family.window(kinds, 4096)
    return family.config(decoder, head_dim=dim, window=window, names=names, moe=moe)


def _kind(family: Family, layer: int) -> str:
    """A pattern has a letter for each layer; a number is the distance between layers without a
    window.
    """
    pattern = family.fields.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        is_last = layer == family.num_layers - 1
        return SLIDING if pattern[layer % len(pattern)] == "L" and not is_last else FULL
    every = family.fields.positive("sliding_window_pattern", 4)
    return SLIDING if (layer + 1) % every else FULL
