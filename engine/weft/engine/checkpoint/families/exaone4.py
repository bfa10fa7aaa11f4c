"""EXAONE 4: norms behind the blocks alone, normalised heads, layers without rotation."""

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
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str):
        # One letter a layer, over and over; the last layer is full.
        letters, last = pattern, family.num_layers - 1
        default = lambda n: SLIDING if letters[n % len(letters)] == "L" and n != last else FULL  # noqa: E731
    else:
        every = fields.positive("sliding_window_pattern", 4) if has_window else 1
        default = lambda n: SLIDING if (n + 1) % every else FULL  # noqa: E731
    kinds = family.kinds(default) if has_window else (FULL,) * family.num_layers
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
