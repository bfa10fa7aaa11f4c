"""Models whose projections are in NVFP4, in both layouts of checkpoints, and the same in floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from weft.testing.models.quantised_models import copy_of_model

Layout = Literal["modelopt", "compressed-tensors"]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CONFIGS: dict[Layout, dict[str, Any]] = {
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "ignore": ["lm_head"],
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": 16,
                    "symmetric": True,
                },
                "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local"},
            }
        },
    },
}


def draw_nvfp4(
    weight: torch.Tensor, layout: Layout
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors below the name of a projection of about such numbers, and the floats they mean."""
    rows, columns = weight.shape
    codes = torch.randint(0, 16, (rows, columns))
    scales = (torch.rand(rows, columns // 16) * 60 + 4).to(torch.float8_e4m3fn)
    factor = weight.std() / 200 * (1 + torch.rand(()))
    signed = torch.tensor(E2M1 + tuple(-one for one in E2M1), dtype=torch.float64)[codes]
    floats = signed * scales.double().repeat_interleave(16, 1) * factor.double()
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    if layout == "modelopt":
        own = {"weight": packed, "weight_scale_2": factor, "input_scale": torch.tensor(0.1)}
    else:
        divisor = (1 / factor).view(1)
        own = {"weight_packed": packed, "weight_global_scale": divisor}
        own["input_global_scale"] = torch.tensor([300.0])
    return own | {"weight_scale": scales}, floats.float()


def nvfp4_models(source: Path, layout: Layout, floats: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """A copy in NVFP4 with numbers of its own, and the same in floats, both beside the model;
    projections named by `floats` are as they were.
    """
    tensors = load_file(source / "model.safetensors")
    packed, wide = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith("_proj.weight") and module not in floats:
            parts, wide[name] = draw_nvfp4(weight, layout)
            del packed[name]
            packed |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    own = {"quantization_config": CONFIGS[layout]}
    first = copy_of_model(source, source.with_name("packed"), packed, own)
    return first, copy_of_model(source, source.with_name("floats"), wide, {})
