"""MiMo V2 Flash: windows with sinks and twice as many K and V heads, values narrower than keys."""

from __future__ import annotations

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import deepseek_v3_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family
from weft.checkpoint.parts import AttentionConfig, NamesConfig
from weft.checkpoint.rope import RopeConfig

_PARTIAL = 0.334
_THETAS = {FULL: ("rope_theta", 5e6), SLIDING: ("swa_rope_theta", 1e4)}


def read_mimo(family: Family) -> ModelConfig:
    """MiMo V2 Flash; files for its own code list windows and experts as 0 and 1 by layer."""
    fields = family.fields
    dim, value_dim = family.head_dim(192), fields.positive("v_head_dim", 128)
    for name, value in (("swa_head_dim", dim), ("swa_v_head_dim", value_dim)):
        family.only(name, value)
    heads, kv_heads = family.num_heads, fields.positive("num_key_value_heads", 4)
    family.only("swa_num_attention_heads", heads)
    family.only("add_full_attention_sink_bias", False)
    family.only("add_swa_attention_sink_bias", True)
    pattern = family.switches("hybrid_layer_pattern")

    def kind_of(layer: int) -> str:
        if pattern is not None:
            return SLIDING if pattern[layer] else FULL
        return FULL if layer == 0 or (layer + 1) % 6 == 0 else SLIDING

    kinds = family.kinds(kind_of)
    factor = fields.get("attention_value_scale")
    ropes = {kind: _rope(family, kind) for kind in (FULL, SLIDING)}
    bias = fields.flag("attention_bias", False)
    layers = tuple(
        AttentionConfig(
            rope=ropes[kind],
            scale=dim**-0.5,
            qkv_bias=bias,
            has_sinks=kind == SLIDING,
            kv_heads=fields.positive("swa_num_key_value_heads", 2 * kv_heads)
            if kind == SLIDING
            else None,
            value_dim=value_dim,
            value_factor=1.0 if factor is None else fields.number("attention_value_scale"),
        )
        for kind in kinds
    )
    decoder = family.decoder(layers, family.rms(eps=1e-5))
    window = family.window(kinds, 129)
    if "sliding_window_size" in fields:
        # The field counts the positions before a row's own.
        window = family.window(kinds, length=fields.positive("sliding_window_size") + 1)
    moe = deepseek_v3_experts(fields, num_dense=1, sparse=family.switches("moe_layer_freq"))
    names = NamesConfig(sinks="attention_sink_bias", left_out=("model.mtp.",))
    return family.config(
        decoder, head_dim=dim, window=window, names=names, kv_heads=kv_heads, moe=moe
    )


def _rope(family: Family, kind: str) -> RopeConfig:
    name, theta = _THETAS[kind]
    fields = family.fields
    if "rope_parameters" in fields:
        return family.rope(kind, theta=theta, partial=_PARTIAL)
    partial = fields.number("partial_rotary_factor", _PARTIAL)
    return RopeConfig(theta=fields.number(name, theta), partial=partial)
