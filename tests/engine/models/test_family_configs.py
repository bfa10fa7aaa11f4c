"""Configurations of families made of parts: both layouts, refusals by name, fingerprints."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.rope import RopeConfig
from weft.contract.errors import ModelError
from weft.testing.models.families import SIZES

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
NEEDED = {
    "MiMoV2Flash": {
        **EXPERTS,
        "num_attention_heads": 8,
        "n_routed_experts": 8,
        "head_dim": 24,
        "v_head_dim": 16,
    },
    "Llama4": {"num_local_experts": 8, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2},
    "Gemma3n": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention"] * 4},
    "Step3p5": {**EXPERTS, "moe_num_experts": 8, "moe_top_k": 2, "head_dim": 16},
}
"""Fields without which a file of some architectures says nothing."""


def parse(architecture: str, **fields: Any) -> ModelConfig:
    needed = NEEDED.get(architecture, {})
    raw = {**SIZES, **needed, "architectures": [f"{architecture}ForCausalLM"], **fields}
    return ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("architecture", "field", "fields"),
    [
        ("Gemma2", "hidden_activation", {"hidden_activation": "quick_gelu"}),
        ("Gemma2", "layer_types", {"layer_types": ["chunked_attention"] * 4}),
        ("Gemma2", "layer_types", {"layer_types": ["full_attention"]}),
        ("Gemma3", "sliding_window", {"sliding_window": -1}),
        ("Phi3", "long_factor", {"rope_scaling": {"type": "longrope", "long_factor": 1.0},
                                 "original_max_position_embeddings": 64}),
        ("Granite", "logits_scaling", {"logits_scaling": 0}),
        ("Cohere", "use_parallel_block", {"use_parallel_block": False}),
        ("Olmo2", "partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("Glm4", "partial_rotary_factor", {"partial_rotary_factor": 1.5}),
        ("SmolLM3", "no_rope_layers", {"no_rope_layers": [1]}),
        ("SeedOss", "rope_type", {"rope_parameters": {"rope_type": "other"}}),
        ("SeedOss", "alpha", {"rope_parameters": {"rope_type": "dynamic", "alpha": 2.0}}),
        ("Nemotron", "num_key_value_heads", {"num_key_value_heads": 4}),
        ("Mistral3", "architectures", {}),
        ("Qwen3Next", "layer_types", {**EXPERTS, "layer_types": ["linear_attention"] * 3 + ["x"]}),
        ("Qwen3Next", "num_hidden_layers", {**EXPERTS, "layer_types": ["full_attention"]}),
        ("Qwen3Next", "layer_types", {**EXPERTS, "layer_types": ["linear_attention"] * 4}),
        ("Qwen3Next", "full_attention_interval", {**EXPERTS, "full_attention_interval": 5}),
        ("Qwen3Next", "linear_num_value_heads", {**EXPERTS, "linear_num_value_heads": 5}),
        ("Qwen3_5Moe", "norm_topk_prob", {**EXPERTS, "norm_topk_prob": False}),
        ("Qwen3_5", "attn_output_gate", {"attn_output_gate": False}),
        ("Bamba", "layer_types", {"mamba_n_heads": 6}),
        ("Bamba", "mamba_n_heads", {"mamba_n_heads": 7}),
        ("GraniteMoeHybrid", "position_embedding_type",
         {"mamba_n_heads": 6, "position_embedding_type": "alibi"}),
        ("FalconH1", "mamba_proj_bias", {"mamba_proj_bias": True}),
        ("FalconH1", "ssm_multipliers", {"ssm_multipliers": [1.0]}),
        ("FalconH1", "time_step_limit", {"mamba_d_ssm": 72, "mamba_n_heads": 6,
                                         "time_step_limit": [1.0, 0.5]}),
        ("NemotronH", "layers_block_type", {"hybrid_override_pattern": "-M*"}),
        ("NemotronH", "hybrid_override_pattern", {"hybrid_override_pattern": "MX"}),
        ("Lfm2", "layer_types", {"layer_types": ["conv"] * 4}),
        ("Lfm2", "conv_L_cache", {"conv_L_cache": 1, "full_attn_idxs": [1]}),
        ("Jamba", "attn_layer_offset", {"attn_layer_period": 2, "attn_layer_offset": 2}),
        ("Jamba", "attn_layer_period", {"num_hidden_layers": 4}),
        ("KimiLinear", "mla_use_nope", {"mla_use_nope": False}),
        ("KimiLinear", "linear_attn_config",
         {**EXPERTS, "num_experts_per_token": 2,
          "linear_attn_config": {"full_attn_layers": [9], "num_heads": 3, "head_dim": 8}}),
        ("Gemma4", "use_bidirectional_attention", {"use_bidirectional_attention": "all"}),
        ("Gemma4", "num_kv_shared_layers", {"num_kv_shared_layers": 4}),
        ("Gemma3n", "num_kv_shared_layers", {"num_kv_shared_layers": 4}),
        ("Gemma3n", "altup_active_idx", {"altup_active_idx": 1}),
        ("Gemma3n", "altup_correct_scale", {"altup_correct_scale": False}),
        ("Gemma3n", "altup_num_inputs", {"altup_num_inputs": 1}),
        ("Gemma3n", "intermediate_size", {"intermediate_size": [72, 72]}),
        ("Gemma3n", "activation_sparsity_pattern", {"activation_sparsity_pattern": [1.0] * 4}),
        ("Gemma3n", "activation_sparsity_pattern", {"activation_sparsity_pattern": [0.5] * 5}),
        ("Laguna", "gating", {"gating": "other", **EXPERTS}),
        ("MiMoV2Flash", "hybrid_layer_pattern", {"hybrid_layer_pattern": [0, 2, 1, 0]}),
        ("MiMoV2Flash", "swa_head_dim", {"swa_head_dim": 16}),
        ("Afmoe", "score_func", {**EXPERTS, "score_func": "softmax"}),
        ("Afmoe", "n_group", {**EXPERTS, "n_group": 2}),
        ("BailingMoeV2", "score_function", {**EXPERTS, "score_function": "softmax"}),
        ("MiniCPM", "sparse_config", {"sparse_config": {"dense_len": 8192}}),
        ("Step3p5", "swiglu_limits", {"swiglu_limits": [0.0]}),
        ("Llama4", "layer_types", {"layer_types": ["sliding_attention"] * 4}),
        ("Apertus", "rope_parameters", {}),
        ("BailingMoeV3", "no_kda_lora", {"no_kda_lora": False}),
        ("BailingMoeV3", "kda_lower_bound", {"kda_lower_bound": 1.0}),
        ("Falcon", "alibi", {"alibi": True}),
        ("Falcon", "num_ln_in_parallel_attn", {"num_ln_in_parallel_attn": 2}),
        ("CodeGen", "n_head", {"rotary_dim": 4}),
        ("XGLM", "add_cross_attention", {"ffn_dim": 72, "add_cross_attention": True}),
        ("XGLM", "d_model", {"ffn_dim": 72, "d_model": 45, "attention_heads": 5}),
        ("XGLM", "pad_token_id", {"ffn_dim": 72, "pad_token_id": 2}),
        ("SarvamMoE", "use_qk_norm", {**EXPERTS, "use_qk_norm": False}),
        ("Cohere2Moe", "expert_selection_fn", {**EXPERTS, "expert_selection_fn": "other"}),
        ("Cohere2Moe", "shared_expert_combination_strategy",
         {**EXPERTS, "num_shared_experts": 1, "shared_expert_combination_strategy": "max"}),
        ("GPTJ", "rotary_dim", {"hidden_size": 528, "rotary_dim": 30}),
        ("GPTNeo", "attention_types", {"attention_types": [[["global"], 3]]}),
        ("GPTNeo", "attention_types", {"attention_types": [["other", 4]]}),
        ("Lfm3", "layer_types", {"layer_types": ["conv"] * 4}),
        ("OPT", "do_layer_norm_before", {"do_layer_norm_before": False}),
        ("OPT", "word_embed_proj_dim", {"word_embed_proj_dim": 32}),
        ("Phi", "qk_layernorm", {"qk_layernorm": True}),
        ("Phimoe", "num_experts_per_tok", {"num_local_experts": 4, "num_experts_per_tok": 3}),
        ("Mpt", "architectures", {}),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    architecture: str, field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(ModelError) as caught:
        parse(architecture, **fields)
    assert field in str(caught.value.param)
    assert field in caught.value.message
    assert field != "alibi" or "(missing: scores that fall" in caught.value.message


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("Gemma2", {"attn_logit_softcapping": None}),
        ("Gemma2", {"query_pre_attn_scalar": 8}),
        ("Gemma3", {"rope_local_base_freq": 5e3}),
        ("Granite", {"residual_multiplier": 0.5}),
        ("Cohere2", {"logit_scale": 0.5}),
        ("Olmo3", {"rope_scaling": YARN}),
        ("Glm4", {"partial_rotary_factor": 0.25}),
        ("Exaone4", {"sliding_window": None}),
        ("StableLm", {"use_parallel_residual": True}),
        ("Qwen3_5", {"linear_value_head_dim": 64}),
        ("Qwen3_5", {"layer_types": ["full_attention"] + ["linear_attention"] * 3}),
        ("Gemma4", {"final_logit_softcapping": 5.0}),
        ("Gemma4", {"attention_k_eq_v": True}),
        ("Gemma3n", {"activation_sparsity_pattern": [0.0, 0.0, 0.9, 0.0]}),
        ("Gemma3n", {"altup_num_inputs": 3}),
        ("Gemma3n", {"laurel_rank": 32}),
        ("Llama4", {"attention_chunk_size": 64}),
        ("Llama4", {"floor_scale": 64}),
        ("MiMoV2Flash", {"attention_value_scale": 0.5}),
        ("Olmo", {"clip_qkv": 8.0}),
        ("GPTNeoX", {"use_parallel_residual": False}),
    ],
)
def test_what_changes_hidden_states_changes_the_fingerprint(
    architecture: str, change: dict[str, Any]
) -> None:
    assert parse(architecture).fingerprint() != parse(architecture, **change).fingerprint()
    assert parse(architecture).fingerprint() == parse(architecture, eos_token_id=7).fingerprint()


@pytest.mark.parametrize(
    ("architecture", "fields", "with_attention"),
    [
        ("Qwen3_5", {}, (3,)),
        ("KimiLinear", {"model_max_length": 512, **EXPERTS, "num_experts_per_token": 2,
                        "linear_attn_config": {"full_attn_layers": [2, 4], "num_heads": 3,
                                               "head_dim": 8, "short_conv_kernel_size": 4}},
         (1, 3)),
        ("GraniteMoeHybrid", {"layer_types": ["mamba", "mamba", "attention", "mamba"],
                              "num_local_experts": 0, "mamba_n_heads": 6,
                              "position_embedding_type": "nope"}, (2,)),
        ("NemotronH", {"hybrid_override_pattern": "M-M*-M", "mamba_num_heads": 6,
                       "mamba_head_dim": 16, "n_groups": 2,
                       "time_step_limit": [0.0, float("inf")]}, (2,)),
        ("Lfm2", {"full_attn_idxs": [1], "block_ff_dim": 60, "block_multiple_of": 8,
                  "norm_eps": 1e-5, "tie_embedding": True}, (1,)),
    ],
)  # fmt: skip
def test_layers_of_hybrids_as_files_of_the_hub_list_them(
    architecture: str, fields: dict[str, Any], with_attention: tuple[int, ...]
) -> None:
    config = parse(architecture, **fields)
    assert config.decoder is not None
    assert config.decoder.attention_layers == with_attention
    assert config.page_groups == [(None, list(with_attention))]
    assert len(config.decoder.recurrent_layers) == config.num_layers - len(with_attention)


def test_older_files_of_gemma_3_say_the_same() -> None:
    """A base for each kind of layers, and a scaling of those without a window."""
    old = parse(
        "Gemma3",
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=2,
    )
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    listed = [f"{kind}_attention" for kind in ("sliding", "full") * 2]
    assert old == parse("Gemma3", rope_parameters=kinds, layer_types=listed)
    assert old.decoder is not None
    ropes = [layer.rope for layer in old.decoder.layers[:2]]
    assert ropes == [RopeConfig(theta=1e4), RopeConfig(theta=1e6, scaling="linear", factor=8.0)]


def test_yarn_is_read_for_llamas_too() -> None:
    """A factor that is not there is the ratio of the lengths; the steepness follows."""
    config = parse("Llama", hidden_act="silu", rope_scaling={**YARN, "factor": None})
    assert config.rope.factor == SIZES["max_position_embeddings"] / 64
    assert config.rope.attention_factor == pytest.approx(1.2079, abs=1e-4)
    assert b"attention_factor" not in parse("Llama").fingerprint()


KINDS = [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full")]


def test_both_layouts_of_gemma_4_say_the_same() -> None:
    heads = {"head_dim": 24, "num_key_value_heads": 1}
    layers = {"layer_types": KINDS, "attention_k_eq_v": True, "sliding_window": 20}
    listed = parse("Gemma4", **layers, per_layer_config={"0": heads, "3": heads})
    assert listed == parse("Gemma4", **layers, global_head_dim=24, num_global_key_value_heads=1)
    assert listed.page_planes == [(None, [(1, 24, [0, 3]), (2, 256, [1, 2])])]


def test_both_layouts_of_sarvam_say_the_same() -> None:
    """As transformers writes them, and as the hub has them."""
    newer = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
             "moe_intermediate_size": 16}  # fmt: skip
    older = {"num_experts": 8, "num_shared_experts": 1, **newer}
    del older["n_routed_experts"], older["n_shared_experts"]
    assert parse("SarvamMoE", **newer) == parse("SarvamMoE", **older)
    config = parse("Glm4Moe", **newer, model_type="sarvam_moe")
    assert config.decoder == parse("SarvamMoE", **newer).decoder
    latent = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
              "head_dim": 24}  # fmt: skip
    rope = {"factor": 8.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}
    yarn = parse("SarvamMLA", **newer, **latent, rope_parameters={"rope_type": "yarn", **rope})
    given = {**older, **latent, "rope_scaling": {"type": "deepseek_yarn", **rope}}
    assert yarn == parse("SarvamMLA", **given)


@pytest.mark.parametrize("kind", ["gemma2", None])
def test_text_models_of_others_are_those_that_are_known(kind: str | None) -> None:
    """Files of LLaVA leave out what is as in Llama 7B."""
    raw = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": kind}}
    if kind is not None:
        with pytest.raises(ModelError, match=r"text_config\.model_type.*gemma2.*llama, mistral"):
            ModelConfig.from_dict(raw)
        return
    config = ModelConfig.from_dict(raw)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (32, 4096, 32_000)
    assert not config.tie_word_embeddings


TEXTS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def text_of_llava(**text: Any) -> ModelConfig:
    architecture = "LlavaNextForConditionalGeneration"
    return ModelConfig.from_dict({"architectures": [architecture], "text_config": text})


@pytest.mark.parametrize("kind", TEXTS)
def test_what_text_models_of_others_leave_out_is_as_in_transformers(kind: str) -> None:
    given, found = TEXTS[kind](), text_of_llava(model_type=kind)
    assert found.num_layers == given.num_hidden_layers
    names = ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")
    for name in (*names, "tie_word_embeddings"):
        assert getattr(found, name) == getattr(given, name)
    assert found.num_heads == given.num_attention_heads
    assert found.num_kv_heads == given.num_key_value_heads
    window = None if found.sliding_window is None else found.sliding_window.length
    assert window == getattr(given, "sliding_window", None)


@pytest.mark.parametrize("kind", TEXTS)
def test_only_text_models_of_mistral_have_a_window(kind: str) -> None:
    found = text_of_llava(model_type=kind, sliding_window=20).sliding_window
    assert (None if found is None else found.length) == (20 if kind == "mistral" else None)
    assert text_of_llava(model_type=kind, sliding_window=None).sliding_window is None
    listed = {"layer_types": ["sliding_attention"] * 32, "sliding_window": None}
    with pytest.raises(ModelError, match="layer_types"):
        text_of_llava(model_type=kind, **listed)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 20},
        {"head_dim": 24, "rms_norm_eps": 1e-4, "num_key_value_heads": 2},
    ],
)
@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
def test_what_mistral_3_leaves_out_of_its_text_model_is_as_in_transformers(
    kind: str, fields: dict[str, Any]
) -> None:
    if kind == "ministral3":
        fields = {**fields, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    text = {**sizes, "num_attention_heads": 8, "max_position_embeddings": 9000, **fields}
    given = {"mistral": MistralConfig, "ministral3": Ministral3Config}[kind](**text)
    architecture = "Mistral3ForConditionalGeneration"
    raw = {"architectures": [architecture], "text_config": {**text, "model_type": kind}}
    found = ModelConfig.from_dict(raw)
    assert (found.head_dim, found.num_kv_heads) == (given.head_dim, given.num_key_value_heads)
    assert found.rms_norm_eps == given.rms_norm_eps
    assert found.rope.theta == given.rope_parameters["rope_theta"]
    window = None if found.sliding_window is None else found.sliding_window.length
    assert window == given.sliding_window


def test_both_layouts_of_mimo_say_the_same() -> None:
    ropes = {
        "full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_theta": 1e3, "partial_rotary_factor": 0.5},
    }
    mlps = ["dense", "sparse", "dense", "sparse"]
    ours = parse(
        "MiMoV2Flash", layer_types=KINDS, mlp_layer_types=mlps, sliding_window=21,
        rope_parameters=ropes,
    )  # fmt: skip
    hub = parse(
        "MiMoV2Flash", hybrid_layer_pattern=[0, 1, 1, 0], moe_layer_freq=[0, 1, 0, 1],
        sliding_window=20, sliding_window_size=20, rope_theta=1e6, swa_rope_theta=1e3,
        partial_rotary_factor=0.5, swa_num_key_value_heads=4, swa_head_dim=24, swa_v_head_dim=16,
    )  # fmt: skip
    assert ours == hub
    assert [layer.kv_heads for layer in ours.decoder.layers] == [None, 4, 4, None]  # type: ignore[union-attr]


def test_both_layouts_of_step_3_say_the_same() -> None:
    yarn = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    ropes = {
        "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.5, **yarn},
        "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }
    layers = {"layer_types": KINDS, "sliding_window": 20, "share_expert_dim": 24}
    ours = parse(
        "Step3p5", **layers, rope_parameters=ropes, num_sliding_attention_heads=8,
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
    )  # fmt: skip
    hub = parse(
        "Step3p5", **{**layers, "layer_types": [*KINDS, KINDS[1]]}, num_nextn_predict_layers=1,
        rope_theta=[5e6, 1e4, 1e4, 5e6, 1e4], partial_rotary_factors=[0.5, 1.0, 1.0, 0.5, 1.0],
        rope_scaling=yarn, moe_layers_enum="1,2", num_attention_groups=2,
        attention_other_setting={"num_attention_heads": 8, "num_attention_groups": 2},
    )  # fmt: skip
    assert ours == hub
