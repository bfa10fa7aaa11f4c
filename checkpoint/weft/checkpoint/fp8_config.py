"""How a config.json says that products have FP8 weights.

Supported formats are those of checkpoints: DeepSeek's and Qwen3's blocks and AutoFP8's tensors
(`quant_method` fp8), fbgemm_fp8, modelopt, and compressed-tensors.
"""

from __future__ import annotations

import fnmatch
from typing import Literal, NamedTuple

from weft.checkpoint.fields import Fields
from weft.checkpoint.module_names import anywhere, names_in

FP8_METHODS = ("fp8", "fbgemm_fp8", "modelopt")
"""Values of `quant_method` that mean FP8, in addition to compressed-tensors."""
_BLOCK = [128, 128]
_ALL_PRODUCTS = "Linear"
_STATUSES = ("compressed", "frozen")
"""What llm-compressor calls a checkpoint that is written; frozen until 2024."""


class Fp8Config(NamedTuple):
    """The values of an FP8 configuration that `Quantization` keeps."""

    scales: Literal["channels", "blocks", "tensors"]
    scale_name: str
    has_input_scale: bool
    ignore: tuple[str, ...]


def read_fp8(section: Fields, method: str) -> Fp8Config | str:
    """Reads a `quantization_config` of one of `FP8_METHODS`; a text says what is not supported."""
    if method == "modelopt":
        return _read_modelopt(section)
    ignore = tuple(anywhere(name) for name in names_in(section, "modules_to_not_convert"))
    if method == "fbgemm_fp8":
        # `activation_scale_ub` bounds the scales of rows; they need no bound here.
        return Fp8Config("channels", "weight_scale", False, ignore)
    if section.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        return f"fmt {section.get('fmt')!r} is not supported (e4m3 is)"
    if section.get("scale_fmt") not in (None, "float", "ue8m0"):
        return f"scale_fmt {section.get('scale_fmt')!r} is not supported"
    scheme = section.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        return f"activation_scheme {scheme!r} is not supported (dynamic and static are)"
    is_static, block = scheme == "static", section.get("weight_block_size")
    if block is None:
        return Fp8Config("tensors", "weight_scale", is_static, ignore)
    if block != _BLOCK or is_static:
        return f"weight_block_size {block!r} with {scheme} activations is not supported"
    return Fp8Config("blocks", "weight_scale_inv", False, ignore)


def _read_modelopt(section: Fields) -> Fp8Config | str:
    algorithm = section.text("quant_algo", "")
    if algorithm != "FP8":
        return f"quant_algo {algorithm!r} is not supported (FP8 is)"
    names = (*names_in(section, "exclude_modules"), *names_in(section, "ignore"))
    ignore = tuple(f"re:{fnmatch.translate(name)}" for name in names)
    return Fp8Config("tensors", "weight_scale", True, ignore)


def is_fp8(section: Fields) -> bool:
    """Whether a configuration of compressed-tensors is about 8-bit floats."""
    return section.text("format", "") in ("float-quantized", "naive-quantized")


def read_fp8_compressed(section: Fields) -> Fp8Config | str:
    """Reads a `quantization_config` of compressed-tensors for which `is_fp8` holds; a text says
    what is not supported.
    """
    group = compressed_group(section)
    if isinstance(group, str):
        return group
    weights, rows = group.section("weights"), group.section("input_activations")
    for part, name in ((weights, "weights"), (rows, "input_activations")):
        kind = (part.get("num_bits"), part.get("type"), part.get("symmetric"))
        if list(part) and kind != (8, "float", True):
            return f"{name} of {kind} are not supported, only 8 bits, float, symmetric"
    strategy = weights.text("strategy", "")
    scales: dict[str, Literal["channels", "blocks", "tensors"]] = {
        "channel": "channels",
        "tensor": "tensors",
        "block": "blocks",
    }
    if strategy not in scales:
        return f"weights.strategy {strategy!r} is not supported ({', '.join(scales)} are)"
    if strategy == "block" and weights.get("block_structure") not in (_BLOCK, "128x128"):
        return f"weights.block_structure {weights.get('block_structure')!r} is not supported"
    is_static = bool(list(rows)) and rows.get("dynamic") is not True
    if is_static and rows.get("strategy") != "tensor":
        return f"fixed scales of input_activations by {rows.get('strategy')!r} are not supported"
    return Fp8Config(scales[strategy], "weight_scale", is_static, names_in(section, "ignore"))


def compressed_group(section: Fields) -> Fields | str:
    """The single group of a configuration of compressed-tensors; a text says what is not
    supported.
    """
    if section.text("quantization_status", "compressed") not in _STATUSES:
        return f"quantization_status must be {' or '.join(_STATUSES)}"
    if section.get("transform_config"):
        return "transform_config is not supported"
    sparsity = section.section("sparsity_config")
    if list(sparsity) and sparsity.text("format", "") != "dense":
        return f"sparsity_config with format {sparsity.get('format')!r} is not supported"
    groups = section.section("config_groups")
    schemes = [groups.section(name) for name in groups]
    if not schemes or any(not group.equals(schemes[0], but="targets") for group in schemes):
        return f"{len(schemes)} config_groups are not supported, only one, or several of one format"
    for name in targeted_modules(section):
        if name[:1].isupper():
            return f"targets {name!r} is not supported, only Linear and names of modules"
    if schemes[0].get("output_activations"):
        return "output_activations are not supported"
    return schemes[0]


def is_mixed(section: Fields) -> bool:
    """Whether a configuration of compressed-tensors has groups of several formats."""
    if section.text("quant_method", "") != "compressed-tensors":
        return False
    groups = section.section("config_groups")
    schemes = [groups.section(name) for name in groups]
    return any(not group.equals(schemes[0], but="targets") for group in schemes)


def sections_of_groups(section: Fields) -> list[Fields]:
    """A configuration of each group alone, in the group's own format."""
    groups = section.section("config_groups")
    found = []
    for name in groups:
        group = groups.section(name)
        format_of = group.get("format") or _format_of(group.section("weights"))
        found.append(section.replaced(config_groups={name: groups.get(name)}, format=format_of))
    return found


def _format_of(weights: Fields) -> str:
    """The format of a group that does not name its own, by its numbers."""
    kind = weights.get("num_bits"), weights.get("type")
    if kind == (4, "float"):
        return "nvfp4-pack-quantized"
    return "float-quantized" if kind == (8, "float") else "pack-quantized"


def targeted_modules(section: Fields) -> tuple[str, ...]:
    """The modules that a configuration of compressed-tensors quantises; empty: all products."""
    groups = section.section("config_groups")
    found = [name for group in groups for name in names_in(groups.section(group), "targets")]
    return () if _ALL_PRODUCTS in found else tuple(found)
