"""A tiny random model whose mesh starts in seconds."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from string import ascii_letters

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from weft.checkpoint.byte_pairs import byte_letters, byte_pair_tokenizer

TINY_NAME = "tiny"
VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
_MAX_CONTEXT_TOKENS = 2048
# Heads have the smallest size that GPUs support.
_HIDDEN, _INNER, _HEADS, _KV_HEADS, _DIM, _LAYERS = 64, 128, 4, 2, 64, 2
_EXPERTS = 8
_WITH_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": _INNER,
    "norm_topk_prob": True,
    "num_experts": _EXPERTS,
    "num_experts_per_tok": 2,
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(folder: Path, seed: int, *, has_experts: bool = False) -> Path:
    """Writes a Llama, or with experts a Qwen3-MoE, with random float32 weights and a byte-level
    tokenizer; creates `folder` if it is missing, and returns it.

    Weights are scaled so that logits differ by far more than rounding: greedy tokens are the same
    in batches of any size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 1,
        "dtype": "float32",
        "eos_token_id": EOS_TOKEN_ID,
        "head_dim": _DIM,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "max_position_embeddings": _MAX_CONTEXT_TOKENS,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE,
    }
    if has_experts:
        config |= _WITH_EXPERTS
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = _weights(np.random.default_rng(seed), has_experts=has_experts)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, VOCAB_SIZE, _MAX_CONTEXT_TOKENS)
    return folder


def _weights(
    random: np.random.Generator, *, has_experts: bool = False
) -> dict[str, NDArray[np.float32]]:
    def linear(rows: int, columns: int) -> NDArray[np.float32]:
        return random.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)

    def norm() -> NDArray[np.float32]:
        return 1 + np.float32(0.2) * random.standard_normal(_HIDDEN, np.float32)

    weights = {"model.embed_tokens.weight": random.standard_normal((VOCAB_SIZE, _HIDDEN), "f4")}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": norm(),
            f"{prefix}.self_attn.q_proj.weight": linear(_HEADS * _DIM, _HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": linear(_KV_HEADS * _DIM, _HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": linear(_KV_HEADS * _DIM, _HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": linear(_HIDDEN, _HEADS * _DIM),
            f"{prefix}.post_attention_layernorm.weight": norm(),
        }
        mlps = [f"{prefix}.mlp"]
        if has_experts:
            weights[f"{prefix}.mlp.gate.weight"] = linear(_EXPERTS, _HIDDEN)
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}.self_attn.{name}.weight"] = np.ones(_DIM, np.float32)
            mlps = [f"{prefix}.mlp.experts.{number}" for number in range(_EXPERTS)]
        for mlp in mlps:
            weights |= {
                f"{mlp}.gate_proj.weight": linear(_INNER, _HIDDEN),
                f"{mlp}.up_proj.weight": linear(_INNER, _HIDDEN),
                f"{mlp}.down_proj.weight": linear(_HIDDEN, _INNER),
            }
    return {**weights, "model.norm.weight": norm(), "lm_head.weight": linear(VOCAB_SIZE, _HIDDEN)}


def write_tokenizer(folder: Path, vocab_size: int, max_context_tokens: int) -> None:
    """Writes a byte-level tokenizer: special tokens, the 256 bytes, then pairs of letters.
    `vocab_size` is at most 2,963.
    """
    num_pairs = max(0, vocab_size - len(SPECIAL_TOKENS) - 256)
    pairs = list(product(ascii_letters, ascii_letters))[:num_pairs]
    symbols = [*SPECIAL_TOKENS, *byte_letters(), *("".join(pair) for pair in pairs)]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    tokenizer = byte_pair_tokenizer(
        {symbol: index for index, symbol in enumerate(symbols)},
        pairs,
        enumerate(SPECIAL_TOKENS),
        pre_tokenizer={**byte_level, "add_prefix_space": False},
        decoder={**byte_level, "add_prefix_space": True},
    )
    settings = {
        "bos_token": SPECIAL_TOKENS[1],
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "model_max_length": max_context_tokens,
        "pad_token": SPECIAL_TOKENS[0],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
