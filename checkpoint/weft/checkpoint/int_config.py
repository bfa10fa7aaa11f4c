"""How a config.json says that products have weights of 4 or 8 bits, packed into words.

Supported formats are those of AutoGPTQ and GPTQModel (`quant_method` gptq), AutoAWQ (awq),
auto-round with either packing, and compressed-tensors' pack-quantized.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from weft.checkpoint.fields import Fields
from weft.checkpoint.module_names import anywhere, names_in

INT_METHODS = ("gptq", "awq", "auto-round")
"""Values of `quant_method` that mean packed integers, in addition to compressed-tensors."""
_BITS = (4, 8)
_FLOAT_BITS = 16
"""Bits of a module from which on it is in floats."""


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


class Packed(NamedTuple):
    """How modules are packed."""

    packing: IntPacking
    ignore: tuple[str, ...] = ()
    """Patterns of modules that stay in floats. Other modules with a `weight` in the checkpoint are
    in floats too.
    """
    others: tuple[tuple[tuple[str, ...], IntPacking], ...] = ()
    """Patterns of modules that are packed otherwise; the first that matches counts."""


def read_packed(section: Fields, method: str) -> Packed | str:
    """Reads a `quantization_config` of one of `INT_METHODS`; a text says what is not supported."""
    if method == "awq":
        return _read_awq(section)
    if method == "auto-round":
        return _read_auto_round(section)
    return _read_gptq(section)


def _read_gptq(section: Fields) -> Packed | str:
    version = section.text("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        return f"checkpoint_format {version!r} is not supported (gptq and gptq_v2 are)"
    if section.get("lm_head"):
        return "lm_head is not supported: it must be in floats"
    shift = 1 if version == "gptq" else 0
    whole = _packing(section, "gptq", shift)
    if isinstance(whole, str):
        return whole
    ignore, others, dynamic = list[str](), [], section.section("dynamic")
    for name in dynamic:
        pattern = f"re:{name.removeprefix('+:').removeprefix('-:')}"
        names_in(section.replaced(dynamic=[pattern]), "dynamic")  # It must compile.
        if name.startswith("-:"):
            ignore.append(pattern)
            continue
        changed = section.replaced(
            **{key: dynamic.section(name).get(key) for key in dynamic.section(name)}
        )
        own = _packing(changed, "gptq", shift)
        if isinstance(own, str):
            return f"dynamic: {name}: {own}"
        others.append(((pattern,), own.packing))
    return whole._replace(ignore=tuple(ignore), others=tuple(others))


def _read_awq(section: Fields) -> Packed | str:
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
    return found._replace(ignore=tuple(anywhere(str(name)) for name in names))


def _read_auto_round(section: Fields) -> Packed | str:
    packing = section.text("packing_format", "auto_round:auto_gptq")
    kind = packing.removeprefix("auto_round:")
    if kind not in ("auto_gptq", "gptq", "auto_awq", "awq"):
        return f"packing_format {packing!r} is not supported (auto_gptq and auto_awq are)"
    if section.text("data_type", "int") != "int":
        return f"data_type {section.get('data_type')!r} is not supported (int is)"
    layout: Literal["gptq", "awq"] = "awq" if kind.endswith("awq") else "gptq"
    shift = 0 if layout == "awq" else 1
    whole = _packing(section, layout, shift)
    if isinstance(whole, str):
        return whole
    ignore, others, extra = list[str](), [], section.section("extra_config")
    for name in extra:
        own = extra.section(name)
        # A name of a module, or an expression that its name matches from the beginning.
        is_name = re.fullmatch(r"[\w.]+", name) is not None
        pattern = name if is_name else f"re:{name}"
        names_in(section.replaced(extra_config=[pattern]), "extra_config")  # It must compile.
        bits = own.get("bits")
        if isinstance(bits, int) and bits >= _FLOAT_BITS:
            ignore.append(pattern)
            continue
        changed = _packing(section.replaced(**{key: own.get(key) for key in own}), layout, shift)
        if isinstance(changed, str):
            return f"extra_config of {name}: {changed}"
        if changed.packing != whole.packing:
            others.append(((pattern,), changed.packing))
    return whole._replace(ignore=tuple(ignore), others=tuple(others))


def _packing(section: Fields, layout: Literal["gptq", "awq"], shift: int) -> Packed | str:
    bits, group = section.get("bits"), section.get("group_size")
    if bits not in _BITS or (layout == "awq" and bits != 4):
        return f"bits = {bits!r} is not supported, only 4{' and 8' if layout == 'gptq' else ''}"
    if not isinstance(group, int) or isinstance(group, bool) or (group < 1 and group != -1):
        return f"group_size {group!r} is not supported"
    packing = IntPacking(
        layout=layout,
        bits=bits,
        group=max(group, 0),
        zero_shift=shift,
        # AutoGPTQ's and auto-round's default where the field is left out.
        is_symmetric=layout == "gptq" and section.flag("sym", True),
    )
    return Packed(packing)


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
