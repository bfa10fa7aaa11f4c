"""Kimi Delta Attention in most layers, latent attention in the others: Kimi Linear, Ling 3."""

from __future__ import annotations

import math
from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import kimi_experts, ling2_experts
from weft.checkpoint.families.family import FULL, LINEAR, Family, behind
from weft.checkpoint.latent_config import LatentConfig
from weft.checkpoint.moe_config import MoENamesConfig
from weft.checkpoint.parts import AttentionConfig, GateConfig, MlpConfig, NamesConfig
from weft.checkpoint.recurrent_config import DeltaAttentionConfig


def read_kimi_linear(family: Family) -> ModelConfig:
    """Kimi-Linear-48B-A3B (arXiv 2510.26692): latent attention without positions."""
    fields, norm = family.fields, family.rms(eps=1e-5)
    family.only("mla_use_nope", True)
    family.only("moe_router_activation_func", "sigmoid")
    family.only("moe_layer_freq", 1)
    latent = _latent(family)
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
            return FULL if layer + 1 in with_attention else LINEAR
        return FULL if layer and layer % 4 == 0 else LINEAR

    kinds = family.listed(["layer_types"], {LINEAR: LINEAR, FULL: FULL}, default)
    decoder = family.decoder(
        tuple(attention if kind == FULL else delta for kind in kinds), norm, mlp=MlpConfig()
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


def read_ling3(family: Family) -> ModelConfig:
    """Ling and Ring 3: gates on the heads of latent attention, and bounded decays."""
    fields, norm, latent = family.fields, family.rms(), _latent(family)
    for name, value in (
        ("no_kda_lora", True),
        ("linear_silu", True),
        ("gated_attention_proj_granularity_type", "head_wise"),
        ("num_kv_heads_for_linear_attn", 0),
        ("use_mla_nope", False),
        ("use_bias", False),
        ("use_nGPT", False),
        ("value_norm", False),
        ("up_proj_norm", False),
        ("score_function", "sigmoid"),
        ("moe_router_enable_expert_bias", True),
        ("pregate_inference", False),
    ):
        family.only(name, value)
    has_bound = fields.flag("kda_safe_gate", True)
    delta = DeltaAttentionConfig(
        heads=fields.positive("linear_num_heads", family.num_heads),
        dim=fields.positive("linear_head_dim", fields.positive("head_dim", 128)),
        taps=fields.positive(
            "linear_conv_kernel_dim", fields.positive("short_conv_kernel_size", 4)
        ),
        eps=norm.eps,
        is_low_rank=False,
        least_decay=_least_decay(family) if has_bound else None,
    )
    # The file's fields for partial rotation are about heads of another kind.
    rope = family.rope(theta=6e6, partial=0.5, is_interleaved=True)
    if rope.scaling != "none":
        raise fields.error("rope_scaling", f"{rope.scaling} is not supported for this architecture")
    dim = latent.nope_dim + latent.rope_dim
    attention = AttentionConfig(
        rope=replace(rope, partial=1.0),
        scale=dim**-0.5,
        gate=GateConfig(name="g_proj", is_by_head=True),
    )
    group, count = fields.positive("layer_group_size", 6), family.num_layers

    def default(layer: int) -> str:
        is_last = (layer + 1) % group == 0 or layer >= count // group * group
        return FULL if is_last else LINEAR

    kinds = family.listed(["layer_types"], {LINEAR: LINEAR, FULL: FULL}, default)
    decoder = family.decoder(
        tuple(attention if kind == FULL else delta for kind in kinds), norm, mlp=MlpConfig()
    )
    names = NamesConfig(
        embedding="word_embeddings",
        attention="attention",
        recurrent="attention",
        o="dense",
        left_out=("model.mtp", *behind(count)),
        moe=MoENamesConfig(correction="gate.expert_bias"),
    )
    limits, shared_limits = (
        family.numbers(f"{kind}_swiglu_limit_list") for kind in ("expert", "share_expert")
    )
    moe = replace(ling2_experts(fields), limits=limits, shared_limits=shared_limits)
    longest = "model_max_length" if "model_max_length" in fields else "max_position_embeddings"
    return family.config(
        decoder, head_dim=dim, names=names, moe=moe, latent=latent, longest=longest
    )


def _latent(family: Family) -> LatentConfig:
    fields = family.fields
    family.only("hidden_act", "silu")
    family.only("attention_bias", False)
    return LatentConfig(
        q_rank=fields.positive("q_lora_rank") if "q_lora_rank" in fields else None,
        kv_rank=fields.positive("kv_lora_rank", 512),
        nope_dim=fields.positive("qk_nope_head_dim", 128),
        rope_dim=fields.positive("qk_rope_head_dim", 64),
        value_dim=fields.positive("v_head_dim", 128),
    )


def _least_decay(family: Family) -> float:
    found = family.fields.get("kda_lower_bound")
    found = -5.0 if found is None else found
    if not isinstance(found, int | float) or not -math.inf < found < 0:
        raise family.fields.error("kda_lower_bound", f"expected a number below 0, got {found!r}")
    return float(found)
