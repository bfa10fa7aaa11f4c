"""LoRA adapters of draft heads, from the folder `draft` of an adapter: a PEFT folder for the head's
only layer.

A draft adapter changes only projections after K and V, so that all requests share the head's
entries in the pages. It is part of no digest, and it changes only the speed of generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from weft.checkpoint.adapters.files import AdapterFiles, TensorEntry, open_adapter
from weft.checkpoint.adapters.peft_config import PeftConfig
from weft.contract.errors import AdapterError
from weft.engine.model.adapters.adapter import LoraPair
from weft.engine.model.adapters.formats import DTYPES

MODULES = (
    "self_attn.q_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""Modules of the head's layer that may be adapted."""
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")


def read_draft_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Reads a draft adapter's additions to the weights of the head's layer: [out, in] float32, by
    module. Raises AdapterError if the draft adapter cannot be used.

    Args:
        folder: `adapter_config.json` and `adapter_model.safetensors`, as PEFT writes them.
        shapes: [out, in] of the head's weights, by module.
    """
    pairs = read_draft_pairs(folder, shapes)
    changes = {module: pair.b @ pair.a for module, pair in pairs.items()}
    for module, change in changes.items():
        _check_finite(folder, module, change)
    return changes


def read_draft_pairs(
    folder: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int | None = None
) -> dict[str, LoraPair]:
    """As `read_draft_adapter`, but returns the two matrices of each change, scaled, in float32. A
    change of a higher rank than `max_rank` is refused before it is read.
    """
    with open_adapter(folder) as files:
        config = PeftConfig.parse(files.config, folder)
        halves: dict[str, dict[str, torch.Tensor]] = {}
        for name, entry in files.tensors.items():
            found = _NAME.fullmatch(name)
            module = next((m for m in MODULES if found and found["module"].endswith(m)), None)
            if found is None or module is None:
                raise AdapterError(
                    f"draft adapter {folder}: {name} changes none of {', '.join(MODULES)} of the "
                    "head; K and V must stay those of the pages"
                )
            half = found["half"]
            place, size = (1, shapes[module][1]) if half == "A" else (0, shapes[module][0])
            # Checked before any read: the product of two small tensors may have any size.
            if len(entry.shape) != 2 or 0 in entry.shape or entry.shape[place] != size:
                raise AdapterError(
                    f"draft adapter {folder}: {name} is {list(entry.shape)}, but size {place} of "
                    f"lora_{half} is {size} in this head"
                )
            most = min(shapes[module])
            most = most if max_rank is None else min(most, max_rank)
            if entry.shape[1 - place] > most:
                raise AdapterError(
                    f"draft adapter {folder}: {name} has rank {entry.shape[1 - place]}, at most "
                    f"{most} is taken"
                )
            if half in halves.setdefault(module, {}):
                raise AdapterError(f"draft adapter {folder}: {name} is there twice, as {module}")
            halves[module][half] = _tensor(files, name, entry)
        files.check_unchanged()
    return {m: _scaled(folder, m, pair, config) for m, pair in halves.items()}


def _scaled(
    folder: Path, module: str, pair: Mapping[str, torch.Tensor], config: PeftConfig
) -> LoraPair:
    a, b = (pair.get(half) for half in "AB")
    if a is None or b is None or a.shape[0] != b.shape[1]:
        raise AdapterError(f"draft adapter {folder}: A and B of {module} do not fit together")
    b = config.scaling_of([module], a.shape[0]) * b
    for half in (a, b):
        _check_finite(folder, module, half)
    return LoraPair(a, b)


def _check_finite(folder: Path, module: str, values: torch.Tensor) -> None:
    if not values.isfinite().all():
        raise AdapterError(f"draft adapter {folder}: {module} has values that are not finite")


def _tensor(files: AdapterFiles, name: str, entry: TensorEntry) -> torch.Tensor:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise AdapterError(
            f"draft adapter {files.directory}: {name} is {entry.dtype}; only "
            f"{', '.join(DTYPES)} are supported"
        )
    return torch.frombuffer(files.read(entry), dtype=dtype).view(entry.shape).float()
