"""Tiny models whose projections are packed integers, in each layout, and the same in floats.

Codes, scales and zero points are drawn; the packed tensors and the floats are both made of them,
each by the format's definition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from weft.testing.models.quantised_models import copy_of_model

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_attention_heads": 4,
    "moe_intermediate_size": 64,
}
"""Of models whose projections have whole words and groups; for `make_tiny`."""


_PROJECTION = re.compile(r"(_proj|_proj_with_mqa|\.w[123])\.weight$")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A projection: weight = scale * (code - zero), by the group of each column."""

    codes: torch.Tensor
    """[N, K] int64 from 0 on."""
    scales: torch.Tensor
    """[N, groups] float16."""
    zeros: torch.Tensor
    """[N, groups] int64."""
    order: torch.Tensor
    """[K]: group of each column."""
    bits: int

    def floats(self) -> torch.Tensor:
        """[N, K] float32, number by number."""
        wide = self.codes.double() - self.zeros.double()[:, self.order]
        return (wide * self.scales.double()[:, self.order]).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a checkpoint keeps such projections."""

    config: dict[str, Any]
    """Its `quantization_config`."""
    write: Callable[[Drawn, bool], dict[str, torch.Tensor]]
    """Tensors below the projection's name; the flag: groups are not neighbours."""
    group: int = 32
    bits: int = 4
    is_symmetric: bool = False
    has_order: bool = False
    shares_order: bool = True
    """Whether projections of the same input have the same order, as GPTQ writes them."""


def draw_projection(weight: torch.Tensor, layout: Layout) -> Drawn:
    """Numbers about as large as those of `weight`."""
    (rows, columns), bits = weight.shape, layout.bits
    group = layout.group or columns
    groups = -(-columns // group)
    middle = 1 << (bits - 1)
    codes = torch.randint(0, 2 * middle, (rows, columns))
    scales = (torch.rand(rows, groups) + 0.5) * weight.std() / middle * 1.7
    drawn = torch.randint(1, 2 * middle, (rows, groups))
    zeros = torch.full_like(drawn, middle) if layout.is_symmetric else drawn
    order = torch.arange(columns) // group
    if layout.has_order:
        order = order[torch.randperm(columns)]
    # Small enough that offsets do not drown everything else.
    zeros = (zeros + 3 * middle) // 4 if not layout.is_symmetric else zeros
    return Drawn(codes, scales.half(), zeros, order, bits)


def packed_models(
    source: Path,
    path: Path,
    layout: Layout,
    floats: tuple[str, ...] = (),
    others: Mapping[str, Layout] | None = None,
) -> tuple[Path, Path]:
    """A model with packed projections, and the same in floats.

    Args:
        source: The model that has the other tensors.
        path: Beside which both are made.
        layout: Of the projections.
        floats: Projections that stay as they are.
        others: Layouts of projections that an expression finds.
    """
    tensors = load_file(source / "model.safetensors")
    packed, wide = dict(tensors), dict(tensors)
    orders = dict[str, torch.Tensor]()
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if _PROJECTION.search(name) and module not in floats:
            of = (own for found, own in (others or {}).items() if re.search(found, module))
            own_layout = next(of, layout)
            drawn = draw_projection(weight, own_layout)
            if own_layout.shares_order:
                source_of = re.sub(r"\.([qkv]|gate|up)_proj$", "", module)
                drawn = replace(drawn, order=orders.setdefault(source_of, drawn.order))
            del packed[name]
            parts = own_layout.write(drawn, own_layout.has_order)
            packed |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
            wide[name] = drawn.floats()
    own = {"quantization_config": layout.config}
    return (
        copy_of_model(source, path.with_name(f"{path.name}-packed"), packed, own),
        copy_of_model(source, path.with_name(f"{path.name}-floats"), wide, {}),
    )


def words(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Packs the last axis: [.., n] -> [.., n * bits / 32] int32, the first lowest."""
    per = 32 // bits
    out = torch.zeros(*values.shape[:-1], values.shape[-1] // per, dtype=torch.int64)
    for place, index in enumerate(order or range(per)):
        out |= values[..., index::per] << (bits * place)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def gptq(version: int) -> Callable[[Drawn, bool], dict[str, torch.Tensor]]:
    """AutoGPTQ's tensors; the first version keeps zero points less 1."""

    def write(drawn: Drawn, has_order: bool) -> dict[str, torch.Tensor]:
        kept = (drawn.zeros - 1) % (1 << drawn.bits) if version == 1 else drawn.zeros
        return {
            "qweight": words(drawn.codes, drawn.bits).T,
            "qzeros": words(kept.T, drawn.bits),
            "scales": drawn.scales.T,
            "g_idx": drawn.order.to(torch.int32),
            "bias": torch.zeros(len(drawn.codes), dtype=torch.float16),
        }

    return write


def awq(drawn: Drawn, has_order: bool) -> dict[str, torch.Tensor]:
    """AutoAWQ's tensors."""
    return {
        "qweight": words(drawn.codes.T, 4, AWQ_ORDER),
        "qzeros": words(drawn.zeros.T, 4, AWQ_ORDER),
        "scales": drawn.scales.T,
    }


def compressed(drawn: Drawn, has_order: bool) -> dict[str, torch.Tensor]:
    """compressed-tensors' pack-quantized, with zero points."""
    return compressed_symmetric(drawn, has_order) | {
        "weight_zero_point": words(drawn.zeros.T, drawn.bits).T
    }


def compressed_symmetric(drawn: Drawn, has_order: bool) -> dict[str, torch.Tensor]:
    """compressed-tensors' pack-quantized."""
    order = {"weight_g_idx": drawn.order.to(torch.int32)} if has_order else {}
    return order | {
        "weight_packed": words(drawn.codes, drawn.bits),
        "weight_scale": drawn.scales,
        "weight_shape": torch.tensor(drawn.codes.shape),
    }


def compressed_config(**weights: Any) -> dict[str, Any]:
    """`quantization_config` of pack-quantized."""
    common = {"num_bits": 4, "type": "int", "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": common | weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def _gptq_config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False} | fields


LAYOUTS = {
    "gptq": Layout(config=_gptq_config(), write=gptq(1)),
    "gptq symmetric": Layout(config=_gptq_config(sym=True), write=gptq(1), is_symmetric=True),
    "gptq act order": Layout(
        config=_gptq_config(desc_act=True), write=gptq(1), is_symmetric=True, has_order=True
    ),
    "gptq v2": Layout(
        config=_gptq_config(checkpoint_format="gptq_v2", group_size=64), write=gptq(2), group=64
    ),
    "gptq 8 bits": Layout(config=_gptq_config(bits=8), write=gptq(1), bits=8),
    "gptq a scale a row": Layout(config=_gptq_config(group_size=-1), write=gptq(1), group=0),
    "awq": Layout(
        config={
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": None,
        },
        write=awq,
        group=128,
    ),
    "auto-round gptq": Layout(
        config={
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
        },
        write=gptq(1),
        is_symmetric=True,
    ),
    "auto-round awq": Layout(
        config={
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 32,
            "sym": False,
            "packing_format": "auto_round:auto_awq",
        },
        write=awq,
    ),
    "compressed-tensors": Layout(
        config=compressed_config(strategy="group", group_size=32, symmetric=True),
        write=compressed_symmetric,
        is_symmetric=True,
    ),
    "compressed-tensors with zeros": Layout(
        config=compressed_config(strategy="group", group_size=128, symmetric=False),
        write=compressed,
        group=128,
    ),
    "compressed-tensors, a scale a row": Layout(
        config=compressed_config(strategy="channel", symmetric=True),
        write=compressed_symmetric,
        group=0,
        is_symmetric=True,
    ),
    "compressed-tensors act order": Layout(
        config=compressed_config(strategy="group", group_size=32, symmetric=True, actorder="group"),
        write=compressed_symmetric,
        is_symmetric=True,
        has_order=True,
    ),
}
"""Layouts by what they are called in tests."""
