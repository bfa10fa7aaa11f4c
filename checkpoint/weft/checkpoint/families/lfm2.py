"""LFM2 (arXiv 2511.23404) and 3: short convolutions between gates, and attention in some layers."""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import lfm2_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.moe_config import MoEConfig, MoENamesConfig
from weft.checkpoint.parts import (
    AttentionConfig,
    GateConfig,
    HeadNormConfig,
    MixerConfig,
    MlpConfig,
    NamesConfig,
)
from weft.checkpoint.recurrent_config import ShortConvConfig
from weft.checkpoint.rope import RopeConfig

_CONV = "conv"
_KINDS = {_CONV: _CONV, FULL: FULL}


def read_lfm2(family: Family) -> ModelConfig:
    """LFM2, dense."""
    return _config(family, _inner_size(family), None, norm="embedding_norm")


def read_lfm2_moe(family: Family) -> ModelConfig:
    """LFM2 with experts after its first layers."""
    inner = family.fields.positive("intermediate_size")
    return _config(family, inner, lfm2_experts(family.fields), norm="embedding_norm")


def read_lfm3(family: Family) -> ModelConfig:
    """LFM3: attention with a gate on each head, with and without windows; norms around blocks."""
    fields, rms, dim = family.fields, family.rms(eps=1e-5, name="norm_eps"), family.head_dim(128)
    has_gate = fields.flag("use_attention_gate", True)
    gate = GateConfig(name="gate_proj", is_by_head=True) if has_gate else None

    def attention(kind: str) -> AttentionConfig:
        return replace(
            family.attention(_rope(family, kind), dim**-0.5),
            head_norm=HeadNormConfig(norm=rms),
            gate=gate,
        )

    def default(layer: int) -> str:
        return FULL if layer % 4 == 2 else SLIDING if layer and layer % 4 == 0 else _CONV

    kinds = family.listed(["layer_types"], {**_KINDS, SLIDING: SLIDING}, default)
    if _CONV not in kinds or set(kinds) == {_CONV}:
        raise fields.error("layer_types", "expected layers with and without attention")
    mixers: dict[str, MixerConfig] = {
        kind: _conv(family, 7) if kind == _CONV else attention(kind) for kind in set(kinds)
    }
    is_around = fields.flag("use_sandwich_norm", True)
    decoder = replace(
        family.decoder(tuple(mixers[kind] for kind in kinds), rms, mlp=MlpConfig()),
        order="around" if is_around else "before",
    )
    names = replace(
        _names("embedding_norm"), o="o_proj", mixer_post="post_operator_norm",
        feed_post="post_ffn_norm",
    )  # fmt: skip
    return family.config(
        decoder, head_dim=dim, names=names, window=family.window(kinds, 256), is_tied=True,
        kv_heads=4,
    )  # fmt: skip


def _rope(family: Family, kind: str) -> RopeConfig:
    if family.fields.get("rope_parameters") is not None:
        return family.rope(kind, partial=1.0)
    if kind == SLIDING:
        return RopeConfig(theta=1e4)
    return RopeConfig(theta=1e6, scaling="proportional", partial=0.5)


def _config(family: Family, inner: int, moe: MoEConfig | None, *, norm: str) -> ModelConfig:
    fields, rms = family.fields, family.rms(eps=1e-5, name="norm_eps")
    dim = family.head_dim()
    attention = AttentionConfig(
        rope=family.rope(theta=1e6),
        scale=dim**-0.5,
        head_norm=HeadNormConfig(norm=rms, q_name="q_layernorm", k_name="k_layernorm"),
    )
    conv = _conv(family, 3)
    with_attention = fields.indices("full_attn_idxs") or tuple(range(family.num_layers))
    kinds = family.listed(["layer_types"], _KINDS, lambda n: FULL if n in with_attention else _CONV)
    if len(set(kinds)) < 2:
        raise fields.error("layer_types", "expected layers with and without attention")
    decoder = family.decoder(
        tuple(attention if kind == FULL else conv for kind in kinds), rms, mlp=MlpConfig()
    )
    names = _names(norm)
    # The field that says whether the embedding is also the LM head has two names.
    is_tied = fields.flag("tie_embedding", True)
    return family.config(
        decoder, names=names, moe=moe, is_tied=is_tied, kv_heads=8, intermediate_size=inner
    )


def _conv(family: Family, taps: int) -> ShortConvConfig:
    fields = family.fields
    conv = ShortConvConfig(
        width=family.hidden_size,
        taps=fields.positive("conv_L_cache", taps),
        bias=fields.flag("conv_bias", False),
    )
    if conv.taps < 2:
        raise fields.error("conv_L_cache", f"expected at least 2, got {conv.taps}")
    return conv


def _names(norm: str) -> NamesConfig:
    return NamesConfig(
        input_norm="operator_norm",
        feed_norm="ffn_norm",
        last_norm=norm,
        recurrent="conv",
        o="out_proj",
        gate="w1",
        up="w3",
        down="w2",
        feeds=("feed_forward",),
        moe=MoENamesConfig(correction="expert_bias", gate_up=("w1", "w3"), down="w2"),
    )


def _inner_size(family: Family) -> int:
    """Columns of an MLP: two thirds of the file's number, times a factor, rounded up."""
    fields = family.fields
    size = fields.positive("block_ff_dim", fields.positive("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    unit = fields.positive("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // unit) * unit
