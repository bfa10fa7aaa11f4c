"""LoRA on a head's layer, behind its K and V: what makes a head fit an adapter of its target."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from weft.engine.model.heads.draft_adapter import MODULES, read_draft_adapter

from .head import DraftHead


class LoraLinear(nn.Module):
    """A frozen layer and a low-rank change of it, none at first.

    Args:
        base: Frozen here.
        rank: Of the change.
        scaling: What its product is multiplied by.
        generator: For A.
    """

    def __init__(
        self, base: nn.Linear, rank: int, scaling: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.base, self.scaling = base.requires_grad_(False), scaling
        width, device = base.in_features, base.weight.device
        start = torch.randn(rank, width, generator=generator) / width**0.5
        self.a = nn.Parameter(start.to(device))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        return out + self.scaling * nn.functional.linear(nn.functional.linear(x, self.a), self.b)


def add_lora(head: DraftHead, rank: int, alpha: float, seed: int) -> dict[str, LoraLinear]:
    """Freezes a head but for low-rank changes, which it returns by module."""
    generator = torch.Generator().manual_seed(seed)
    head.requires_grad_(False)
    added = {}
    for name in MODULES:
        parent, _, last = name.rpartition(".")
        module = head.midlayer.get_submodule(parent)
        layer = LoraLinear(getattr(module, last), rank, alpha / rank, generator)
        setattr(module, last, layer)
        added[name] = layer
    return added


def merge_lora(head: DraftHead, folder: Path) -> None:
    """Adds what `save_lora` wrote to the weights of its head."""
    weights = {name: head.midlayer.get_submodule(name).weight for name in MODULES}
    changes = read_draft_adapter(folder, {name: w.shape for name, w in weights.items()})
    with torch.no_grad():
        for name, change in changes.items():
            weights[name] += change.to(weights[name].device)


def save_lora(added: dict[str, LoraLinear], alpha: float, folder: Path) -> None:
    """Writes changes in bfloat16, as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, rank = {}, 0
    for name, layer in added.items():
        rank = len(layer.a)
        prefix = f"base_model.model.midlayer.{name}.lora"
        for half, tensor in (("A", layer.a), ("B", layer.b)):
            tensors[f"{prefix}_{half}.weight"] = tensor.detach().to(torch.bfloat16).cpu()
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(name.rpartition(".")[2] for name in added),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    path = folder / "adapter_model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
