"""How a config.json says that products have weights of 4 or 8 bits, packed into words.

Supported formats are those of AutoGPTQ and GPTQModel (`quant_method` gptq), AutoAWQ (awq),
auto-round with either packing, and compressed-tensors' pack-quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.checkpoint.fields import Fields
from weft.checkpoint.module_names import anywhere

INT_METHODS = ("gptq", "awq", "auto-round")
"""Values of `quant_method` that mean packed integers, in addition to compressed-tensors."""
_BITS = (4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntPacking:
    """Where a checkpoint keeps integers, and which numbers they mean."""

    layout: Literal["gptq", "awq", "compressed-tensors"]
    """Decides names and order of the tensors (`weft.engine.model.weights.schemes.int_layouts`)."""
    bits: int
    """Bits of a number: 4 or 8."""
    group: int
    """Columns that share a scale; 0: all columns of a row."""
    zero_shift: int = 0
    """Added to the file's zero points: 1 in GPTQ's first version, else 0."""
    is_symmetric: bool = False
    """Whether all zero points are the middle. compressed-tensors omits them then. GPTQ keeps them,
    and they tell which version wrote the file.
    """

    @property
    def packed_name(self) -> str:
        """Name of a module's packed numbers in the checkpoint."""
        return "weight_packed" if self.layout == "compressed-tensors" else "qweight"


def read_packed(section: Fields, method: str) -> tuple[IntPacking, tuple[str, ...]] | str:
    """Reads a `quantization_config` of one of `INT_METHODS`. Returns the packing, and patterns of
    modules that stay in floats, or a text that says what is not supported. Other modules with a
    `weight` in the checkpoint are in floats too.
    """
    if method == "awq":
        return _read_awq(section)
    if method == "auto-round":
        return _read_auto_round(section)
    return _read_gptq(section)


def _read_gptq(section: Fields) -> tuple[IntPacking, tuple[str, ...]] | str:
    version = section.text("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        return f"checkpoint_format {version!r} is not supported (gptq and gptq_v2 are)"
    if section.get("dynamic"):
        return "dynamic is not supported: all modules must have the same bits and groups"
    if section.get("lm_head"):
        return "lm_head is not supported: it must be in floats"
    return _packing(section, "gptq", 1 if version == "gptq" else 0)


def _read_awq(section: Fields) -> tuple[IntPacking, tuple[str, ...]] | str:
    version = section.text("version", "gemm").lower()
    if version != "gemm":
        return f"version {version!r} is not supported (gemm is)"
    if not section.flag("zero_point", True):
        return "zero_point = false is not supported"
    if section.get("bits") != 4:
        return f"bits = {section.get('bits')!r} is not supported, only 4"
    found = _packing(section, "awq", 0)
    names = section.get("modules_to_not_convert") or []
    if isinstance(found, str) or not isinstance(names, list):
        return found if isinstance(found, str) else "modules_to_not_convert is no list"
    # AutoAWQ's own rule is that a name contains one of these, and yet it writes "gate" beside a
    # quantised gate_proj. So whole parts of names count, as in transformers.
    return found[0], tuple(anywhere(str(name)) for name in names)


def _read_auto_round(section: Fields) -> tuple[IntPacking, tuple[str, ...]] | str:
    packing = section.text("packing_format", "auto_round:auto_gptq")
    kind = packing.removeprefix("auto_round:")
    if kind not in ("auto_gptq", "gptq", "auto_awq", "awq"):
        return f"packing_format {packing!r} is not supported (auto_gptq and auto_awq are)"
    if section.text("data_type", "int") != "int":
        return f"data_type {section.get('data_type')!r} is not supported (int is)"
    for name, own in (section.get("extra_config") or {}).items():
        # Modules in floats have a `weight` of their own.
        if not isinstance(own, dict) or own.get("bits", 0) < 16:
            return f"extra_config of {name} is not supported: all must have the same bits"
    if kind.endswith("awq"):
        return _packing(section, "awq", 0)
    return _packing(section, "gptq", 1)


def _packing(
    section: Fields, layout: Literal["gptq", "awq"], shift: int
) -> tuple[IntPacking, tuple[str, ...]] | str:
    bits, group = section.get("bits"), section.get("group_size")
    if bits not in _BITS or (layout == "awq" and bits != 4):
        return f"bits = {bits!r} is not supported, only 4{' and 8' if layout == 'gptq' else ''}"
    if not isinstance(group, int) or isinstance(group, bool) or (group < 1 and group != -1):
        return f"group_size {group!r} is not supported"
    return IntPacking(
        layout=layout,
        bits=bits,
        group=max(group, 0),
        zero_shift=shift,
        # AutoGPTQ's and auto-round's default where the field is left out.
        is_symmetric=layout == "gptq" and section.flag("sym", True),
    ), ()


def read_packed_compressed(weights: Fields) -> IntPacking | str:
    """Reads the `weights` of compressed-tensors' pack-quantized; a text says what is not
    supported.
    """
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if bits not in _BITS or weights.get("type") != "int":
        return f"weights of {bits!r} bits, {weights.get('type')!r}, are not supported"
    if strategy not in ("group", "channel"):
        return f"weights.strategy = {strategy!r} is not supported, only 'group' and 'channel'"
    group = weights.positive("group_size") if strategy == "group" else 0
    return IntPacking(
        layout="compressed-tensors",
        bits=bits,
        group=group,
        is_symmetric=weights.flag("symmetric", True),
    )
