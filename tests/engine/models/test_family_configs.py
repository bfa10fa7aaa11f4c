"""Configurations of families made of parts: both layouts, refusals by name, fingerprints."""

from __future__ import annotations

from typing import Any

import pytest
from weft.engine.base.errors import ModelError
from weft.engine.checkpoint.config import ModelConfig
from weft.engine.checkpoint.rope import RopeConfig
from weft.testing.models.families import SIZES

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


def parse(architecture: str, **fields: Any) -> ModelConfig:
    raw = {**SIZES, "architectures": [f"{architecture}ForCausalLM"], **fields}
    return ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("architecture", "field", "fields"),
    [
        ("Gemma2", "hidden_activation", {"hidden_activation": "relu"}),
        ("Gemma2", "layer_types", {"layer_types": ["chunked_attention"] * 4}),
        ("Gemma2", "layer_types", {"layer_types": ["full_attention"]}),
        ("Gemma3", "use_bidirectional_attention", {"use_bidirectional_attention": True}),
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
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    architecture: str, field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(ModelError) as caught:
        parse(architecture, **fields)
    assert field in str(caught.value.param)
    assert field in caught.value.message


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
