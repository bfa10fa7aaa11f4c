"""The name of the form in which this process packs weights."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

import torch
from weft import kernels
from weft.kernels.shared.build import cpu_features

_SOURCES = (".py", ".c", ".h")


@cache
def packing_version(device: torch.device) -> str:
    """Names the code that packs weights, and the machine for which it does. Equal names stand for
    equal bytes of equal numbers.
    """
    code = hashlib.blake2b(digest_size=16)
    model = Path(__file__).parents[1] / "model"
    for root in (*kernels.__path__, str(model)):
        inside = ((folder, name) for folder, _, names in os.walk(root) for name in names)
        for folder, name in sorted(inside):
            if name.endswith(_SOURCES):
                code.update(f"{folder[len(root) :]}/{name}".encode())
                code.update(Path(folder, name).read_bytes())
    machine = hashlib.blake2b(cpu_features().encode(), digest_size=8).hexdigest()
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    return f"{code.hexdigest()}, torch {torch.__version__}, {machine}"
