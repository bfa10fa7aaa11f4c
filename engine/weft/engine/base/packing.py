"""The name of the form in which this process packs weights."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch
from weft import kernels
from weft.kernels.shared.build import cpu_features

_SOURCES = ("*.py", "*.c", "*.h")


@cache
def packing_version(device: torch.device) -> str:
    """Names the code that packs weights, and the machine for which it does. Equal names stand for
    equal bytes of equal numbers.
    """
    code = hashlib.blake2b(digest_size=16)
    model = Path(__file__).parents[1] / "model"
    for root in (*map(Path, kernels.__path__), model):
        for path in sorted(path for kind in _SOURCES for path in root.rglob(kind)):
            code.update(str(path.relative_to(root)).encode() + path.read_bytes())
    machine = hashlib.blake2b(cpu_features().encode(), digest_size=8).hexdigest()
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    return f"{code.hexdigest()}, torch {torch.__version__}, {machine}"
