"""Models whose projections are as bitsandbytes writes them, and the same in floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from weft.testing.models.quantised_models import copy_of_model

Kind = Literal["nf4", "nf4 nested", "fp4", "int8"]
CONFIGS: dict[Kind, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 nested": {
        **{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "llm_int8_skip_modules": ["lm_head", "multi_modal_projector"],
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "uint8"},
    "int8": {"load_in_8bit": True, "llm_int8_skip_modules": None},
}
BLOCK, NESTED_BLOCK = 64, 256


def draw_bitsandbytes(
    weight: torch.Tensor, kind: Kind
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors by what follows a projection's name, of about such numbers, and the floats that they
    mean.
    """
    rows, columns = weight.shape
    if kind == "int8":
        numbers = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
        scales = weight.abs().amax(1) * (1 + torch.rand(rows)) / 2
        own = {
            "weight": numbers,
            "SCB": scales,
            "weight_format": torch.zeros((), dtype=torch.uint8),
        }
        return own, (numbers.double() * scales.double()[:, None] / 127).float()
    codes, table = torch.randint(0, 16, (rows * columns,)), torch.rand(16).sort().values * 2 - 1
    blocks = -(-rows * columns // BLOCK)
    largest = weight.abs().max() * (0.5 + torch.rand(blocks))
    state: dict[str, Any] = {"quant_type": kind[:3], "blocksize": BLOCK, "dtype": "bfloat16"}
    state["shape"] = [rows, columns]
    parts: dict[str, torch.Tensor] = {"quant_map": table, "absmax": largest}
    if kind == "nf4 nested":
        indices, of_scales = torch.randint(0, 256, (blocks,)), torch.rand(256) * 2 - 1
        factors = torch.rand(-(-blocks // NESTED_BLOCK)) * weight.abs().max() / 4
        offset = float(weight.abs().max())
        parts |= {"absmax": indices.to(torch.uint8), "nested_absmax": factors}
        parts |= {"nested_quant_map": of_scales}
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_offset": offset}
        largest = of_scales[indices] * factors[torch.arange(blocks) // NESTED_BLOCK] + offset
    values = table[codes] * largest[torch.arange(rows * columns) // BLOCK]
    pairs = codes.view(-1, 2)
    own = {"weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8)}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts[f"quant_state.bitsandbytes__{kind[:3]}"] = text
    return own | {f"weight.{name}": part for name, part in parts.items()}, values.view(weight.shape)


def bitsandbytes_models(
    source: Path, kind: Kind, floats: tuple[str, ...] = ()
) -> tuple[Path, Path]:
    """A copy with numbers of its own, and the same in floats, both beside the model; projections
    named by `floats` are as they were.
    """
    tensors = load_file(source / "model.safetensors")
    packed, wide = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith("_proj.weight") and module not in floats:
            parts, wide[name] = draw_bitsandbytes(weight, kind)
            packed |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    own = {"quantization_config": {"quant_method": "bitsandbytes", **CONFIGS[kind]}}
    first = copy_of_model(source, source.with_name("packed"), packed, own)
    return first, copy_of_model(source, source.with_name("floats"), wide, {})
