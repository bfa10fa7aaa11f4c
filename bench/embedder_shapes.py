"""Shapes of well-known embedders, and model directories of them with random weights."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModel

SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "bert-base": ({"model_type": "bert"}, "mean"),
    "minilm-l6": (
        {
            "model_type": "bert",
            "hidden_size": 384,
            "num_hidden_layers": 6,
            "intermediate_size": 1536,
        },
        "mean",
    ),
    "bge-m3": (
        {
            "model_type": "xlm-roberta",
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "max_position_embeddings": 8194,
            "type_vocab_size": 1,
        },
        "cls",
    ),
    "qwen3-0.6b": (
        {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "intermediate_size": 3072,
            "max_position_embeddings": 4096,
        },
        "lasttoken",
    ),
}
VOCAB = 30_000
PAD = "[PAD]"


def write_model(
    shape: str,
    folder: Path,
    *,
    layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Writes a model directory: random weights, a tokenizer of words, pooling and normalisation.

    Args:
        shape: One of `SHAPES`.
        folder: An empty folder.
        layers: Number of layers; None: the shape's.
        dtype: Of the weights.
        device: Where the weights are made.
    """
    fields, pooling = SHAPES[shape]
    given = {"vocab_size": VOCAB, "pad_token_id": 0, **fields}
    if layers is not None:
        given["num_hidden_layers"] = layers
    torch.manual_seed(0)
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    with torch.device(device):
        AutoModel.from_config(config, dtype=dtype).save_pretrained(folder)
    words = {PAD: 0} | {f"w{id_}": id_ for id_ in range(1, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    files: dict[str, object] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "padding_side": "left" if pooling == "lasttoken" else "right",
        },
        "modules.json": [
            {"idx": i, "name": str(i), "path": at, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, at) in enumerate(kinds)
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": config.hidden_size,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_lasttoken": pooling == "lasttoken",
        },
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    (folder / "2_Normalize").mkdir()


def random_texts(count: int, shortest: int, longest: int) -> list[str]:
    """Texts of so many words, evenly spread."""
    lengths = [random.randint(shortest, longest) for _ in range(count)]
    return [" ".join(f"w{random.randrange(1, VOCAB)}" for _ in range(n)) for n in lengths]
