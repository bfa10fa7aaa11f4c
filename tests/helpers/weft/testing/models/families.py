"""Small random models of the families made of parts, written by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(3)],
    "long_factor": [1.5 + 0.5 * i for i in range(3)],
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 16,
}
_LAYERS = "language_model.model.layers."
_SIGLIP = {**_PIXTRAL, "model_type": "siglip_vision_model"}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
}
_GATED_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
OWN_CODE: dict[str, dict[str, Any]] = {
    "internlm3": {"architectures": ["InternLM3ForCausalLM"]},
    "sarvam": {"architectures": ["SarvamMoEForCausalLM"]},
    "sarvam-mla": {"architectures": ["SarvamMLAForCausalLM"]},
    "minicpm": {
        "architectures": ["MiniCPMForCausalLM"],
        **{"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16},
    },
}
"""config.json of families whose checkpoints name an architecture that transformers lacks."""
GPT = {"n_embd": 48, "n_layer": 4, "n_head": 6, "n_positions": 512, "n_inner": 72}
_MAMBA = {"mamba_n_heads": 6, "mamba_d_state": 12, "mamba_n_groups": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 12}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "query_pre_attn_scalar": 12,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full") * 2],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            },
        },
    ),
    "gemma3-images": (
        "gemma3",
        {
            "text_config": {**SIZES, "head_dim": 16, "sliding_window": 24},
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": 258,
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "num_hidden_layers": 5,
            "layer_types": [
                f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")
            ],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 200,
            "altup_num_inputs": 3,
            "laurel_rank": 12,
            "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0, 0.9],
            "final_logit_softcapping": 20.0,
        },
    ),
    "llava": (
        "llava",
        {
            "text_config": {**SIZES, "model_type": "llama"},
            "vision_config": {**_PIXTRAL, "model_type": "clip_vision_model"},
        },
    ),
    "internvl": (
        "internvl",
        {
            "text_config": {**SIZES, "model_type": "qwen2"},
            "vision_config": {**_PIXTRAL, "model_type": "internvl_vision", "image_size": [16, 16]},
            "image_token_id": 258,
            "tie_word_embeddings": False,
        },
    ),
    "smolvlm": (
        "smolvlm",
        {
            "text_config": {**SIZES, "model_type": "llama"},
            "vision_config": {**_PIXTRAL, "model_type": "smolvlm_vision"},
            "image_token_id": 258,
        },
    ),
    "llava_next": (
        "llava_next",
        {
            "text_config": {**SIZES, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**_PIXTRAL, "model_type": "clip_vision_model"},
        },
    ),
    "llava_onevision": (
        "llava_onevision",
        {
            "text_config": {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True},
            "vision_config": _SIGLIP,
        },
    ),
    "idefics3": (
        "idefics3",
        {
            "text_config": {**SIZES, "model_type": "llama"},
            "vision_config": {**_PIXTRAL, "model_type": "idefics3_vision"},
            "image_token_id": 258,
        },
    ),
    "lfm2_vl": (
        "lfm2_vl",
        {
            "text_config": {
                **SIZES,
                "model_type": "lfm2",
                "layer_types": ["conv", "full_attention"] * 2,
            },
            "vision_config": {**_SIGLIP, "model_type": "siglip2_vision_model"},
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 16,
            "per_layer_config": {"1": {"head_dim": 24}, "4": {"head_dim": 24}},
            "sliding_window": 24,
            "num_hidden_layers": 5,
            "layer_types": [
                f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")
            ],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 259,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma4-keys": (
        "gemma4_text",
        {
            "head_dim": 16,
            "per_layer_config": {"3": {"head_dim": 32, "num_key_value_heads": 1}},
            "attention_k_eq_v": True,
            "sliding_window": 24,
            "layer_types": [f"{kind}_attention" for kind in ("sliding",) * 3 + ("full",)],
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            "head_dim": 16,
            "per_layer_config": {"1": {"head_dim": 24}},
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 24,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    ),
    "step3": (
        "step3p7",
        {
            "text_config": {
                **SIZES,
                "head_dim": 16,
                "num_key_value_heads": 2,
                "layer_types": [f"{kind}_attention" for kind in ("sliding", "full") * 2],
                "mlp_layer_types": ["dense", "sparse"] * 2,
                "sliding_window": 24,
                "num_sliding_attention_heads": 4,
                "n_routed_experts": 7,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 40,
                "share_expert_dim": 56,
                "moe_router_scaling_factor": 2.0,
                "swiglu_limits": [0.0, 0.5, 0.0, 0.0],
                "swiglu_limits_shared": [0.7, 0.4, 0.0, 0.0],
            },
            "vision_config": {**_SIGLIP, "model_type": "step3p5_vision"},
        },
    ),
    "vaultgemma": ("vaultgemma", {"head_dim": 16, "sliding_window": 24}),
    "cwm": ("cwm", {"head_dim": 16, "sliding_window": 24}),
    "phi3": (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 16,
            "rope_parameters": {**_LONG, "partial_rotary_factor": 0.75},
            "sliding_window": 40,
        },
    ),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "hyperclovax": (
        "hyperclovax",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 0.25},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 24,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": _YARN,
            },
        },
    ),
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("cohere2", {"sliding_window": 24, "logit_scale": 0.5}),
    "smollm3": ("smollm3", {}),
    "exaone4": ("exaone4", {"sliding_window": 24}),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "ministral": (
        "ministral",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full") * 2],
        },
    ),
    "ministral3": (
        "ministral3",
        {"head_dim": 16, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3}},
    ),
    "mistral3": (
        "mistral3",
        {
            "text_config": {**SIZES, "model_type": "mistral", "head_dim": 16},
            "vision_config": _PIXTRAL,
            "tie_word_embeddings": False,
        },
    ),
    "mistral4": (
        "mistral3",
        {
            "text_config": {
                **SIZES,
                "model_type": "mistral4",
                "num_key_value_heads": 6,
                "q_lora_rank": 20,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 12,
                "n_group": 3,
                "topk_group": 2,
                "n_routed_experts": 9,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 40,
                "first_k_dense_replace": 1,
                "rope_parameters": {
                    **_YARN,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.3,
                },
            },
            "vision_config": _PIXTRAL,
            "tie_word_embeddings": False,
        },
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "hunyuan": (
        "hunyuan_v1_dense",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 1.0,
                "alpha": 5.0,
            },
        },
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 24}),
    "stablelm": (
        "stablelm",
        {"qk_layernorm": True, "use_qkv_bias": True, "hidden_size": 96, "num_key_value_heads": 3},
    ),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "hidden_size": 96}),
    "nemotron": ("nemotron", {"head_dim": 16}),
    "arcee": ("arcee", {}),
    "paddleocr_vl": (
        "paddleocr_vl",
        {
            "text_config": {
                **SIZES,
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e5,
                    "mrope_section": [2, 3, 3],
                },
            },
            "vision_config": {**_PIXTRAL, "model_type": "paddleocr_vl_vision"},
            "image_token_id": 258,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": {
                **SIZES,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e5,
                    "mrope_section": [1, 1, 2],
                },
            },
            "vision_config": _QWEN_VISION,
            "image_token_id": 258,
        },
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {
            "text_config": {**SIZES, "head_dim": 16},
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": []},
            "image_token_id": 258,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_GATED_DELTA,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "shared_expert_intermediate_size": 36,
        },
    ),
    "qwen3_5": ("qwen3_5_text", _GATED_DELTA),
    "qwen3_5-images": (
        "qwen3_5",
        {
            "text_config": {**SIZES, **_GATED_DELTA},
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": []},
            "image_token_id": 258,
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {
            **_GATED_DELTA,
            "intermediate_size": None,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "shared_expert_intermediate_size": 36,
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            "layer_types": [f"{kind}_attention" for kind in ("linear", "full") * 2],
            "linear_num_heads": 3,
            "linear_head_dim": 12,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 16,
            "v_head_dim": 20,
            "num_local_experts": 9,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "n_group": 3,
            "topk_group": 2,
            "num_key_value_heads": 6,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_multiple_of": 20,
            "conv_bias": True,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "num_dense_layers": 1,
        },
    ),
    "bamba": ("bamba", {**_MAMBA, "attn_layer_indices": [1, 3], "mamba_n_groups": 2}),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "mamba_d_state": 10,
            "mamba_dt_rank": 7,
        },
    ),
    "granite_hybrid": (
        "granitemoehybrid",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 36,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "mamba_proj_bias": True,
        },
    ),
    "granite_hybrid-dense": (
        "granitemoehybrid",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "shared_intermediate_size": 60,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **_MAMBA,
            "mamba_d_ssm": 72,
            "mamba_n_groups": 2,
            "key_multiplier": 0.4,
            "attention_in_multiplier": 1.5,
            "attention_out_multiplier": 0.6,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.7,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "mlp_multipliers": [1.3, 0.6],
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
        },
    ),
    "falcon_h1-normed": (
        "falcon_h1",
        {**_MAMBA, "mamba_d_ssm": 72, "mamba_rms_norm": True, "mamba_n_groups": 2},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "M-M*-MM-",
            "head_dim": 16,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 12,
        },
    ),
    "nemotron_h-experts": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "MEM*EM-",
            "head_dim": 16,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 12,
            "n_routed_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "moe_shared_expert_intermediate_size": 36,
            "moe_latent_size": 20,
            "routed_scaling_factor": 1.7,
        },
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {
            "text_config": {
                **SIZES,
                "head_dim": 16,
                "num_experts": 7,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 40,
                "norm_topk_prob": True,
                "tie_word_embeddings": False,
            },
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": []},
            "image_token_id": 258,
            "tie_word_embeddings": False,
        },
    ),
    "kimi_k25": (
        "kimi_k25",
        {
            "text_config": {
                **SIZES,
                "model_type": "deepseek_v3",
                "num_key_value_heads": 6,
                "q_lora_rank": 20,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 12,
                "n_group": 1,
                "topk_group": 1,
                "n_routed_experts": 9,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 40,
                "first_k_dense_replace": 1,
            },
            "tie_word_embeddings": False,
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
        },
    ),
    "internlm3": ("internlm3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "helium": ("helium", {"head_dim": 8}),
    # transformers clears the row of padding as it loads a tied embedding.
    "youtu": (
        "youtu",
        {"num_key_value_heads": 6, "q_lora_rank": 20, "pad_token_id": None, **_LATENT},
    ),
    "minicpm3": (
        "minicpm3",
        {"num_key_value_heads": 6, "q_lora_rank": None, "dim_model_base": 16, **_LATENT},
    ),
    "minicpm": (
        "granite",
        {
            "attention_multiplier": 8**-0.5,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / 2,
            "logits_scaling": 48 / 16,
            "tie_word_embeddings": True,
        },
    ),
    "ling3": (
        "bailing_hybrid",
        {
            "layer_group_size": 2,
            "head_dim": 12,
            "num_local_experts": 9,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 6,
            "rope_theta": 1e4,
            **_LATENT,
        },
    ),
    "lfm3": (
        "lfm3",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        },
    ),
    "falcon": ("falcon", {}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-heads": ("falcon", {"multi_query": False, "parallel_attn": False}),
    "gpt_neo": (
        "gpt_neo",
        {
            "num_layers": 4,
            "num_heads": 6,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 24,
            "pad_token_id": None,
        },
    ),
    "granite_swa": (
        "granite_swa",
        {
            "sliding_window": 24,
            "layer_rope_theta": [0, 1e4, 1e5, 1e4],
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "pad_token_id": None,
        },
    ),
    "granite_moe_swa": (
        "granitemoe_swa",
        {
            "sliding_window": 24,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "attention_multiplier": 0.2,
            "shared_intermediate_size": 36,
            "residual_multiplier": 0.4,
        },
    ),
    "minimax": (
        "minimax",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2,
            "num_hidden_layers": 6,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "block_size": 24,
            "full_attn_alpha_factor": 1.5,
            "linear_attn_alpha_factor": 1.3,
            "mlp_alpha_factor": 0.7,
        },
    ),
    "apertus": ("apertus", {"vocab_size": 259}),
    "jais2": ("jais2", {}),
    "olmo": ("olmo", {"clip_qkv": 1.5, "tie_word_embeddings": True, "pad_token_id": None}),
    "phi": ("phi", {}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4}),
    "gpt2": ("gpt2", {**GPT, "scale_attn_by_inverse_layer_idx": True, "pad_token_id": None}),
    "gpt_bigcode": ("gpt_bigcode", {**GPT, "pad_token_id": None}),
    "gpt_bigcode-heads": ("gpt_bigcode", {**GPT, "multi_query": False, "pad_token_id": None}),
    "opt": ("opt", {"ffn_dim": 72, "pad_token_id": None}),
    "codegen": (
        "codegen",
        {"num_attention_heads": 8, "hidden_size": 64, "n_inner": 72, "rotary_dim": 4},
    ),
    "xglm": (
        "xglm",
        {"ffn_dim": 72, "d_model": 48, "num_layers": 4, "attention_heads": 6, "pad_token_id": None},
    ),
    "phimoe": (
        "phimoe",
        {
            "num_local_experts": 7,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.5 + 0.5 * i for i in range(4)],
                "long_factor": [1.5 + 0.5 * i for i in range(4)],
                "short_mscale": 1.1,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 16,
            },
        },
    ),
}
"""Model types of transformers, and fields of their configurations."""
HYBRIDS = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "lfm2", "lfm2_moe", "bamba"),
    *("granite_hybrid", "granite_hybrid-dense", "falcon_h1", "falcon_h1-normed", "nemotron_h"),
    *("nemotron_h-experts", "jamba", "ling3", "lfm3", "minimax"),
)
"""Those with recurrent layers."""
HYBRIDS_WITH_IMAGES = ("qwen3_5-images", "lfm2_vl")
"""The same of those that also take images."""


def make_family(name: str, path: Path, seed: int, **overrides: Any) -> Path:
    """Writes a model directory whose logits differ by far more than float32 rounding.

    Args:
        name: A key of FAMILIES.
        path: Directory to create.
        seed: Of the weights.
        **overrides: Further fields of the configuration.

    Returns:
        `path`.
    """
    import transformers

    kind, fields = FAMILIES[name]
    sizes = {} if "text_config" in fields else SIZES
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **fields, **overrides})
    has_images = not sizes
    build = (
        transformers.AutoModelForImageTextToText
        if has_images
        else transformers.AutoModelForCausalLM
    )
    model = build.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    adds_one = kind in (
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "nemotron",
        "step3p7",
        "vaultgemma",
    )
    adds_one = adds_one or kind.startswith(("qwen3_next", "qwen3_5"))
    corrections = [each for each in model.named_buffers() if each[0].endswith("bias")]
    with torch.no_grad():
        for key, value in (*model.named_parameters(), *corrections):
            noise = torch.randn(value.shape, generator=generator)
            if value.ndim > 1 and "norm" not in key:
                value.copy_(noise if "embed" in key else noise / value.shape[-1] ** 0.5)
            elif key.endswith("bias"):
                value.copy_(0.3 * noise)
            else:
                value.copy_(0.2 * noise + (0.0 if adds_one and "linear_attn" not in key else 1.0))
        for key, value in model.named_buffers():
            if key.endswith("layer_scalar"):
                value.copy_(1.0 + 0.3 * torch.randn(value.shape, generator=generator))
    model.save_pretrained(path)
    if name == "kimi_k25":
        # transformers takes a renaming of the tower's blocks back in the text's layers as well.
        tensors = load_file(path / "model.safetensors")
        renamed = {
            n.replace("language_model.model.blocks.", _LAYERS): t for n, t in tensors.items()
        }
        save_file(renamed, path / "model.safetensors", {"format": "pt"})
    name_own_code(name, path)
    return path


def name_own_code(name: str, path: Path) -> None:
    """Names the class of a family's own code in a directory, as files of the hub do."""
    if name in OWN_CODE:
        written = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(written | OWN_CODE[name]))
