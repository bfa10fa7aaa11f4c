"""Tiny models with FP8 weights in the layouts that checkpoints have, and the same in floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from weft.testing.models.quantised_models import copy_of_model

Tensors = dict[str, torch.Tensor]


def compressed(strategy: str, *, is_static: bool = False) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors, as llm-compressor writes it."""
    part: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    rows = {"strategy": "tensor" if is_static else "token", "dynamic": not is_static}
    weights = part | {"strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
        rows["strategy"] = "group"
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*in_proj_(ba|b|a)$", "re:.*(altup|laurel).*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": part | rows,
                "output_activations": None,
            }
        },
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "blocks": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "autofp8": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "modules_to_not_convert": ["lm_head", "mlp.gate"],
    },
    "fbgemm": {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": ["lm_head", "gate"],
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "exclude_modules": ["lm_head", "*.mlp.gate"],
    },
    "channel": compressed("channel"),
    "tensor": compressed("tensor", is_static=True),
    "block": compressed("block"),
}
"""Layouts by name, with their `quantization_config`."""
_BY_BLOCKS = ("blocks", "block")
_BY_TENSORS = ("autofp8", "modelopt", "tensor")


def is_rounded(name: str) -> bool:
    """Whether a tensor is the weight of a product in FP8."""
    ends = (
        "_proj",
        "_proj_with_mqa",
        ".w1",
        ".w2",
        ".w3",
        ".c_fc",
        ".query_key_value",
        ".dense",
        *(".fc1", ".fc2", ".fc_in", ".fc_out", ".dense_h_to_4h", ".dense_4h_to_h", ".c_attn"),
        ".output_gate",
        "per_layer_input_gate",
        "_projection",
        *(".input_linear", ".output_linear"),
        *("_proj_qkvz", "_proj_qkv", "_proj_z"),
    )
    return name.endswith(tuple(f"{end}.weight" for end in ends))


def round_weight(weight: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 [N, K] and scales as a layout has them, written out once more for tests."""
    if layout in _BY_BLOCKS:
        (n, k), pad = weight.shape, [(-size) % 128 for size in weight.shape]
        tiles = (
            F.pad(weight, (0, pad[1], 0, pad[0])).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        )
        scales = tiles.abs().amax(dim=(1, 3)) / 448
        data = (tiles / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:n, :k]
    elif layout in _BY_TENSORS:
        scales = weight.abs().max() / 448
        data = weight / scales
        scales = scales if layout == "modelopt" else scales.view(1)
    else:
        scales = weight.abs().amax(dim=1, keepdim=True) / 448
        data = weight / scales
    return data.to(torch.float8_e4m3fn).contiguous(), scales


def in_floats(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The matrix that numbers and scales are."""
    if scales.dim() == 2 and scales.shape != (data.shape[0], 1):
        scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        scales = scales[: data.shape[0], : data.shape[1]]
    return data.float() * scales


def fp8_copy(
    source: Path, path: Path, layout: str, config: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    """The model in FP8, in a new directory, and in floats beside it.

    Args:
        source: The model in floats.
        path: Directory to create.
        layout: One of `LAYOUTS`.
        config: Its quantization_config; None: the layout's.
    """
    quantised = load_file(source / "model.safetensors")
    floats = dict(quantised)
    suffix = "_scale_inv" if layout == "blocks" else "_scale"
    for name in [name for name in quantised if is_rounded(name) and quantised[name].dim() == 2]:
        data, scales = round_weight(quantised[name], layout)
        quantised[name], quantised[f"{name}{suffix}"] = data, scales
        if layout in _BY_TENSORS:
            quantised[name.removesuffix("weight") + "input_scale"] = torch.full_like(scales, 0.1)
        floats[name] = in_floats(data, scales)
    beside = path.with_name(f"{path.name}-floats")
    fields = {"quantization_config": config or LAYOUTS[layout]}
    return (
        copy_of_model(source, path, quantised, fields),
        copy_of_model(source, beside, floats, {}),
    )
