"""Random adapters in PEFT's format, of real sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ATTENTION = ("q", "k", "v", "o")
DENSE = (*ATTENTION, "gate", "up", "down")
PROJECTIONS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "attention": ATTENTION,
    "experts": (*ATTENTION, "experts"),
    "shared-experts": (*ATTENTION, "shared_experts"),
    "vocabulary": (*DENSE, "embed_tokens", "lm_head"),
}
"""Projections that adapters change, as in `EngineConfig.lora_projections`; empty: all of a dense
model.
"""
_SPREAD = 0.02
"""Spread of the numbers: small enough that the model still writes text."""
Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def write_adapter(
    folder: Path, model_dir: Path, rank: int, seed: int, kind: str = "dense", device: str = "cpu"
) -> Path:
    """Writes one adapter into a new folder.

    Args:
        folder: Folder to create.
        model_dir: The model's directory.
        rank: Rank of each module.
        seed: Seed of the random numbers.
        kind: Kind of projections, a key of `PROJECTIONS`.
        device: Device that draws the numbers.
    """
    config = json.loads((model_dir / "config.json").read_text())
    draw = torch.Generator(device).manual_seed(seed)
    modules = dict(_dense_modules(config, rank, PROJECTIONS[kind] or DENSE))
    if "experts" in kind:
        modules |= dict(_expert_modules(config, rank, are_shared=kind == "shared-experts"))
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, shapes in modules.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for half, shape in zip("AB", shapes, strict=True):
                numbers = torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16)
                tensors[f"{name}.lora_{half}.weight"] = (_SPREAD * numbers).cpu()
    saved = {}
    if kind == "vocabulary":
        # Whole matrices of the adapter, not low-rank ones.
        saved = {"modules_to_save": ["embed_tokens", "lm_head"]}
        size = (config["vocab_size"], config["hidden_size"])
        for name in ("model.embed_tokens", "lm_head"):
            numbers = torch.randn(size, generator=draw, device=device, dtype=torch.bfloat16)
            tensors[f"base_model.model.{name}.weight"] = (_SPREAD * numbers).cpu()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        **saved,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def _dense_modules(
    config: Mapping[str, Any], rank: int, kinds: tuple[str, ...]
) -> Iterator[tuple[str, Shapes]]:
    """Modules of a layer, and the shapes of A and B."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    q, kv, inner = heads * dim, config["num_key_value_heads"] * dim, config["intermediate_size"]
    sizes = {
        "q": (hidden, q),
        "k": (hidden, kv),
        "v": (hidden, kv),
        "o": (q, hidden),
        "gate": (hidden, inner),
        "up": (hidden, inner),
        "down": (inner, hidden),
    }
    for kind, (width, out) in sizes.items():
        if kind in kinds:
            block = "self_attn" if kind in ATTENTION else "mlp"
            yield f"{block}.{kind}_proj", ((rank, width), (out, rank))


def _expert_modules(
    config: Mapping[str, Any], rank: int, *, are_shared: bool
) -> Iterator[tuple[str, Shapes]]:
    """The same of all experts, stacked; the side towards the stream may be one for all."""
    experts, hidden = config["num_experts"], config["hidden_size"]
    inner, outer = config["moe_intermediate_size"], 1 if are_shared else experts
    for letter in ("w1", "w3"):
        yield f"mlp.experts.{letter}", ((outer, rank, hidden), (experts, inner, rank))
    yield "mlp.experts.w2", ((experts, rank, inner), (outer, hidden, rank))
