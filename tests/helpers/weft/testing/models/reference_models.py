"""Small random models made by transformers itself, for families whose files it knows best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 331
SIZES: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 24,
    "hidden_size": 72,
    "intermediate_size": 136,
    "max_position_embeddings": 512,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
"""Sizes that are not powers of two."""


def make_reference(model_type: str, path: Path, seed: int, **overrides: Any) -> Any:
    """Writes a model directory by `save_pretrained`; float32, random.

    Weights are scaled so that logits differ by far more than float32 rounding: greedy tokens can
    be compared.

    Args:
        model_type: As in config.json.
        path: Directory to create.
        seed: Of the weights.
        **overrides: Fields of config.json, in addition to `SIZES`; a field that is None is left to
            the family's default, and "none" is null.

    Returns:
        The model of transformers.
    """
    fields = {**SIZES, **overrides}
    given = {k: None if v == "none" else v for k, v in fields.items() if v is not None}
    config = AutoConfig.for_model(model_type, **given)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and "inv_freq" not in name:
                tensor.copy_(_values(name, tensor, generator))
    model.save_pretrained(path)
    return model


def _values(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    random = torch.randn(like.shape, generator=generator)
    if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")):
        return 1.0 + 0.2 * random
    if like.dim() == 1 or name.endswith(("bias", "sinks")):
        return 0.3 * random
    if "embed_tokens" in name:
        return random
    # Stacked experts, [E, rows, columns] or their transposes: either is close enough.
    return random / float(min(like.shape[-2:])) ** 0.5
