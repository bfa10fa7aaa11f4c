"""Small random encoders, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "type_vocab_size": 2},
    "roberta": {"model_type": "roberta", "type_vocab_size": 1, "pad_token_id": 1},
    "xlm-roberta": {"model_type": "xlm-roberta", "type_vocab_size": 1, "pad_token_id": 1},
    "gte": {"model_type": "gte", "type_vocab_size": 1},
    "nomic_bert": {"model_type": "nomic_bert", "type_vocab_size": 2},
    "jina_embeddings_v3": {"model_type": "jina_embeddings_v3", "type_vocab_size": 1},
    "modernbert": {
        "model_type": "modernbert",
        "local_attention": 16,
        "global_attn_every_n_layers": 3,
        "classifier_pooling": "mean",
    },
}


def make_encoder(kind: str, path: Path, seed: int, num_labels: int = 0, **overrides: Any) -> Path:
    """Writes a model directory.

    Args:
        kind: One of `CONFIGS`, or a model_type of transformers.
        path: Directory to create.
        seed: Of the weights.
        num_labels: Classes of its head; 0: it has none.
        **overrides: Fields of config.json.
    """
    sizes = {
        "vocab_size": 517,
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 72,
        "max_position_embeddings": 194,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "cls_token_id": 1,
        "sep_token_id": 2,
    }
    settings = {**sizes, **CONFIGS.get(kind, {"model_type": kind}), **overrides}
    if num_labels:
        settings["num_labels"] = num_labels
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    build = AutoModelForSequenceClassification if num_labels else AutoModel
    model = build.from_config(config)
    with torch.no_grad():  # Norms and biases begin as ones and zeros, which would hide mistakes.
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name.lower():
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return path
