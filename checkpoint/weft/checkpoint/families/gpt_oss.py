"""gpt-oss: attention with sinks and alternating windows, experts with biases and a limited gate."""

from __future__ import annotations

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import gpt_oss_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.moe_config import MoENamesConfig
from weft.checkpoint.parts import AttentionConfig, NamesConfig


def read_gpt_oss(family: Family) -> ModelConfig:
    """gpt-oss 20b and 120b (arXiv 2508.10925)."""
    dim, bias = family.head_dim(64), family.fields.flag("attention_bias", True)
    layer = AttentionConfig(
        rope=family.rope(theta=150_000.0),
        scale=dim**-0.5,
        qkv_bias=bias,
        o_bias=bias,
        has_sinks=True,
    )
    decoder = family.decoder(layer, family.rms(eps=1e-5))
    moe = MoENamesConfig(router="router", is_transposed=True, is_interleaved=True)
    return family.config(
        decoder,
        head_dim=dim,
        window=family.window(family.kinds(lambda n: FULL if n % 2 else SLIDING), 128),
        names=NamesConfig(moe=moe),
        moe=gpt_oss_experts(family.fields),
        kv_heads=8,
    )
