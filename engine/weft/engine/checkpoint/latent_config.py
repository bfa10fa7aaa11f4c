"""What config.json says of multi-head latent attention.

Pure Python, as `weft.engine.checkpoint.config`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.engine.checkpoint.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Of each position one latent is kept, of which all heads make their keys and values, and one
    rotated key that all heads share.
    """

    q_rank: int | None
    """Width of the latent that queries are made of; None: they are made of the stream."""
    kv_rank: int
    """Width of the latent."""
    nope_dim: int
    """Elements of a query head that meet what is made of the latent."""
    rope_dim: int
    """Rotated elements of a query head, and of the shared key."""
    value_dim: int
    """Elements of a head's value."""
    is_interleaved: bool
    """Rotated pairs are neighbours, in place of elements half a head apart."""
    score_factor: float = 1.0
    """Factor on scores beside that of the head's size."""


def deepseek_latent(config: Fields) -> LatentConfig:
    """DeepSeek V2's and V3's, and that of the models of their shape."""
    if config.flag("attention_bias", False):
        raise config.error("attention_bias", "is not supported for this architecture")
    q_rank = config.positive("q_lora_rank") if "q_lora_rank" in config else None
    return LatentConfig(
        q_rank=q_rank,
        kv_rank=config.positive("kv_lora_rank"),
        nope_dim=config.positive("qk_nope_head_dim"),
        rope_dim=config.positive("qk_rope_head_dim"),
        value_dim=config.positive("v_head_dim"),
        is_interleaved=config.flag("rope_interleave", True),
        score_factor=_score_factor(config),
    )


def _score_factor(config: Fields) -> float:
    """YaRN's correction of scores, squared, as DeepSeek applies it."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.section(name)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    factor = rope.number("factor")
    if factor <= 1.0:
        return 1.0
    return (0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1.0) ** 2
