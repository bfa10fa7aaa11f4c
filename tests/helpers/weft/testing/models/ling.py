"""Ling 2.0's files, made of what transformers knows as GLM-4.5 without biases."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ARCHITECTURE = "BailingMoeV2ForCausalLM"
_FIELDS = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    **{
        name: name
        for name in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
            *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
            *("rms_norm_eps", "hidden_act", "tie_word_embeddings", "bos_token_id", "eos_token_id"),
            *("pad_token_id", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
            *("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace"),
        )
    },
}
"""The name that Ling's config.json has for each of GLM's fields."""
_PARTS = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
}
_QKV = tuple(f".self_attn.{part}_proj." for part in "qkv")
_FUSED = ".attention.query_key_value."


def ling_config(glm: Mapping[str, Any]) -> dict[str, Any]:
    """Ling's config.json of one of GLM-4.5."""
    rope = glm["rope_parameters"]
    return {
        **{ling: glm[name] for name, ling in _FIELDS.items() if name in glm},
        "architectures": [ARCHITECTURE],
        "model_type": "bailing_moe_v2",
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }


def to_ling(path: Path) -> None:
    """Rewrites a directory of GLM-4.5 as Ling's."""
    config = ling_config(json.loads((path / "config.json").read_text()))
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if _QKV[0] in name]:
        parts = [tensors.pop(name.replace(_QKV[0], part)) for part in _QKV]
        tensors[name.replace(_QKV[0], _FUSED)] = torch.cat(parts)
    for glm_part, ling_part in _PARTS.items():
        tensors = {name.replace(glm_part, ling_part): tensor for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors")


def to_ling_adapter(path: Path) -> Path:
    """Rewrites an adapter of GLM-4.5's output projections as Ling's; returns its directory."""
    config = json.loads((path / "adapter_config.json").read_text()) | {"target_modules": ["dense"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    file, ours, lings = path / "adapter_model.safetensors", "self_attn.o_proj", "attention.dense"
    save_file({name.replace(ours, lings): t for name, t in load_file(file).items()}, file)
    return path


def is_ling(path: Path) -> bool:
    """Whether a directory has Ling's files."""
    named = json.loads((path / "config.json").read_text()).get("architectures")
    return bool(named == [ARCHITECTURE])


def load_ling(path: Path) -> Any:
    """The model of Ling's files, without quantised weights, in transformers."""
    import transformers

    given = json.loads((path / "config.json").read_text())
    values = {name: given[ling] for name, ling in _FIELDS.items() if ling in given}
    rope = {name: given[name] for name in ("rope_theta", "partial_rotary_factor")}
    config = transformers.AutoConfig.for_model(
        "glm4_moe", **values, use_qk_norm=True, rope_parameters={"rope_type": "default", **rope}
    )
    config.use_cache = False
    tensors = load_file(path / "model.safetensors")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    for name in [name for name in tensors if _FUSED in name]:
        sizes = [count * config.head_dim for count in (heads, kv_heads, kv_heads)]
        parts = tensors.pop(name).split(sizes)
        tensors |= {
            name.replace(_FUSED, part): tensor.contiguous()
            for part, tensor in zip(_QKV, parts, strict=True)
        }
    for glm_part, ling_part in _PARTS.items():
        tensors = {name.replace(ling_part, glm_part): tensor for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        build: Any = transformers.AutoModelForCausalLM
        return build.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
