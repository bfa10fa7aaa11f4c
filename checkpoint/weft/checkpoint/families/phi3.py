"""Phi: up to Phi-2 with layer norms, then fused projections, and experts in Phi-3.5."""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import phi_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.families.mixtral import LETTERS
from weft.checkpoint.parts import AttentionConfig, MlpConfig, NamesConfig, NormConfig


def read_phi(family: Family) -> ModelConfig:
    """Phi-1, Phi-1.5 (arXiv 2309.05463) and Phi-2: both blocks read one norm; biases everywhere."""
    fields, dim = family.fields, family.head_dim()
    family.only("qk_layernorm", False)
    layer = AttentionConfig(
        rope=family.rope(partial=0.5), scale=dim**-0.5, qkv_bias=True, o_bias=True
    )
    decoder = replace(
        family.decoder(
            layer,
            NormConfig(eps=fields.number("layer_norm_eps", 1e-5), kind="layer", has_bias=True),
            mlp=MlpConfig(activation=family.activation("gelu_new"), is_gated=False, bias=True),
        ),
        order="parallel",
        has_head_bias=True,
    )
    names = NamesConfig(o="dense", up="fc1", down="fc2", last_norm="final_layernorm")
    return family.config(decoder, names=names)


def read_phi_moe(family: Family) -> ModelConfig:
    """Phi-3.5-MoE: experts by SparseMixer, layer norms; LongRoPE has separate factors on cosines
    and sines.
    """
    fields, rope, dim = family.fields, family.rope(theta=1e6), family.head_dim()
    if rope.scaling == "longrope":
        name = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
        longest = fields.positive("max_position_embeddings")
        kind = "long_mscale" if longest > rope.original_max_positions else "short_mscale"
        rope = replace(rope, attention_factor=fields.section(name).number(kind))
    layer = family.attention(rope, dim**-0.5)
    decoder = replace(
        family.decoder(
            layer, NormConfig(eps=fields.number("rms_norm_eps", 1e-5), kind="layer", has_bias=True)
        ),
        has_head_bias=fields.flag("lm_head_bias", False),
    )
    window = SLIDING if "sliding_window" in fields else FULL
    return family.config(
        decoder,
        head_dim=dim,
        window=family.window((window,) * family.num_layers),
        names=NamesConfig(feeds=("block_sparse_moe", "mlp"), moe=LETTERS),
        moe=phi_experts(fields),
        kv_heads=8,
    )


def read_phi3(family: Family) -> ModelConfig:
    """Phi-3 (arXiv 2404.14219)."""
    family.only("attention_bias", False)
    dim = family.head_dim()
    layer = AttentionConfig(rope=family.rope(partial=1.0), scale=dim**-0.5)
    kind = SLIDING if "sliding_window" in family.fields else FULL
    decoder = family.decoder(layer, family.rms(eps=1e-5))
    names = NamesConfig(qkv="qkv_proj", gate_up="gate_up_proj")
    window = family.window((kind,) * family.num_layers)
    return family.config(decoder, head_dim=dim, window=window, names=names)
