"""Adapters of whole tiny models: as the pool holds them, and merged into the weights."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad
from weft.kernels.ops.lora.spec import LoraStep, LoraWeights
from weft.testing.kernels.lora_cases import (
    LoraCase,
    Shared,
    make_expert_lora,
    make_lora,
    segments_of,
)

LAYERS = 3
RANKS = [0, 8, 3, 20]
"""Ranks by slot."""


def make_adapters(config: dict[str, Any], is_dense: bool) -> dict[str, LoraCase]:
    """Adapters by projection, small enough that the logits keep their size."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (hidden, q, 0),
        "self_attn.k_proj": (hidden, kv, q),
        "self_attn.v_proj": (hidden, kv, q + kv),
        "self_attn.o_proj": (q, hidden, 0),
    }
    if is_dense:
        shapes |= {
            "mlp.gate_proj": (hidden, inner, 0),
            "mlp.up_proj": (hidden, inner, inner),
            "mlp.down_proj": (inner, hidden, 0),
        }
    else:
        shapes["mlp.gate"] = (hidden, config["num_experts"], 0)
    cases = {
        name: make_lora(k, n, RANKS, torch.float32, column=column, layers=LAYERS)
        for name, (k, n, column) in shapes.items()
    }
    vocabulary = config["vocab_size"]
    cases["embed_tokens"] = make_lora(vocabulary, hidden, RANKS, torch.float32)
    cases["lm_head"] = make_lora(hidden, vocabulary, RANKS, torch.float32)
    return cases


def make_experts(config: dict[str, Any]) -> dict[str, LoraCase]:
    """Adapters of experts by projection; only layer 1 has them, half of them sharing A or B."""
    hidden, inner, experts = (
        config[name] for name in ("hidden_size", "moe_intermediate_size", "num_experts")
    )
    is_shared = random.random() < 0.5
    shapes: dict[str, tuple[int, int, int, Shared]] = {
        "gate_proj": (hidden, inner, 0, "a"),
        "up_proj": (hidden, inner, inner, "a"),
        "down_proj": (inner, hidden, 0, "b"),
    }
    cases = {}
    for name, (k, n, column, shared) in shapes.items():
        case = make_expert_lora(
            k, n, RANKS, experts, torch.float32, shared=shared if is_shared else None, column=column
        )
        w = case.weights
        padding = (0, 0, 0, 0, 1, LAYERS - 2)
        weights = replace(
            w,
            table=pad(w.table, padding),
            b_table=pad(w.rows_of_b, padding),
            counts=pad(w.counts, padding[2:]),
        )
        cases[name] = LoraCase(weights, case.plain)
    return cases


def merge(
    path: Path,
    merged: Path,
    adapters: dict[str, LoraCase],
    experts: dict[str, LoraCase],
    slot: int,
) -> Path:
    """The model with one adapter added to its weights."""
    merged.mkdir()
    (merged / "config.json").write_bytes((path / "config.json").read_bytes())
    weights = load_file(path / "model.safetensors")
    for name, case in adapters.items():
        for (layer, of_slot), (a, b) in case.plain.items():
            if of_slot != slot:
                continue
            if name == "embed_tokens":
                weights["model.embed_tokens.weight"] += (b @ a).T
            else:
                prefix = "" if name == "lm_head" else f"model.layers.{layer}."
                weights[f"{prefix}{name}.weight"] += b @ a
    for name, case in experts.items():
        for (expert, of_slot), (a, b) in case.plain.items():
            if of_slot == slot:
                weights[f"model.layers.1.mlp.experts.{expert}.{name}.weight"] += b @ a
    save_file(weights, merged / "model.safetensors")
    return merged


def lora_step(
    adapters: dict[str, LoraCase], experts: dict[str, LoraCase], slots: list[int]
) -> LoraStep:
    def parts(*names: str) -> tuple[Any, ...]:
        wanted = {f"self_attn.{n}_proj" for n in names} | {f"mlp.{n}_proj" for n in names}
        wanted |= set(names)
        return tuple(weights(case) for name, case in adapters.items() if name in wanted)

    def weights(case: LoraCase) -> LoraWeights:
        return case.weights if case.weights.b.is_cuda else case.packed().weights

    return LoraStep(
        segments=segments_of(slots),
        qkv=parts("q", "k", "v"),
        o=parts("o"),
        gate_up=parts("gate", "up"),
        down=parts("down"),
        router=parts("mlp.gate"),
        w13=tuple(weights(experts[name]) for name in ("gate_proj", "up_proj") if experts),
        w2=tuple(weights(experts[name]) for name in ("down_proj",) if experts),
        embed=parts("embed_tokens"),
        lm_head=parts("lm_head"),
    )
