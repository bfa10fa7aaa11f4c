"""Small random embedders and rerankers, with the files that sentence-transformers keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from weft.chaos.tiny import write_tokenizer
from weft.testing.models.tiny_encoders import make_encoder
from weft.testing.models.tiny_models import make_tiny, save_weights, tiny_config, tiny_weights

_MODULES = "sentence_transformers.models"


def make_embedder(
    kind: str,
    path: Path,
    seed: int = 0,
    *,
    pooling: str = "lasttoken",
    normalises: bool = True,
    dense: Sequence[int] = (),
    prompts: Mapping[str, str] | None = None,
    max_tokens: int | None = None,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Writes a decoder embedder whose names lack the prefix `model.`, as Qwen3-Embedding's do.

    Args:
        kind: See `make_tiny`.
        path: Directory to create.
        seed: Of the weights.
        pooling: Mode of sentence-transformers.
        normalises: Whether a Normalize module follows.
        dense: Widths of dense layers behind the pooling.
        prompts: By name.
        max_tokens: Longest input.
        tokenizer: Also write tokenizer.json.
        **overrides: Fields of config.json.
    """
    config = tiny_config(kind, **overrides)
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config)
    weights = tiny_weights(config, seed)
    weights.pop("lm_head.weight", None)
    save_weights(path, {k.removeprefix("model."): v for k, v in weights.items()}, 1)
    write_modules(
        path, config["hidden_size"], seed, pooling=pooling, normalises=normalises, dense=dense
    )
    if prompts:
        write_json(path / "config_sentence_transformers.json", {"prompts": dict(prompts)})
    if max_tokens:
        write_json(path / "sentence_bert_config.json", {"max_seq_length": max_tokens})
    if tokenizer:
        write_tokenizer(path, config["vocab_size"], max_context_tokens=2048)
    return path


def make_classifier(kind: str, path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes a decoder with a classification head; `id2label` names its classes."""
    config = tiny_config(kind, **overrides)
    name = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    config["architectures"] = [name]
    labels = len(config.setdefault("id2label", {"0": "no", "1": "maybe", "2": "yes"}))
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config)
    weights = tiny_weights(config, seed)
    weights.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(seed + 1)
    width = config["hidden_size"]
    weights["score.weight"] = torch.randn((labels, width), generator=generator) / width**0.5
    save_weights(path, weights, 1)
    return path


def make_judge(
    kind: str, path: Path, seed: int = 0, *, labels: tuple[int, int], **overrides: Any
) -> Path:
    """Writes a decoder that scores by the logits of two tokens, `labels`: yes and no."""
    make_tiny(kind, path, seed, **overrides)
    folders = {"Transformer": "", "LogitScore": "1_LogitScore"}
    modules = [{"type": f"{_MODULES}.{name}", "path": at} for name, at in folders.items()]
    write_json(path / "modules.json", modules)
    true, false = labels
    write_json(path / "1_LogitScore/config.json", {"true_token_id": true, "false_token_id": false})
    return path


def write_modules(
    path: Path,
    hidden: int,
    seed: int,
    *,
    pooling: str,
    normalises: bool = True,
    dense: Sequence[int] = (),
) -> None:
    """Writes modules.json and the folders that it names."""
    folders = [("Transformer", ""), ("Pooling", "1_Pooling")]
    write_json(
        path / "1_Pooling/config.json",
        {
            "word_embedding_dimension": hidden,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_lasttoken": pooling == "lasttoken",
        },
    )
    generator = torch.Generator().manual_seed(seed + 2)
    for width in dense:
        name = f"{len(folders)}_Dense"
        activation = "torch.nn.modules.linear.Identity"
        if len(folders) == 2:
            activation = "torch.nn.modules.activation.Tanh"
        write_json(
            path / name / "config.json",
            {
                "in_features": hidden,
                "out_features": width,
                "bias": True,
                "activation_function": activation,
            },
        )
        save_file(
            {
                "linear.weight": torch.randn((width, hidden), generator=generator) / hidden**0.5,
                "linear.bias": torch.randn(width, generator=generator),
            },
            path / name / "model.safetensors",
        )
        folders.append(("Dense", name))
        hidden = width
    if normalises:
        folders.append(("Normalize", f"{len(folders)}_Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": folder, "type": f"{_MODULES}.{kind}"}
        for i, (kind, folder) in enumerate(folders)
    ]
    write_json(path / "modules.json", modules)


def make_m3(path: Path, seed: int = 0, *, ends: Sequence[str] = ("pt", "pt")) -> Path:
    """Writes an encoder with the heads of BGE-M3: dense, sparse and multi-vector outputs.

    Args:
        path: Directory to create.
        seed: Of the weights.
        ends: Formats of the files of its sparse and its multi-vector head: pt or safetensors.
    """
    hidden = 48
    make_encoder("xlm-roberta", path, seed, hidden_size=hidden)
    write_modules(path, hidden, seed, pooling="cls")
    generator = torch.Generator().manual_seed(seed + 3)
    heads = (("sparse_linear", 1), ("colbert_linear", 40))
    for (name, width), end in zip(heads, ends, strict=True):
        tensors = {
            "weight": torch.randn((width, hidden), generator=generator) / hidden**0.5,
            "bias": torch.randn(width, generator=generator) / 4,
        }
        save: Any = torch.save if end == "pt" else save_file
        save(tensors, path / f"{name}.{end}")
    return path


def write_json(path: Path, content: object) -> None:
    """Writes a file, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
