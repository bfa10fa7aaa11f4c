"""Jamba (arXiv 2403.19887): Mamba, attention without positions, and experts in some layers."""

from __future__ import annotations

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.family import Family
from weft.checkpoint.moe_config import MoEConfig, MoENamesConfig, counts
from weft.checkpoint.parts import AttentionConfig, MlpConfig, NamesConfig
from weft.checkpoint.recurrent_config import MambaConfig


def read_jamba(family: Family) -> ModelConfig:
    """Jamba 1 to 1.7, and Jamba2."""
    fields, norm = family.fields, family.rms()
    family.only("hidden_act", "silu")
    rank = fields.get("mamba_dt_rank")
    mamba = MambaConfig(
        width=fields.positive("mamba_expand", 2) * family.hidden_size,
        state_size=fields.positive("mamba_d_state", 16),
        rank=-(-family.hidden_size // 16)
        if rank in (None, "auto")
        else fields.positive("mamba_dt_rank"),
        taps=fields.positive("mamba_d_conv", 4),
        eps=norm.eps,
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias", False),
    )
    attention = AttentionConfig(rope=None, scale=family.head_dim() ** -0.5)
    with_attention = _periodic(family, "attn_layer", 8, 4)
    if not 0 < len(with_attention) < family.num_layers:
        raise fields.error("attn_layer_period", "expected layers with and without attention")
    decoder = family.decoder(
        tuple(
            attention if layer in with_attention else mamba for layer in range(family.num_layers)
        ),
        norm,
        mlp=MlpConfig(),
    )
    names = NamesConfig(
        recurrent="mamba",
        feeds=("feed_forward",),
        feed_norm="pre_ff_layernorm",
        last_norm="final_layernorm",
        moe=MoENamesConfig(router="router"),
    )
    return family.config(decoder, names=names, moe=_experts(family), kv_heads=8)


def _experts(family: Family) -> MoEConfig | None:
    fields, sparse = family.fields, _periodic(family, "expert_layer", 2, 1)
    if fields.positive("num_experts", 16) == 1 or not sparse:
        return None
    return MoEConfig(
        **counts(fields, "num_experts"),
        intermediate_size=fields.positive("intermediate_size"),
        norm_topk_prob=False,
        mlp_only_layers=tuple(n for n in range(family.num_layers) if n not in sparse),
    )


def _periodic(family: Family, name: str, period: int, offset: int) -> list[int]:
    every = family.fields.positive(f"{name}_period", period)
    first = family.fields.count(f"{name}_offset", offset)
    if first >= every:
        raise family.fields.error(f"{name}_offset", f"must be less than {every}")
    return [layer for layer in range(family.num_layers) if layer % every == first]
