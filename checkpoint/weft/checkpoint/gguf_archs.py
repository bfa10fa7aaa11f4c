"""The architectures of GGUF files: which model each is, and what its metadata mean in config.json.

llama.cpp's converter writes metadata under names of its own, and leaves out what its code has as
constants for an architecture: those constants stand here. Names of tensors come from the package
`gguf`. What the converter does to the numbers is in `gguf_values`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from weft.contract.errors import ModelError

Values = dict[str, Any]
"""Fields of config.json."""


class Metadata(Protocol):
    """What this module reads of a file: `GgufMetadata`."""

    def own(self, key: str) -> Any: ...

    def own_or(self, key: str, default: Any = None) -> Any: ...

    def has_tensor(self, name: str) -> bool: ...

    def rows_of(self, tensor: str) -> int: ...

    def problem(self, text: str) -> ModelError: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How a file of one `general.architecture` becomes a model."""

    architecture: str
    """Name of the class in config.json."""
    model_type: str
    constants: Mapping[str, Any] | None = None
    """Fields that llama.cpp has as constants."""
    further: Callable[[Metadata], Values] | None = None
    """Fields that this architecture alone has, or has under another name."""


def _numbers(m: Metadata, key: str) -> list[int]:
    """A value of each layer, which the file may keep once for all."""
    value, layers = m.own(key), m.own("block_count")
    return list(value) if isinstance(value, list) else [value] * layers


def _layer_types(m: Metadata) -> list[str] | None:
    """Which layers have a window, where the file says so."""
    pattern, layers = m.own_or("attention.sliding_window_pattern"), m.own("block_count")
    if pattern is None:
        return None
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        pattern = [bool((layer + 1) % pattern) for layer in range(layers)]
    return ["sliding_attention" if has else "full_attention" for has in pattern[:layers]]


def _gemma2(m: Metadata) -> Values:
    # llama.cpp knows the model of 27B by its layers; others scale by the head's width.
    is_27b = m.own("block_count") == 46
    width = m.own("embedding_length") // m.own("attention.head_count")
    return {"query_pre_attn_scalar": width if is_27b else m.own("attention.key_length")}


def _gemma3(m: Metadata) -> Values:
    is_27b = m.own("block_count") == 62
    width = m.own("embedding_length") // m.own("attention.head_count")
    kinds = _layer_types(m)
    own = {} if kinds is None else {"layer_types": kinds}
    return {
        **own,
        "query_pre_attn_scalar": width if is_27b else m.own("attention.key_length"),
        "rope_local_base_freq": m.own_or("rope.freq_base_swa", 10_000.0),
    }


def _gemma4(m: Metadata) -> Values:
    kinds, heads = _layer_types(m), _numbers(m, "attention.head_count_kv")
    assert kinds is not None
    inner, full = _numbers(m, "feed_forward_length"), kinds.index("full_attention")
    values = {
        "attention_k_eq_v": not m.has_tensor(f"blk.{full}.attn_v.weight"),
        "enable_moe_block": m.own_or("expert_count", 0) > 0,
        "global_head_dim": m.own("attention.key_length"),
        "head_dim": m.own("attention.key_length_swa"),
        "hidden_size_per_layer_input": m.own_or("embedding_length_per_layer_input", 0),
        "intermediate_size": inner[0],
        "layer_types": kinds,
        "num_global_key_value_heads": heads[full],
        "num_key_value_heads": heads[kinds.index("sliding_attention")],
        "num_kv_shared_layers": m.own_or("attention.shared_kv_layers", 0),
        "top_k_experts": m.own_or("expert_used_count"),
        "use_double_wide_mlp": inner[-1] != inner[0],
    }
    if values["hidden_size_per_layer_input"]:
        values["vocab_size_per_layer_input"] = m.rows_of("per_layer_token_embd.weight")
    return values


def _mixtral(m: Metadata) -> Values:
    if not m.own_or("expert_count", 0):
        return {}
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}


def _granite(m: Metadata) -> Values:
    return {
        "attention_multiplier": m.own_or("attention.scale", 1.0),
        "embedding_multiplier": m.own_or("embedding_scale", 1.0),
        "residual_multiplier": m.own_or("residual_scale", 1.0),
        "logits_scaling": m.own_or("logit_scale", 1.0),
    }


def _granite_moe(m: Metadata) -> Values:
    shared = m.own_or("expert_shared_feed_forward_length", 0)
    if not shared:
        return _granite(m)
    return {
        **_granite(m),
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "model_type": "granitemoeshared",
        "shared_intermediate_size": shared,
    }


def _cohere(m: Metadata) -> Values:
    return {"use_qk_norm": m.has_tensor("blk.0.attn_q_norm.weight")}


def _latent_sizes(m: Metadata) -> Values:
    """DeepSeek's latent attention."""
    if m.own_or("attention.key_length_mla") is None:
        raise m.problem("was written before llama.cpp split K and V, convert the model again")
    rotated = m.own("rope.dimension_count")
    return {
        "kv_lora_rank": m.own("attention.kv_lora_rank"),
        "q_lora_rank": m.own_or("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": m.own("attention.key_length_mla") - rotated,
        "v_head_dim": m.own("attention.value_length_mla"),
        "head_dim": rotated,
        "num_key_value_heads": m.own("attention.head_count"),
    }


def _latent(m: Metadata) -> Values:
    """Files of all models with latent attention name DeepSeek V2; their tensors tell them apart."""
    values = _latent_sizes(m)
    if not m.own_or("expert_count", 0):
        return values | {"architectures": ["YoutuForCausalLM"], "model_type": "youtu"}
    has_correction = any(
        m.has_tensor(f"blk.{layer}.exp_probs_b.bias") for layer in range(m.own("block_count"))
    )
    if m.own_or("expert_gating_func", 2 if has_correction else 1) == 2:
        return values
    groups = m.own_or("expert_group_count", 1)
    return values | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    }


def _phi3(m: Metadata) -> Values:
    window = m.own_or("attention.sliding_window", 0)
    return {"sliding_window": window or None}


def _olmo2(m: Metadata) -> Values:
    window = m.own_or("attention.sliding_window", 0)
    if not window:
        return {}
    kinds = _layer_types(m)
    own = {} if kinds is None else {"layer_types": kinds}
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **own}


def _olmo(m: Metadata) -> Values:
    return {"clip_qkv": m.own_or("attention.clamp_kqv")}


def _exaone4(m: Metadata) -> Values:
    kinds = _layer_types(m)
    if kinds is not None:
        return {"layer_types": kinds}
    return {} if m.own_or("attention.sliding_window", 0) else {"sliding_window_pattern": None}


def _lfm2(m: Metadata) -> Values:
    heads = _numbers(m, "attention.head_count_kv")
    return {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": m.own("shortconv.l_cache"),
        "conv_bias": m.has_tensor("blk.0.shortconv.in_proj.bias"),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "num_key_value_heads": max(heads),
    }


def _smollm3(m: Metadata) -> Values:
    # Every fourth layer has no rotation.
    layers = m.own("block_count")
    return {"no_rope_layers": [int((layer + 1) % 4 > 0) for layer in range(layers)]}


def _ernie_moe(m: Metadata) -> Values:
    sparse = [layer for layer, has in enumerate(_layers_with(m, "ffn_gate_inp.weight")) if has]
    return {
        "moe_layer_interval": m.own_or("interleave_moe_layer_step", 1),
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
    }


def _layers_with(m: Metadata, name: str) -> list[bool]:
    return [m.has_tensor(f"blk.{n}.{name}") for n in range(m.own("block_count"))]


def _starcoder2(m: Metadata) -> Values:
    return {"use_bias": m.has_tensor("blk.0.attn_q.bias")}


_ernie = _starcoder2


def _stablelm(m: Metadata) -> Values:
    return {
        "use_qkv_bias": m.has_tensor("blk.0.attn_q.bias"),
        "use_parallel_residual": m.own_or("use_parallel_residual", False),
        "qk_layernorm": m.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _llama4(m: Metadata) -> Values:
    sparse = _layers_with(m, "ffn_gate_inp.weight")
    layers = len(sparse)
    # Every fourth layer has no rotation and sees all positions.
    rotated = [int((layer + 1) % 4 > 0) for layer in range(layers)]
    return {
        "intermediate_size": m.own("expert_feed_forward_length"),
        "intermediate_size_mlp": m.own("feed_forward_length"),
        "moe_layers": [layer for layer, has in enumerate(sparse) if has],
        "no_rope_layers": rotated,
        "attention_chunk_size": m.own_or("attention.chunk_size", 8192),
        "use_qk_norm": m.own("expert_count") != 128,
    }


def _gpt_oss(m: Metadata) -> Values:
    layers = m.own("block_count")
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    return {"layer_types": kinds, "intermediate_size": m.own("expert_feed_forward_length")}


def _glm4_moe(m: Metadata) -> Values:
    return {"use_qk_norm": m.has_tensor("blk.0.attn_q_norm.weight")}


def _minicpm(m: Metadata) -> Values:
    layers, hidden = m.own("block_count"), m.own("embedding_length")
    return {
        "scale_emb": m.own("embedding_scale"),
        "scale_depth": m.own("residual_scale") * layers**0.5,
        "dim_model_base": round(hidden / m.own("logit_scale")),
    }


def _minimax_m2(m: Metadata) -> Values:
    return {"rotary_dim": m.own("rope.dimension_count")}


def _ling2(m: Metadata) -> Values:
    return {"moe_shared_expert_intermediate_size": m.own("expert_feed_forward_length")}


def _no_window(m: Metadata) -> Values:
    kinds = _layer_types(m)
    return {} if kinds is None else {"layer_types": kinds}


def _afmoe(m: Metadata) -> Values:
    return {
        **_no_window(m),
        "route_scale": m.own_or("expert_weights_scale", 1.0),
        "route_norm": True,
        "mup_enabled": True,
    }


def _qwen2_moe(m: Metadata) -> Values:
    return {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _gated_delta(m: Metadata) -> Values:
    heads = m.own("ssm.time_step_rank")
    return {
        "linear_conv_kernel_dim": m.own("ssm.conv_kernel"),
        "linear_key_head_dim": m.own("ssm.state_size"),
        "linear_num_key_heads": m.own("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": m.own("ssm.inner_size") // heads,
        "full_attention_interval": m.own_or("full_attention_interval", 4),
    }


def _mamba2(m: Metadata) -> Values:
    """Fields of Nemotron-H."""
    heads, dense = m.own("ssm.time_step_rank"), _layers_with(m, "ffn_up.weight")
    # The converter writes lengths of experts, or 0, for MLPs.
    inner = m.rows_of(f"blk.{dense.index(True)}.ffn_up.weight") if any(dense) else None
    letters = ["*"] * m.own("block_count")
    for letter, name in (
        *(("M", "ssm_in.weight"), ("-", "ffn_up.weight"), ("E", "ffn_up_exps.weight")),
    ):
        for layer, has in enumerate(_layers_with(m, name)):
            letters[layer] = letter if has else letters[layer]
    return {
        "conv_kernel": m.own("ssm.conv_kernel"),
        "hybrid_override_pattern": "".join(letters),
        "intermediate_size": inner or m.own("expert_feed_forward_length"),
        "mamba_head_dim": m.own("ssm.inner_size") // heads,
        "mamba_num_heads": heads,
        "mlp_hidden_act": "relu2",
        "moe_latent_size": m.own_or("moe_latent_size"),
        "moe_shared_expert_intermediate_size": m.own_or("expert_shared_feed_forward_length"),
        "n_groups": m.own("ssm.group_count"),
        "ssm_state_size": m.own("ssm.state_size"),
        "use_conv_bias": any(_layers_with(m, "ssm_conv1d.bias")),
    }


def _of(architecture: str, model_type: str, **more: Any) -> GgufArchitecture:
    return GgufArchitecture(architecture=architecture, model_type=model_type, **more)


_NORMED = {"norm_topk_prob": True}
ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "afmoe": _of("AfmoeForCausalLM", "afmoe", further=_afmoe),
    "apertus": _of(
        "ApertusForCausalLM", "apertus", constants={"qk_norm": True, "hidden_act": "xielu"}
    ),
    "arcee": _of("ArceeForCausalLM", "arcee", constants={"hidden_act": "relu2"}),
    "cohere2": _of("Cohere2ForCausalLM", "cohere2", further=_no_window),
    "command-r": _of("CohereForCausalLM", "cohere", further=_cohere),
    "deepseek2": _of("DeepseekV3ForCausalLM", "deepseek_v3", further=_latent),
    "bailingmoe2": _of("BailingMoeV2ForCausalLM", "bailing_moe_v2", further=_ling2),
    "dots1": _of("Dots1ForCausalLM", "dots1"),
    "ernie4_5": _of("Ernie4_5ForCausalLM", "ernie4_5", further=_ernie),
    "ernie4_5-moe": _of("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", further=_ernie_moe),
    "exaone4": _of("Exaone4ForCausalLM", "exaone4", further=_exaone4),
    "exaone-moe": _of("ExaoneMoeForCausalLM", "exaone_moe", further=_no_window),
    "gemma": _of("GemmaForCausalLM", "gemma"),
    "gemma2": _of("Gemma2ForCausalLM", "gemma2", further=_gemma2),
    "gemma3": _of("Gemma3ForCausalLM", "gemma3_text", further=_gemma3),
    "gemma4": _of("Gemma4ForCausalLM", "gemma4_text", further=_gemma4),
    "glm4": _of("Glm4ForCausalLM", "glm4"),
    "glm4moe": _of("Glm4MoeForCausalLM", "glm4_moe", further=_glm4_moe),
    "gpt-oss": _of("GptOssForCausalLM", "gpt_oss", further=_gpt_oss),
    "granite": _of("GraniteForCausalLM", "granite", further=_granite),
    "granitemoe": _of("GraniteMoeForCausalLM", "granitemoe", further=_granite_moe),
    "jais2": _of("Jais2ForCausalLM", "jais2", constants={"hidden_act": "relu2"}),
    "lfm2": _of("Lfm2ForCausalLM", "lfm2", further=_lfm2),
    "lfm2moe": _of("Lfm2MoeForCausalLM", "lfm2_moe", further=_lfm2, constants=_NORMED),
    "llama": _of("LlamaForCausalLM", "llama", further=_mixtral),
    "llama4": _of("Llama4ForCausalLM", "llama4_text", further=_llama4),
    "minicpm": _of("MiniCPMForCausalLM", "minicpm", further=_minicpm),
    "minimax-m2": _of("MiniMaxM2ForCausalLM", "minimax_m2", further=_minimax_m2),
    "mistral3": _of("Ministral3ForCausalLM", "ministral3"),
    "mistral4": _of("Mistral4ForCausalLM", "mistral4", further=_latent_sizes),
    "nemotron": _of("NemotronForCausalLM", "nemotron", constants={"hidden_act": "relu2"}),
    "nemotron_h": _of("NemotronHForCausalLM", "nemotron_h", further=_mamba2),
    "nemotron_h_moe": _of("NemotronHForCausalLM", "nemotron_h", further=_mamba2),
    "olmo": _of("OlmoForCausalLM", "olmo", further=_olmo),
    "olmo2": _of("Olmo2ForCausalLM", "olmo2", further=_olmo2),
    "olmoe": _of("OlmoeForCausalLM", "olmoe", constants={"norm_topk_prob": False}),
    "phi2": _of("PhiForCausalLM", "phi", constants={"hidden_act": "gelu_new"}),
    "phi3": _of("Phi3ForCausalLM", "phi3", further=_phi3),
    "qwen2": _of("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": _of(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        further=_qwen2_moe,
        constants={"norm_topk_prob": False},
    ),
    # Files of models that take images are their text part.
    "qwen2vl": _of("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _of("Qwen3ForCausalLM", "qwen3"),
    # Files of Qwen3-Next have its products apart, as Qwen3.5 has them.
    "qwen3next": _of(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", further=_gated_delta, constants=_NORMED
    ),
    "qwen35": _of("Qwen3_5ForCausalLM", "qwen3_5_text", further=_gated_delta),
    "qwen35moe": _of(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", further=_gated_delta, constants=_NORMED
    ),
    "qwen3moe": _of("Qwen3MoeForCausalLM", "qwen3_moe", constants=_NORMED),
    "qwen3vl": _of("Qwen3ForCausalLM", "qwen3"),
    "qwen3vlmoe": _of("Qwen3MoeForCausalLM", "qwen3_moe", constants=_NORMED),
    "seed_oss": _of("SeedOssForCausalLM", "seed_oss"),
    "smollm3": _of("SmolLM3ForCausalLM", "smollm3", further=_smollm3),
    "stablelm": _of("StableLmForCausalLM", "stablelm", further=_stablelm),
    "starcoder2": _of(
        "Starcoder2ForCausalLM",
        "starcoder2",
        further=_starcoder2,
        constants={"hidden_act": "gelu_pytorch_tanh"},
    ),
}
"""By `general.architecture`."""
ROTATED_BY_KIND = ("gemma4", "olmo2")
"""Architectures whose layers with a window rotate otherwise than the others."""
ROTATED_IN_PART = ("gemma4",)
"""Architectures whose layers without a window rotate the share of pairs that `rope_freqs` leaves at
1.
"""
_GEGLU = ("gemma", "gemma2", "gemma3", "gemma4")


def config_values(architecture: str, m: Metadata) -> Values:
    """Fields of config.json beside rotation and special tokens. Many architectures have several
    names for one number; all are given, and a reader takes the one that it knows.
    """
    known = ARCHITECTURES[architecture]
    values: Values = {
        "architectures": [known.architecture],
        "model_type": known.model_type,
        **_sizes(m),
        **_norms(m),
        **_biases(m),
        **_experts(m),
        "hidden_act": "gelu_pytorch_tanh" if architecture in _GEGLU else "silu",
    }
    values |= known.constants or {}
    values |= known.further(m) if known.further is not None else {}
    values["hidden_activation"] = values["hidden_act"]
    return {name: value for name, value in values.items() if value is not None}


def _sizes(m: Metadata) -> Values:
    heads, layers = _numbers(m, "attention.head_count"), m.own("block_count")
    kv_heads = m.own_or("attention.head_count_kv", heads[0])
    hidden, inner = m.own("embedding_length"), m.own_or("feed_forward_length")
    if isinstance(inner, list):
        inner = inner[0] if len(set(inner)) == 1 else None
    values = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": m.own("context_length"),
        "num_attention_heads": max(heads),
        "num_hidden_layers": layers,
        "num_key_value_heads": max(kv_heads) if isinstance(kv_heads, list) else kv_heads,
        "head_dim": m.own_or("attention.key_length", hidden // max(heads)),
        "sliding_window": m.own_or("attention.sliding_window") or None,
        "logit_scale": m.own_or("logit_scale"),
        "final_logit_softcapping": m.own_or("final_logit_softcapping"),
        "attn_logit_softcapping": m.own_or("attn_logit_softcapping"),
    }
    nextn = m.own_or("nextn_predict_layers", 0)
    if nextn:
        values |= {"num_hidden_layers": layers - nextn, "num_nextn_predict_layers": 0}
    return values


def _norms(m: Metadata) -> Values:
    names = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
    told = map(m.own_or, names)
    epsilon = next((value for value in told if value is not None), None)
    fields = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    return dict.fromkeys(fields, epsilon)


def _biases(m: Metadata) -> Values:
    first = [m.has_tensor(f"blk.{n}.attn_q.bias") for n in range(m.own("block_count"))]
    return {
        "attention_bias": any(first),
        "attention_out_bias": m.has_tensor("blk.0.attn_output.bias"),
        "mlp_bias": m.has_tensor("blk.0.ffn_up.bias"),
    }


def _experts(m: Metadata) -> Values:
    count = m.own_or("expert_count", 0)
    if not count:
        return {}
    chosen, inner = m.own("expert_used_count"), m.own_or("expert_feed_forward_length")
    dense, shared = m.own_or("leading_dense_block_count", 0), m.own_or("expert_shared_count")
    sigmoid = m.own_or("expert_gating_func", 0) == 2
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return {
        **dict.fromkeys(names, count),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), chosen),
        "moe_intermediate_size": inner,
        **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), dense),
        **dict.fromkeys(
            ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), shared
        ),
        "shared_expert_intermediate_size": m.own_or("expert_shared_feed_forward_length"),
        "routed_scaling_factor": m.own_or("expert_weights_scale"),
        "norm_topk_prob": m.own_or("expert_weights_norm"),
        "n_group": m.own_or("expert_group_count"),
        "topk_group": m.own_or("expert_group_used_count"),
        "scoring_func": "sigmoid" if sigmoid else None,
    }
