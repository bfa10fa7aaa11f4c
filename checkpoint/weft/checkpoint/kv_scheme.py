"""How a quantization_config says that KV was meant to be kept in FP8, with fixed scales.

Weft needs no such scales: its pages in FP8 have one for each vector, which loses less by rounding.
The scales of the file are checked and left out.
"""

from __future__ import annotations

from weft.checkpoint.fields import Fields

KV_SCALES = ("k_scale", "v_scale")
"""Tensors of an attention layer, or of its `k_proj` and `v_proj`."""


def read_kv_scheme(section: Fields) -> bool | str:
    """Whether a checkpoint may have `KV_SCALES`; a text says what is not supported."""
    algorithm = section.get("kv_cache_quant_algo")
    if algorithm not in (None, "FP8"):
        return f"kv_cache_quant_algo {algorithm!r} is not supported (FP8 is)"
    # AutoFP8 writes a word, compressed-tensors and ModelOpt write fields.
    if section.get("kv_cache_scheme") in (None, "static"):
        return bool(algorithm or section.get("kv_cache_scheme"))
    scheme = section.section("kv_cache_scheme")
    kind = (scheme.get("num_bits"), scheme.get("type"), scheme.get("strategy") or "tensor")
    if kind != (8, "float", "tensor"):
        return f"kv_cache_scheme of {kind} is not supported, only 8 bits, float, by tensor"
    return True
