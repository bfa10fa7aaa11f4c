"""Kimi Linear (arXiv 2510.26692): Kimi Delta Attention, and latent attention without positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.engine.checkpoint.config import ModelConfig
from weft.engine.checkpoint.families.experts import kimi_experts
from weft.engine.checkpoint.families.family import FULL, Family
from weft.engine.checkpoint.latent_config import LatentConfig
from weft.engine.checkpoint.moe_config import MoENamesConfig
from weft.engine.checkpoint.parts import AttentionConfig, DecoderConfig, MlpConfig, NamesConfig
from weft.engine.checkpoint.recurrent_config import DeltaAttentionConfig

_LINEAR = "linear_attention"


def read_kimi_linear(
    raw: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> ModelConfig:
    """Kimi-Linear-48B-A3B."""
    family = Family(raw, generation, where)
    fields, norm = family.fields, family.rms(eps=1e-5)
    family.only("mla_use_nope", True)
    family.only("hidden_act", "silu")
    family.only("moe_router_activation_func", "sigmoid")
    family.only("moe_layer_freq", 1)
    latent = LatentConfig(
        q_rank=fields.positive("q_lora_rank") if "q_lora_rank" in fields else None,
        kv_rank=fields.positive("kv_lora_rank", 512),
        nope_dim=fields.positive("qk_nope_head_dim", 128),
        rope_dim=fields.positive("qk_rope_head_dim", 64),
        value_dim=fields.positive("v_head_dim", 128),
    )
    family.only("attention_bias", False)
    dim = latent.nope_dim + latent.rope_dim
    linear = fields.section("linear_attn_config")
    delta = DeltaAttentionConfig(
        heads=linear.positive("num_heads", fields.positive("linear_num_heads", 32)),
        dim=linear.positive("head_dim", fields.positive("linear_head_dim", 128)),
        taps=linear.positive(
            "short_conv_kernel_size", fields.positive("linear_conv_kernel_dim", 4)
        ),
        eps=norm.eps,
    )
    attention = AttentionConfig(rope=None, scale=dim**-0.5)
    # The hub's files count layers from 1.
    with_attention = linear.indices("full_attn_layers")

    def default(layer: int) -> str:
        if with_attention:
            return FULL if layer + 1 in with_attention else _LINEAR
        return FULL if layer and layer % 4 == 0 else _LINEAR

    kinds = family.listed(["layer_types"], {_LINEAR: _LINEAR, FULL: FULL}, default)
    decoder = DecoderConfig(
        norm=norm,
        layers=tuple(attention if kind == FULL else delta for kind in kinds),
        mlp=MlpConfig(),
    )
    names = NamesConfig(
        recurrent="self_attn",
        feeds=("block_sparse_moe", "mlp"),
        left_out=("mtp.",),
        moe=MoENamesConfig(gate_up=("w1", "w3"), down="w2"),
    )
    return family.config(
        decoder,
        head_dim=dim,
        names=names,
        moe=kimi_experts(fields),
        latent=latent,
        longest="model_max_length",
    )
