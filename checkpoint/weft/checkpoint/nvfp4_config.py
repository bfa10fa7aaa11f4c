"""How a config.json says that products have weights in NVFP4, as ModelOpt and compressed-tensors
write it.
"""

from __future__ import annotations

import fnmatch

from weft.checkpoint.fields import Fields
from weft.checkpoint.fp8_config import compressed_group
from weft.checkpoint.module_names import names_in

_ALGORITHMS, _FORMAT = ("NVFP4", "W4A16_NVFP4"), "nvfp4-pack-quantized"
_MIXED = "MIXED_PRECISION"
_OF_LAYERS = (*_ALGORITHMS, "FP8")
"""What modules of a mixed recipe may have; which one, their tensors show."""
_METHODS = ("modelopt", "modelopt_fp4")
_GROUP = 16


def is_nvfp4(section: Fields, method: str) -> bool:
    """Whether a `quantization_config` is about NVFP4."""
    if method in _METHODS:
        return section.text("quant_algo", "") in (*_ALGORITHMS, _MIXED)
    return method == "compressed-tensors" and section.text("format", "") == _FORMAT


def read_nvfp4(section: Fields, method: str) -> tuple[str, ...] | str:
    """Patterns of modules that stay in floats; a text says what is not supported. A checkpoint's
    tensors decide before these lists do.
    """
    if method in _METHODS:
        group = section.get("group_size")
        if group not in (None, _GROUP):
            return f"group_size {group!r} is not supported ({_GROUP} is)"
        layers = section.section("quantized_layers")
        for name in layers:
            algorithm = layers.section(name).get("quant_algo")
            if algorithm not in _OF_LAYERS:
                known = " and ".join(_OF_LAYERS)
                return f"quantized_layers.{name}: {algorithm!r} is not supported ({known} are)"
        names = (*names_in(section, "exclude_modules"), *names_in(section, "ignore"))
        return tuple(f"re:{fnmatch.translate(name)}" for name in names)
    scheme = compressed_group(section)
    if isinstance(scheme, str):
        return scheme
    weights = scheme.section("weights")
    kind = tuple(weights.get(name) for name in ("num_bits", "type", "symmetric", "group_size"))
    if kind != (4, "float", True, _GROUP):
        return f"weights of {kind} are not supported, only 4 bits, float, symmetric, of {_GROUP}"
    return names_in(section, "ignore")
