"""EXAONE 4: norms only after the blocks, normalised heads, layers without rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.engine.checkpoint.config import ModelConfig
from weft.engine.checkpoint.families.family import FULL, SLIDING, Family
from weft.engine.checkpoint.parts import AttentionConfig, DecoderConfig, HeadNormConfig, MlpConfig


def read_exaone4(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """EXAONE 4.0: where there are windows, the other layers do not rotate."""
    family = Family(raw, generation, where)
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
    mlp = MlpConfig(activation=family.activation())
    decoder = DecoderConfig(norm=norm, layers=layers, mlp=mlp, order="after")
    return family.config(decoder, head_dim=dim, window=family.window(kinds, 4096))


def _kind(family: Family, layer: int) -> str:
    """By a pattern, of one letter a layer, or the distance of the layers without a window."""
    pattern = family.fields.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        is_last = layer == family.num_layers - 1
        return SLIDING if pattern[layer % len(pattern)] == "L" and not is_last else FULL
    every = family.fields.positive("sliding_window_pattern", 4)
    return SLIDING if (layer + 1) % every else FULL
