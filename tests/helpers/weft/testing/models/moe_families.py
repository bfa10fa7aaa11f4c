"""Small random models of the families with experts, as transformers configures them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.testing.models.families import FAMILIES, make_family
from weft.testing.models.reference_models import make_reference

MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 44}
LOCAL = {"num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 44}
DEEPSEEK = {
    "head_dim": None, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 20, "num_experts_per_tok": 3, "moe_intermediate_size": 44,
    "n_shared_experts": 2, "n_routed_experts": 7, "first_k_dense_replace": 1,
    "num_key_value_heads": 6,
}  # fmt: skip
GLM = {
    "n_routed_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 44,
    "n_shared_experts": 1, "routed_scaling_factor": 1.8,
}  # fmt: skip
MOE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", LOCAL),
    "cohere2-moe": (
        "cohere2_moe",
        {**MOE, "num_hidden_layers": 5, "sliding_window": 20, "first_k_dense_replace": 1,
         "prefix_dense_intermediate_size": 100, "num_shared_experts": 2, "logit_scale": 0.5,
         "sliding_window_pattern": 2, "expert_selection_fn": "sigmoid"},
    ),
    "cohere2-moe-softmax": (
        "cohere2_moe",
        {**MOE, "num_hidden_layers": 4, "sliding_window": 20, "num_shared_experts": 1,
         "shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-5},
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {**MOE, "head_dim": None, "num_hidden_layers": 4, "shared_expert_intermediate_size": 60,
         "decoder_sparse_step": 2, "hidden_size": 144},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {**DEEPSEEK, "q_lora_rank": 40, "n_group": 4, "topk_group": 2, "n_routed_experts": 8,
         "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5},
    ),
    "deepseek-v2-lite": ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": "none"}),
    "deepseek-v3": (
        "deepseek_v3",
        {**DEEPSEEK, "q_lora_rank": 40, "n_group": 3, "topk_group": 2, "n_routed_experts": 9,
         "routed_scaling_factor": 2.5, "num_hidden_layers": 4, "first_k_dense_replace": 2,
         "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                             "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.9,
                             "mscale_all_dim": 0.7, "original_max_position_embeddings": 128}},
    ),
    "glm4-moe-lite": ("glm4_moe_lite", {**DEEPSEEK, "q_lora_rank": 40, "n_routed_experts": 6}),
    "gpt-oss": (
        "gpt_oss",
        {**LOCAL, "sliding_window": 20, "num_hidden_layers": 4, "max_position_embeddings": 512,
         "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                             "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                             "original_max_position_embeddings": 128}},
    ),
    "glm4-moe": (
        "glm4_moe",
        {**GLM, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1},
    ),
    "dots1": ("dots1", {**GLM, "n_group": 3, "topk_group": 2, "norm_topk_prob": True,
                        "sliding_window": 20, "max_window_layers": 2}),
    "minimax-m2": (
        "minimax_m2",
        {**LOCAL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                      "partial_rotary_factor": 0.5}},
    ),
    "olmoe": ("olmoe", {**MOE, "intermediate_size": 44, "head_dim": None}),
    "ernie": (
        "ernie4_5_moe",
        {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 44, "num_hidden_layers": 4,
         "moe_layer_end_index": 2},
    ),
    "granite-moe": (
        "granitemoe",
        {**LOCAL, "head_dim": None, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
         "attention_multiplier": 0.3, "logits_scaling": 4.0},
    ),
    "hy3": (
        "hy_v3",
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 44,
         "router_scaling_factor": 2.8},
    ),
    "llama4": (
        "llama4_text",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44,
         "intermediate_size_mlp": 100, "interleave_moe_layer_step": 2, "num_hidden_layers": 4,
         "no_rope_layer_interval": 3, "attention_chunk_size": 20, "floor_scale": 16,
         "attn_scale": 0.3},
    ),
    "mimo": (
        "mimo_v2_flash",
        {**MOE, "n_routed_experts": 7, "head_dim": 24, "v_head_dim": 16, "sliding_window": 20,
         "num_hidden_layers": 4, "num_key_value_heads": 1, "attention_value_scale": 0.7},
    ),
    "laguna": (
        "laguna",
        {**MOE, "shared_expert_intermediate_size": 60, "num_hidden_layers": 4,
         "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20,
         "num_attention_heads_per_layer": [6, 4, 6, 4], "moe_routed_scaling_factor": 2.0,
         "moe_router_logit_softcapping": 1.5},
    ),
    "solar": ("solar_open", {**GLM, "n_group": 3, "topk_group": 2, "norm_topk_prob": True}),
    "exaone-moe": (
        "exaone_moe",
        {**MOE, "sliding_window": 20, "num_hidden_layers": 4, "routed_scaling_factor": 1.5},
    ),
    "afmoe": (
        "afmoe",
        {**MOE, "sliding_window": 20, "global_attn_every_n_layers": 2, "num_hidden_layers": 4,
         "route_scale": 1.7, "mup_enabled": True},
    ),
    "mellum": (
        "mellum",
        {**MOE, "num_hidden_layers": 4, "sliding_window": 20,
         "layer_types": ["sliding_attention", "full_attention"] * 2,
         "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    ),
    "hunyuan-moe": ("hunyuan_v1_moe", {"num_experts": 7, "moe_topk": 3, "intermediate_size": 44}),
    "sarvam": (
        "sarvam_moe",
        {**GLM, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "num_key_value_heads": 2},
    ),
    "sarvam-mla": ("sarvam_mla", {**DEEPSEEK, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 128}}),
    "flint": (
        "flint",
        {**MOE, "num_hidden_layers": 5, "sliding_window": 20, "mlp_only_layers": [0],
         "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding") * 2][:5],
         "shared_expert_intermediate_size": 60},
    ),
    "ling2": (
        "glm4_moe",
        {**GLM, "use_qk_norm": True, "n_group": 3, "topk_group": 2, "num_key_value_heads": 2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 6e5,
                             "partial_rotary_factor": 0.5}},
    ),
    "flex-olmo": ("flex_olmo", {**MOE, "intermediate_size": 44, "head_dim": None}),
    "granite-shared": (
        "granitemoeshared",
        {**LOCAL, "head_dim": None, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
         "attention_multiplier": 0.3, "logits_scaling": 4.0, "shared_intermediate_size": 60},
    ),
}  # fmt: skip
"""Model types, and overrides for `make_reference`."""


def make_any_family(name: str, path: Path, seed: int) -> None:
    """Writes a model of a family with experts or of another one."""
    if name in FAMILIES:
        make_family(name, path, seed)
    else:
        kind, fields = MOE_FAMILIES[name]
        make_reference(kind, path, seed, **fields)
