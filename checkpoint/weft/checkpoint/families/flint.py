"""Flint: normalised heads, sinks, windows in most layers, routed experts and a shared one."""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import flint_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.moe_config import MoENamesConfig
from weft.checkpoint.parts import HeadNormConfig, NamesConfig


def read_flint(family: Family) -> ModelConfig:
    """Flint: layers without a window do not rotate."""
    fields, dim, last = family.fields, family.head_dim(128), family.num_layers - 1
    kinds = family.kinds(lambda n: FULL if n in (0, last) or n % 4 == 1 else SLIDING)
    rope = family.rope()
    layers = tuple(
        replace(
            family.attention(rope if kind == SLIDING else None, dim**-0.5),
            head_norm=HeadNormConfig(norm=family.rms()),
            has_sinks=True,
        )
        for kind in kinds
    )
    decoder = family.decoder(layers)
    return family.config(
        decoder,
        head_dim=dim,
        window=family.window(kinds, 513),
        names=NamesConfig(sinks="softmax_offset", moe=MoENamesConfig(shared="shared_expert")),
        moe=flint_experts(fields),
        kv_heads=4,
    )
