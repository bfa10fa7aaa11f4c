"""Arcee's Trinity: gated attention with windows, norms around the blocks, sigmoid routers."""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.moe_config import MoEConfig, MoENamesConfig, RouterConfig, counts
from weft.checkpoint.parts import GateConfig, HeadNormConfig, NamesConfig


def read_afmoe(family: Family) -> ModelConfig:
    """AFMoE: every fourth layer has no window and does not rotate."""
    fields, dim, norm = family.fields, family.head_dim(128), family.rms(eps=1e-5)
    every = fields.positive("global_attn_every_n_layers", 4)
    kinds = family.kinds(lambda layer: SLIDING if (layer + 1) % every else FULL)
    rope = family.rope()
    layers = tuple(
        replace(
            family.attention(rope if kind == SLIDING else None, dim**-0.5),
            head_norm=HeadNormConfig(norm=norm),
            gate=GateConfig(name="gate_proj"),
        )
        for kind in kinds
    )
    decoder = replace(
        family.decoder(layers, norm),
        order="around",
        embedding_multiplier=family.hidden_size**0.5 if fields.flag("mup_enabled", False) else 1.0,
    )
    names = NamesConfig(
        feed_norm="pre_mlp_layernorm",
        feed_post="post_mlp_layernorm",
        moe=MoENamesConfig(router="router.gate", correction="expert_bias"),
    )
    for name, value in (
        ("route_norm", True),
        ("score_func", "sigmoid"),
        ("n_group", 1),
        ("topk_group", 1),
    ):
        family.only(name, value)
    inner = fields.positive("moe_intermediate_size")
    moe = MoEConfig(
        **counts(fields, "num_experts"),
        intermediate_size=inner,
        norm_topk_prob=True,
        mlp_only_layers=tuple(range(fields.count("num_dense_layers", 1))),
        router=RouterConfig(
            scores="sigmoid", has_correction=True, scale=fields.number("route_scale", 1.0)
        ),
        shared_size=inner * fields.count("num_shared_experts", 2),
    )
    window = family.window(kinds, 1024)
    return family.config(decoder, head_dim=dim, window=window, names=names, moe=moe)
