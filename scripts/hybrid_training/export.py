"""The checkpoint in published forms: Qwen3.5's names, products in int8 as compressed-tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .model import HybridLM
from .texts import tokenizer_config

_FLOATS = ("in_proj_a", "in_proj_b", "mtp.fc")
"""Ends of names of products that stay in floats."""
_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head", "re:.*in_proj_[ab]$", "mtp.fc"],
}


def export(model: HybridLM, tokenizer: Path, folder: Path) -> None:
    """Writes the model's directory, products in int8 with a scale a row, all else in bfloat16."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        tensor = tensor.detach().float().cpu()
        if tensor.dim() != 2 or module.endswith((*_FLOATS, "embed_tokens")):
            tensors[name] = tensor.bfloat16().contiguous()
            continue
        scale = (tensor.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-8)
        tensors[name] = (tensor / scale).round().to(torch.int8).contiguous()
        tensors[f"{module}.weight_scale"] = scale
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    special = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = {**model.shape.config(), **special, "dtype": "bfloat16", "quantization_config": _INT8}
    for name, content in {
        "config.json": config,
        "generation_config.json": {"eos_token_id": 2, "pad_token_id": 0},
        "tokenizer_config.json": tokenizer_config(),
    }.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    shutil.copy(tokenizer, folder / "tokenizer.json")


def load(model: HybridLM, folder: Path) -> None:
    """Reads the weights of a directory that `export` wrote."""
    model.load_state_dict(dequantised(folder))


def dequantised(folder: Path) -> dict[str, Any]:
    """The tensors of a directory that `export` wrote, in float32."""
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_scale"):
            continue
        scale = tensors.get(f"{name.removesuffix('.weight')}.weight_scale")
        found[name] = tensor.float() if scale is None else tensor.float() * scale.float()
    return found
