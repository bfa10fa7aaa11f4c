"""How a config.json says that products have FP8 weights.

Formats are those that checkpoints have: DeepSeek's and Qwen3's blocks and AutoFP8's tensors
(`quant_method` fp8), fbgemm_fp8, modelopt, and compressed-tensors.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Literal, NamedTuple

from weft.checkpoint.fields import Fields

FP8_METHODS = ("fp8", "fbgemm_fp8", "modelopt")
"""Values of `quant_method` that say FP8, beside compressed-tensors."""
_BLOCK = [128, 128]


class Fp8Config(NamedTuple):
    """The values of an FP8 configuration that `Quantization` keeps."""

    scales: Literal["channels", "blocks", "tensors"]
    scale_name: str
    has_input_scale: bool
    ignore: tuple[str, ...]


def read_fp8(section: Fields, method: str) -> Fp8Config | str:
    """Reads a `quantization_config` of one of `FP8_METHODS`; a text says what is not supported.

    Raises:
        ModelError: A field has a value of another type.
    """
    if method == "modelopt":
        return _read_modelopt(section)
    ignore = tuple(_anywhere(name) for name in _names(section, "modules_to_not_convert"))
    if method == "fbgemm_fp8":
        # `activation_scale_ub` bounds the scales of rows, which need no bound here.
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
    names = (*_names(section, "exclude_modules"), *_names(section, "ignore"))
    ignore = tuple(f"re:{fnmatch.translate(name)}" for name in names)
    return Fp8Config("tensors", "weight_scale", True, ignore)


def is_fp8(section: Fields) -> bool:
    """Whether a configuration of compressed-tensors speaks of floats of 8 bits."""
    return section.text("format", "") in ("float-quantized", "naive-quantized")


def read_fp8_compressed(section: Fields) -> Fp8Config | str:
    """Reads a `quantization_config` of compressed-tensors that `is_fp8`; a text says what is not
    supported.

    Raises:
        ModelError: A field has a value of another type.
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
    return Fp8Config(scales[strategy], "weight_scale", is_static, ignored_modules(section))


def compressed_group(section: Fields) -> Fields | str:
    """The one group of a configuration of compressed-tensors; a text says what is not supported.

    Raises:
        ModelError: A field has a value of another type.
    """
    if section.text("quantization_status", "compressed") != "compressed":
        return "quantization_status must be compressed"
    if section.get("transform_config"):
        return "transform_config is not supported"
    if list(section.section("sparsity_config")):
        return "sparsity_config is not supported"
    groups = section.section("config_groups")
    names = list(groups)
    if len(names) != 1:
        return f"{len(names)} config_groups are not supported, only one"
    group = groups.section(names[0])
    if group.get("targets") != ["Linear"]:
        return f"targets {group.get('targets')!r} are not supported, only ['Linear']"
    if group.get("output_activations"):
        return "output_activations are not supported"
    return group


def ignored_modules(section: Fields) -> tuple[str, ...]:
    """The modules that compressed-tensors leaves in floats.

    Raises:
        ModelError: It is no list of names and regular expressions.
    """
    names = _names(section, "ignore")
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except re.error as error:
                raise section.error("ignore", f"{name!r}: {error}") from error
    return names


def _names(section: Fields, field: str) -> tuple[str, ...]:
    names = section.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise section.error(field, f"expected a list of names, got {names!r}")
    return tuple(names)


def _anywhere(name: str) -> str:
    """A pattern of all modules that have this name, end with it, or lie below such a one."""
    return rf"re:(?:.*\.)?{re.escape(name)}(?:\..*)?$"
