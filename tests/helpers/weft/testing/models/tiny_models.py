"""Small random models in Hugging Face's layout, written without transformers (so: quickly)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from weft.chaos.tiny import EOS_TOKEN_ID, write_tokenizer

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_MOE_FIELDS = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 44,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def make_tiny(
    kind: str,
    path: Path,
    seed: int = 0,
    *,
    shards: int = 1,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Writes a model directory.

    Weights are scaled so that logits differ by far more than float32 rounding: greedy tokens can
    be compared.

    Args:
        kind: llama, mistral, qwen2, qwen3 or qwen3_moe.
        path: Directory to create.
        seed: Of the weights.
        shards: Files that the weights are spread over; above 1 with an index.
        tokenizer: Also write tokenizer.json and tokenizer_config.json; every id below the
            vocabulary's size up to 2,963 can be decoded.
        **overrides: Fields of config.json.

    Returns:
        `path`.
    """
    config = tiny_config(kind, **overrides)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (path / "generation_config.json").write_text(json.dumps(generation))
    save_weights(path, tiny_weights(config, seed), shards)
    if tokenizer:
        write_tokenizer(path, config["vocab_size"], max_context_tokens=2048)
    return path


def tiny_config(kind: str, **overrides: Any) -> dict[str, Any]:
    """A config.json with sizes that are not powers of two."""
    config = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "attention_bias": False,
        "bos_token_id": 1,
        "dtype": "float32",
        "eos_token_id": EOS_TOKEN_ID,
        "head_dim": 24,
        "hidden_act": "silu",
        "hidden_size": 72,
        "intermediate_size": 136,
        "max_position_embeddings": 2048,
        "num_attention_heads": 6,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": 517,
        # Mistral's and Qwen's own defaults would switch a window on.
        "sliding_window": None,
        "use_sliding_window": False,
    }
    experts = _MOE_FIELDS if kind == "qwen3_moe" else {}
    return {**config, **experts, **overrides}


def tiny_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random float32 parameters under their Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config["head_dim"]
    q_size = config["num_attention_heads"] * dim
    kv_size = config["num_key_value_heads"] * dim
    qwen2 = config["model_type"] == "qwen2"
    qkv_bias = qwen2 or config["attention_bias"]
    o_bias = config["attention_bias"] and not qwen2
    mlp_bias = config.get("mlp_bias", False)
    weights: dict[str, torch.Tensor] = {}

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        weights[f"{name}.weight"] = normal(rows, columns) / columns**0.5
        if bias:
            weights[f"{name}.bias"] = 0.3 * normal(rows)

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = 1.0 + 0.2 * normal(size)

    weights["model.embed_tokens.weight"] = normal(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm", hidden)
        linear(f"{prefix}.self_attn.q_proj", q_size, hidden, qkv_bias)
        linear(f"{prefix}.self_attn.k_proj", kv_size, hidden, qkv_bias)
        linear(f"{prefix}.self_attn.v_proj", kv_size, hidden, qkv_bias)
        linear(f"{prefix}.self_attn.o_proj", hidden, q_size, o_bias)
        if config["model_type"].startswith("qwen3"):
            norm(f"{prefix}.self_attn.q_norm", dim)
            norm(f"{prefix}.self_attn.k_norm", dim)
        norm(f"{prefix}.post_attention_layernorm", hidden)
        mlps = [(f"{prefix}.mlp", inner)]
        if has_experts(config, layer):
            linear(f"{prefix}.mlp.gate", config["num_experts"], hidden, False)
            width = config["moe_intermediate_size"]
            mlps = [(f"{prefix}.mlp.experts.{e}", width) for e in range(config["num_experts"])]
        for mlp, width in mlps:
            linear(f"{mlp}.gate_proj", width, hidden, mlp_bias)
            linear(f"{mlp}.up_proj", width, hidden, mlp_bias)
            linear(f"{mlp}.down_proj", hidden, width, mlp_bias)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], hidden, False)
    return weights


def has_experts(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer, from 0, is a mixture of experts."""
    if "num_experts" not in config or layer in config["mlp_only_layers"]:
        return False
    return (layer + 1) % int(config["decoder_sparse_step"]) == 0


def fuse_experts(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Puts the experts of each layer into one tensor a projection, as transformers 5 holds them."""
    for layer in range(config["num_hidden_layers"]):
        if not has_experts(config, layer):
            continue
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack(
                [
                    weights.pop(f"{prefix}.{e}.{name}_proj.weight")
                    for e in range(config["num_experts"])
                ]
            )
            for name in ("gate", "up", "down")
        )
        weights[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        weights[f"{prefix}.down_proj"] = down


def save_weights(path: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Writes model.safetensors, or `shards` files and their index."""
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in list(weights)[shard::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
