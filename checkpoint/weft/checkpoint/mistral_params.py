"""Makes config.json of a params.json, the configuration in Mistral's own layout. Pure Python.

The layout: https://github.com/mistralai/mistral-inference (args.py); for mixtures with latent
attention, that of Mistral Large 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.fields import Fields, fields_of_file

PARAMS_FILE = "params.json"
_GENERAL = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "v_head_dim": "v_head_dim",
}
_MOE = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "first_k_dense_replace": "first_k_dense_replace",
    "routed_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "route_every_n": "moe_layer_freq",
}
_MAX_POSITIONS = 128_000
_NAMES = (
    (r"model\.embed_tokens\.", "tok_embeddings."),
    (r"model\.norm\.", "norm."),
    (r"lm_head\.", "output."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.q_a_proj\.", ".attention.wq_a."),
    (r"\.self_attn\.q_a_layernorm\.", ".attention.q_a_norm."),
    (r"\.self_attn\.q_b_proj\.", ".attention.wq_b."),
    (r"\.self_attn\.kv_a_proj_with_mqa\.", ".attention.wkv_a_with_mqa."),
    (r"\.self_attn\.kv_a_layernorm\.", ".attention.kv_a_norm."),
    (r"\.self_attn\.kv_b_proj\.", ".attention.wkv_b."),
    (r"\.self_attn\.([qkvo])_proj\.", r".attention.w\1."),
    (r"\.mlp\.gate\.", ".gate."),
    (r"\.mlp\.(experts\.\d+|shared_experts)\.gate_proj\.", r".\1.w1."),
    (r"\.mlp\.(experts\.\d+|shared_experts)\.down_proj\.", r".\1.w2."),
    (r"\.mlp\.(experts\.\d+|shared_experts)\.up_proj\.", r".\1.w3."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
    (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
    (r"^model\.layers\.", "layers."),
    (r"\.weight_scale$", ".qscale_weight"),
    (r"\.input_scale$", ".qscale_act"),
)
LEFT_OUT = (
    "vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.",
)  # fmt: skip
"""Prefixes of the parts that take images in this layout."""


def mistral_name(name: str) -> str:
    """Name of a tensor in this layout."""
    for pattern, ours in _NAMES:
        name = re.sub(pattern, ours, name)
    return name


def config_of_params(path: Path) -> Mapping[str, Any]:
    """The content of config.json."""
    fields = fields_of_file(path)
    config = {ours: fields.get(name) for name, ours in _GENERAL.items() if name in fields}
    config.setdefault("max_position_embeddings", _MAX_POSITIONS)
    config |= {"bos_token_id": 1, "eos_token_id": 2, "rope_parameters": _rotation(fields)}
    quantization = _quantization(fields)
    if quantization is not None:
        config["quantization_config"] = quantization
    if "kv_lora_rank" in fields:
        moe = fields.section("moe")
        config |= {ours: moe.get(name) for name, ours in _MOE.items() if name in moe}
        return config | {"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4"}
    if "moe" in fields or fields.get("model_type") not in (None, "transformer"):
        raise fields.error("moe", "experts without latent attention are not supported")
    window = fields.get("sliding_window")
    config |= {"sliding_window": window, "rope_interleave": True}
    return config | {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}


def _rotation(fields: Fields) -> Mapping[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.number("rope_theta", 1e4)}
    yarn = fields.section("yarn")
    if list(yarn):
        original = yarn.positive("original_max_position_embeddings")
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.number("factor"),
            "original_max_position_embeddings": original,
            "beta_fast": yarn.number("beta", 32.0),
            "beta_slow": yarn.number("alpha", 1.0),
        }
        if "kv_lora_rank" in fields:
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
        elif not yarn.flag("apply_scale", True):
            rope["attention_factor"] = 1.0
    growth = fields.section("llama_4_scaling")
    if list(growth):
        rope["llama_4_scaling_beta"] = growth.number("beta")
        rope["original_max_position_embeddings"] = growth.positive(
            "original_max_position_embeddings"
        )
    return rope


def _quantization(fields: Fields) -> Mapping[str, Any] | None:
    given = fields.get("quantization")
    if not given:
        return None
    section = fields.section("quantization")
    if "config_groups" in section:
        return {**given, "quant_method": "compressed-tensors"}
    kind = section.text("qformat_weight", ""), section.text("qscheme_act", "")
    if kind != ("fp8_e4m3", "TENSOR"):
        raise fields.error("quantization", f"{kind} is not supported (fp8_e4m3, TENSOR is)")
    return {"quant_method": "fp8", "activation_scheme": "static"}
