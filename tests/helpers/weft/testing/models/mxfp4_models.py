"""gpt-oss checkpoints whose experts are in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from weft.testing.models.tiny_models import save_weights


def as_mxfp4(folder: Path, floats: Path | None = None) -> None:
    """Puts random numbers in MXFP4 in the place of a checkpoint's experts.

    Args:
        folder: The checkpoint's.
        floats: Folder of a copy of the checkpoint that gets the same numbers in floats, or None.
    """
    wide: dict[str, torch.Tensor] = {}
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        scales = torch.randint(119, 123, shape, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        if floats is not None:
            made = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            wide[name] = made.contiguous()
    if floats is not None:
        save_weights(floats, load_file(floats / "model.safetensors") | wide)
    save_weights(folder, tensors)
    fields = json.loads((folder / "config.json").read_text())
    config = json.dumps(fields | {"quantization_config": {"quant_method": "mxfp4"}})
    (folder / "config.json").write_text(config)
