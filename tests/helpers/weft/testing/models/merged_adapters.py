"""Applies an `Adapter` to a transformers model, for comparison with PEFT's own forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from weft.checkpoint.adapters.plan import PARTS
from weft.checkpoint.config import ModelConfig
from weft.engine.model.adapters.adapter import Adapter, VocabularyChange
from weft.engine.model.adapters.formats import read_adapter
from weft.testing.models.choices import where_experts_are_sure
from weft.testing.models.tiny_adapters import peft_model

VOCAB = 517
MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
}


def read(directory: Path, model_dir: Path, **options: Any) -> Adapter:
    settings = {"max_rank": 64, "parts": PARTS, **options}
    return read_adapter(directory, ModelConfig.load(model_dir), **settings)


def load_base(model_dir: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    # A change of one of two tied matrices must not become one of the other.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


@torch.no_grad()
def merged(model_dir: Path, adapter: Adapter) -> Any:
    """The base model of transformers with the adapter's products added to its weights."""
    model = load_base(model_dir)
    for (layer, kind), pair in adapter.modules.items():
        weight = model.get_parameter(f"model.layers.{layer}.{MODULES[kind]}.weight")
        weight += pair.b.float() @ pair.a.float()
    for (layer, kind), pair in adapter.experts.items():
        experts = model.model.layers[layer].mlp.experts
        weight = experts.down_proj if kind == "down" else experts.gate_up_proj
        half = weight.shape[1] // 2
        rows = {"gate": slice(half), "up": slice(half, None), "down": slice(None)}[kind]
        weight[:, rows] += pair.b @ pair.a
    if adapter.embed_tokens is not None:
        change_rows(model.model.embed_tokens, adapter.embed_tokens, is_embedding=True)
    if adapter.lm_head is not None:
        change_rows(model.lm_head, adapter.lm_head, is_embedding=False)
    return model


def change_rows(module: Any, change: VocabularyChange, *, is_embedding: bool) -> None:
    """Applies a change of the embedding or of the LM head to the weight of transformers' module."""
    if change.weight is not None:
        module.weight = torch.nn.Parameter(change.weight.clone())
    if change.rows is not None:
        module.weight[list(change.token_ids)] = change.rows
    if change.lora is not None:
        product = change.lora.b @ change.lora.a
        module.weight += product.T if is_embedding else product


def texts_of(seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, 17), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, seed: int) -> torch.Tensor:
    return model(texts_of(seed)).logits


def assert_equals_peft(model_dir: Path, folder: Path, seed: int, **settings: Any) -> Adapter:
    """Saves a random adapter, reads it, and compares logits with PEFT's own."""
    expected = peft_model(model_dir, seed, **settings)
    expected.save_pretrained(folder)
    adapter = read(folder, model_dir)
    assert_same_logits(model_dir, adapter, expected, seed)
    return adapter


def assert_same_logits(model_dir: Path, adapter: Adapter, expected: Any, seed: int) -> None:
    ours, theirs = logits(merged(model_dir, adapter), seed + 1), logits(expected, seed + 1)
    base, scale = logits(load_base(model_dir), seed + 1), theirs.abs().max()
    changed = (theirs[..., : base.shape[-1]] - base).abs().max()
    assert changed > 0.01 * scale, "the adapter changes nothing"
    for text, one, other in zip(texts_of(seed + 1).tolist(), ours, theirs, strict=True):
        with where_experts_are_sure(lambda: expected, text):
            assert (one - other).abs().max() < 1e-3 * scale
