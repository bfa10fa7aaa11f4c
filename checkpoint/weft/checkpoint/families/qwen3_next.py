"""Qwen3-Next and Qwen3.5: gated delta nets, and gated attention in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.family import FULL, LINEAR, Family
from weft.checkpoint.moe_config import MoEConfig, MoENamesConfig, qwen_experts
from weft.checkpoint.mtp_config import qwen_head
from weft.checkpoint.parts import GateConfig, HeadNormConfig, MlpConfig, NamesConfig
from weft.checkpoint.qwen_vision import TextOfVision, read_qwen3_vision
from weft.checkpoint.recurrent_config import GatedDeltaConfig

_NAMES = NamesConfig(
    bodies=("model.language_model", "model"),
    left_out=("mtp.", "model.visual.", "visual."),
    moe=MoENamesConfig(shared="shared_expert"),
)
_EXPERTS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""Values that later configurations leave out."""


def read_qwen3_next(family: Family) -> ModelConfig:
    """Qwen3-Next, with experts."""
    return _config(family, _experts(family), is_fused=True)


def read_qwen3_5(family: Family) -> ModelConfig:
    """Qwen3.5, dense."""
    family = family.of_text()
    return _with_tower(family, _config(family, None, is_fused=False))


def read_qwen3_5_moe(family: Family) -> ModelConfig:
    """Qwen3.5 with experts."""
    family = family.of_text()
    for name, value in _EXPERTS.items():
        family.only(name, value)
    return _with_tower(family, _config(family, _experts(family), is_fused=False))


def _with_tower(family: Family, config: ModelConfig) -> ModelConfig:
    assert config.decoder is not None
    rope = config.decoder.attention.rope
    pairs = 0 if rope is None else rope.rotary_dim(config.head_dim) // 2
    text = TextOfVision(family.fields, family.hidden_size, family.num_layers, pairs, (11, 11, 10))
    return replace(config, vision=read_qwen3_vision(family.whole, text))


def _experts(family: Family) -> MoEConfig:
    fields = family.fields
    return replace(
        qwen_experts(fields),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        shared_size=fields.positive("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )


def _config(family: Family, moe: MoEConfig | None, *, is_fused: bool) -> ModelConfig:
    fields, norm = family.fields, family.rms(adds_one=True)
    dim = family.head_dim(256)
    family.only("hidden_act", "silu")
    family.only("attn_output_gate", True)
    attention = replace(
        family.attention(family.rope(partial=0.25), dim**-0.5),
        head_norm=HeadNormConfig(norm=norm),
        gate=GateConfig(),
    )
    linear = GatedDeltaConfig(
        key_heads=fields.positive("linear_num_key_heads", 16),
        value_heads=fields.positive("linear_num_value_heads", 32),
        key_dim=fields.positive("linear_key_head_dim", 128),
        value_dim=fields.positive("linear_value_head_dim", 128),
        taps=fields.positive("linear_conv_kernel_dim", 4),
        eps=norm.eps,
        is_fused=is_fused,
    )
    if linear.value_heads % linear.key_heads:
        raise fields.error(
            "linear_num_value_heads", f"is not a multiple of {linear.key_heads} key heads"
        )
    every = fields.positive("full_attention_interval", 4)
    kinds = family.listed(
        ["layer_types"],
        {LINEAR: LINEAR, FULL: FULL},
        lambda layer: FULL if (layer + 1) % every == 0 else LINEAR,
    )
    decoder = family.decoder(
        tuple(attention if kind == FULL else linear for kind in kinds), norm, mlp=MlpConfig()
    )
    return family.config(
        decoder,
        head_dim=dim,
        names=_NAMES,
        moe=moe,
        kv_heads=2,
        intermediate_size=None if moe is None else moe.intermediate_size,
        mtp=qwen_head(),
    )
