"""Folders of adapters for tests that need files and no weights that make sense."""

from __future__ import annotations

import json
import random
from pathlib import Path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(folder: Path, seed: int, rank: int = 2) -> Path:
    """A PEFT folder with one projection of random numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "tiny",
    }
    (folder / CONFIG).write_text(json.dumps(settings))
    rng = random.Random(seed)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    header: dict[str, object] = {}
    data = b""
    for half, shape in (("A", [rank, 4]), ("B", [4, rank])):
        piece = rng.randbytes(2 * shape[0] * shape[1])
        header[name.format(half)] = {
            "dtype": "F16",
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(piece)],
        }
        data += piece
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    (folder / WEIGHTS).write_bytes(len(head).to_bytes(8, "little") + head + data)
    return folder
