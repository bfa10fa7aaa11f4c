"""GLM-4.5 to 4.7, dots.llm1, Solar Open and Ling 2.0: grouped-query attention with DeepSeek V3's
experts.
"""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.families.experts import deepseek_v3_experts, ling2_experts
from weft.checkpoint.families.family import FULL, SLIDING, Family, behind
from weft.checkpoint.moe_config import MoENamesConfig
from weft.checkpoint.mtp_config import head_behind
from weft.checkpoint.parts import AttentionConfig, HeadNormConfig, NamesConfig


def read_glm4_moe(family: Family) -> ModelConfig:
    """GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471): half of each head is rotated."""
    if family.raw.get("model_type") == "sarvam_moe":  # As transformers writes it.
        return read_sarvam(family)
    dim, norm = family.head_dim(), family.rms(eps=1e-5)
    has_norms = family.fields.flag("use_qk_norm", False)
    layer = AttentionConfig(
        rope=family.rope(partial=0.5),
        scale=dim**-0.5,
        qkv_bias=family.fields.flag("attention_bias", False),
        head_norm=HeadNormConfig(norm=norm) if has_norms else None,
    )
    decoder = family.decoder(layer, norm)
    names = NamesConfig(left_out=behind(family.num_layers))
    moe = deepseek_v3_experts(family.fields, num_dense=1)
    head = head_behind(family.num_layers)
    return family.config(decoder, head_dim=dim, names=names, moe=moe, kv_heads=8, mtp=head)


def read_solar(family: Family) -> ModelConfig:
    """Solar Open: heads rotated whole, experts in every layer."""
    fields, dim, norm = family.fields, family.head_dim(128), family.rms(eps=1e-5)
    bias = fields.flag("attention_bias", False)
    layer = AttentionConfig(
        rope=family.rope(theta=1e6, partial=1.0), scale=dim**-0.5, qkv_bias=bias
    )
    decoder = family.decoder(layer, norm)
    moe = deepseek_v3_experts(fields, num_dense=0)
    inner = moe.intermediate_size
    return family.config(decoder, head_dim=dim, kv_heads=8, moe=moe, intermediate_size=inner)


def read_ling2(family: Family) -> ModelConfig:
    """Ling and Ring 2.0 (arXiv 2510.22115): half of each normalised head is rotated."""
    return _ling(family, theta=600_000.0, partial=0.5)


def read_sarvam(family: Family) -> ModelConfig:
    """Sarvam 30B: Ling's layers and names, with heads that are rotated whole."""
    newer = {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "attention_bias": "use_qkv_bias",
    }
    raw = family.raw
    usual = {own: raw[name] for name, own in newer.items() if name in raw}
    return _ling(family.replaced({**usual, **raw}), theta=8e6, partial=1.0)


def _ling(family: Family, theta: float, partial: float) -> ModelConfig:
    fields, dim, norm = family.fields, family.head_dim(), family.rms()
    for name, value in (
        ("use_qk_norm", True),
        ("use_rmsnorm", True),
        ("score_function", "sigmoid"),
        ("moe_router_enable_expert_bias", True),
        ("norm_head", False),
        ("use_sliding_window", False),
    ):
        family.only(name, value)
    layer = AttentionConfig(
        rope=family.rope(theta=theta, partial=partial),
        scale=dim**-0.5,
        qkv_bias=fields.flag("use_qkv_bias", False),
        o_bias=fields.flag("use_bias", False),
        head_norm=HeadNormConfig(norm=norm, q_name="query_layernorm", k_name="key_layernorm"),
    )
    decoder = family.decoder(layer, norm)
    names = NamesConfig(
        embedding="word_embeddings",
        attention="attention",
        qkv="query_key_value",
        o="dense",
        left_out=behind(family.num_layers),
        moe=MoENamesConfig(correction="gate.expert_bias"),
    )
    return family.config(decoder, head_dim=dim, names=names, moe=ling2_experts(fields))


def read_dots1(family: Family) -> ModelConfig:
    """dots.llm1 (arXiv 2506.05767): normalised heads."""
    fields, dim, norm = family.fields, family.head_dim(), family.rms()
    first = fields.count("max_window_layers", 62)
    has_window = fields.get("sliding_window") is not None or "sliding_window" not in list(fields)
    kinds = family.kinds(lambda layer: SLIDING if has_window and layer >= first else FULL)
    layer = replace(family.attention(family.rope(), dim**-0.5), head_norm=HeadNormConfig(norm=norm))
    decoder = family.decoder(layer, norm)
    moe = deepseek_v3_experts(fields, num_dense=0, renormalises=False)
    return family.config(decoder, head_dim=dim, window=family.window(kinds, 4096), moe=moe)
