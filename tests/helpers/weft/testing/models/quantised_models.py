"""Tiny models with quantised weights, in compressed-tensors' layout, and the same in floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from weft.testing.models.tiny_models import save_weights

CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
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
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
            "output_activations": None,
        }
    },
}
"""`quantization_config` of W8A8 as llm-compressor writes it."""


def is_rounded(name: str, *, at_load: bool) -> bool:
    """Whether a tensor is the weight of a product in int8.

    At load that includes the LM head, in these checkpoints the routers of experts instead.
    """
    others = "lm_head.weight" if at_load else "mlp.gate.weight"
    return name.endswith(("_proj.weight", others))


def round_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [N, K] and scales [N, 1], written out once more for tests."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return torch.round(weight / scales).to(torch.int8), scales


def dequantised_copy(source: Path, path: Path, *, at_load: bool = True) -> Path:
    """The model with its products' weights rounded to int8, in floats; see `is_rounded`."""
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if is_rounded(name, at_load=at_load):
            data, scales = round_rows(tensor)
            tensors[name] = data.float() * scales
    return copy_of_model(source, path, tensors, {})


def quantised_copy(
    source: Path, path: Path, config: dict[str, Any] | None = None, floats: tuple[str, ...] = ()
) -> Path:
    """The model as compressed-tensors keeps it in int8.

    Args:
        source: The model in floats.
        path: Directory to create.
        config: Its quantization_config; None: `CHANNELS`.
        floats: Modules that stay in floats.
    """
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if is_rounded(name, at_load=False)]:
        if name.removesuffix(".weight") not in floats:
            tensors[name], scales = round_rows(tensors[name])
            tensors[f"{name}_scale"] = scales
    return copy_of_model(source, path, tensors, {"quantization_config": config or CHANNELS})


def copy_of_model(
    source: Path, path: Path, tensors: dict[str, torch.Tensor], fields: dict[str, Any]
) -> Path:
    """The model with other tensors, and more fields in its config.json."""
    path.mkdir()
    config = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            (path / name).write_bytes((source / name).read_bytes())
    save_weights(path, {name: tensor.contiguous() for name, tensor in tensors.items()})
    return path
