"""How a model's products are quantised: as its checkpoint says, or at load.

Pure Python: settings are resolved and digests computed without torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

from weft.checkpoint import bitsandbytes_config
from weft.checkpoint.fields import Fields
from weft.checkpoint.fp8_config import (
    FP8_METHODS,
    Fp8Config,
    compressed_group,
    is_fp8,
    is_mixed,
    read_fp8,
    read_fp8_compressed,
    sections_of_groups,
    targeted_modules,
)
from weft.checkpoint.int_config import (
    INT_METHODS,
    IntPacking,
    read_packed,
    read_packed_compressed,
)
from weft.checkpoint.kv_scheme import read_kv_scheme
from weft.checkpoint.module_names import matches, names_in
from weft.checkpoint.nvfp4_config import is_nvfp4, read_nvfp4
from weft.checkpoint.quantization_files import declared_quantization
from weft.contract.errors import ConfigError

AskedFormat = Literal["auto", "int8", "int4", "fp8"]
"""What settings may ask for: the checkpoint's format, or a format that is made from floats
at load.
"""
AT_LOAD = tuple(name for name in get_args(AskedFormat) if name != "auto")
"""Formats that can be made at load from weights in floats."""
ASKED_HELP = (
    "number format of the products' weights; auto = what the checkpoint has; int8, int4 and "
    "fp8 (for GPUs) = made at load from floats"
)
"""Help text of such a setting."""
GGUF = "gguf"
"""`quant_method` of a directory that was made from a GGUF file."""
ROUTERS = r"re:.*\.gate$"
"""Pattern of routers, which stay in floats: they are small, and results depend strongly on them."""
_OTHER_ROUTERS = (".router", ".router.layer", ".shared_expert_gate")
"""Ends of the names of other families' routers, and of a shared expert's gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    format: Literal["int8", "int4", "fp8", "bitsandbytes", "gguf", "mxfp4", "nvfp4"]
    """Decides which scheme of `weft.engine.model.weights.schemes` reads the weights."""
    source: Literal["checkpoint", "load"]
    """Whether the checkpoint has the format, or it is made from floats at load."""
    ignore: tuple[str, ...] = ()
    """Modules whose weights are in floats (`module_names.matches`). For a checkpoint that has a
    module's tensors, the tensors decide instead.
    """

    targets: tuple[str, ...] = ()
    """Modules whose weights are quantised, likewise; empty: all that are not ignored."""
    scales: Literal["channels", "blocks", "tensors"] = "channels"
    """Unit with one scale: a row, a block of 128 rows and columns, or a projection."""
    scale_name: str = "weight_scale"
    """Name of a projection's scales in the checkpoint."""
    has_input_scale: bool = False
    """Whether each projection also has an `input_scale`. It is not used: rows get scales of their
    own, which lose less by rounding.
    """

    has_kv_scales: bool = False
    """Whether attention layers may have `KV_SCALES`, which change nothing."""

    packing: IntPacking | None = None
    """How the checkpoint packs integers into words; None: it does not."""
    others: tuple[tuple[tuple[str, ...], Quantization], ...] = ()
    """Modules whose weights have another format, by patterns; the first that matches counts."""

    @property
    def file_format(self) -> str:
        """The checkpoint's format, in words."""
        if self.source == "load":
            return "floats"
        if self.others:
            own = replace(self, others=())
            formats = (own.file_format, *(other.file_format for _, other in self.others))
            return " + ".join(dict.fromkeys(formats))
        if self.packing is not None:
            return f"{self.packing.layout} {self.format}"
        return f"fp8 {self.scales}" if self.format == "fp8" else self.format

    def of(self, module: str) -> Quantization:
        """The format of a module, by its full name."""
        for patterns, other in self.others:
            if any(matches(pattern, module) for pattern in patterns):
                return other
        return self

    def ignores(self, module: str) -> bool:
        """Whether the weights of a module, by its full name, stay in floats."""
        if self.source == "load" and module.endswith(_OTHER_ROUTERS):
            return True
        if self.targets and not any(matches(pattern, module) for pattern in self.targets):
            return True
        return any(matches(pattern, module) for pattern in self.ignore)

    def fingerprint(self) -> bytes:
        """Canonical bytes of what changes hidden states, part of the model's digest."""
        values = asdict(self)
        del values["has_kv_scales"], values["targets"]
        if self.packing is None:
            del values["packing"]
        if not self.others:
            del values["others"]
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def resolve_quantization(
    asked: str, found: Quantization | None, device: str = ""
) -> Quantization | None:
    """The quantisation to load a model with; None: products stay in floats.

    Args:
        asked: auto (the checkpoint's format), or one of `AT_LOAD`.
        found: The checkpoint's format; None: floats.
        device: A torch device on which products are computed; empty: any.

    Raises:
        ConfigError: The format does not exist, or not for this checkpoint.
    """
    if asked not in ("auto", *AT_LOAD):
        raise _refused(f"{asked!r} is none of auto, {', '.join(AT_LOAD)}")
    if asked == "auto":
        chosen = found
    elif found is not None:
        raise _refused(f"the checkpoint is {found.format} already; leave quantization at auto")
    elif asked == "fp8" and device.partition(":")[0] == "cpu":
        raise _refused("CPUs do not multiply fp8, it would become floats again; give int8 or int4")
    else:
        chosen = Quantization(format=asked, source="load", ignore=(ROUTERS,))  # type: ignore[arg-type]
    return chosen


def read_quantization(fields: Fields) -> Quantization | None:
    """Reads how a config.json says that weights are quantised; None: it says nothing."""
    if (section := declared_quantization(fields)) is None:
        return None
    has_kv_scales = read_kv_scheme(section)
    if isinstance(has_kv_scales, str):
        raise fields.error("quantization_config", has_kv_scales)
    if is_mixed(section):
        return replace(_read_mixed(fields, section), has_kv_scales=has_kv_scales)
    targets = targeted_modules(section) if "config_groups" in section else ()
    return replace(_read(fields, section), has_kv_scales=has_kv_scales, targets=targets)


def _read_mixed(fields: Fields, section: Fields) -> Quantization:
    """Groups of several formats, as compressed-tensors writes them. The first group that names
    `Linear` holds for all other modules.
    """
    found = [(one, _read(fields, one)) for one in sections_of_groups(section)]
    whole = next((own for one, own in found if not targeted_modules(one)), None)
    named = tuple((targeted_modules(one), own) for one, own in found if own is not whole)
    if whole is not None:
        return replace(whole, others=named)
    targets = tuple(name for patterns, _ in named for name in patterns)
    return replace(named[0][1], targets=targets, others=named[1:])


def _read(fields: Fields, section: Fields) -> Quantization:
    method = section.text("quant_method", "")
    if method == "mxfp4":
        # Only experts can be quantised so; other listed modules are in floats.
        return Quantization(format="mxfp4", source="checkpoint")
    if method == bitsandbytes_config.METHOD:
        floats = bitsandbytes_config.read_bitsandbytes(section)
        if isinstance(floats, str):
            raise fields.error("quantization_config", floats)
        return Quantization(format="bitsandbytes", source="checkpoint", ignore=floats)
    if is_nvfp4(section, method):
        ignore = read_nvfp4(section, method)
        if isinstance(ignore, str):
            raise fields.error("quantization_config", ignore)
        return Quantization(format="nvfp4", source="checkpoint", ignore=(*ignore, ROUTERS))
    if method in FP8_METHODS:
        found = read_fp8(section, method)
    elif method == "compressed-tensors" and is_fp8(section):
        found = read_fp8_compressed(section)
    elif method in INT_METHODS:
        packed = read_packed(section, method)
        if not isinstance(packed, str):
            own = tuple((patterns, _packed(other, ())) for patterns, other in packed.others)
            return replace(_packed(packed.packing, packed.ignore), others=own)
        found = packed
    elif method == GGUF:
        return Quantization(format="gguf", source="checkpoint")
    elif method == "compressed-tensors" and section.text("format", "") == "pack-quantized":
        packing = _compressed_packing(section)
        if not isinstance(packing, str):
            return _packed(packing, names_in(section, "ignore"))
        found = packing
    elif method == "compressed-tensors":
        found = _problem_of_compressed_tensors(section)
    else:
        others = ("compressed-tensors", "mxfp4", bitsandbytes_config.METHOD)
        known = ", ".join((*others, *FP8_METHODS, *INT_METHODS))
        found = f"quant_method {method!r} is not supported ({known} are)"
    if isinstance(found, str) and found:
        raise fields.error("quantization_config", found)
    if isinstance(found, Fp8Config):
        scales, name, has_input, ignored = found
        return Quantization(
            format="fp8",
            source="checkpoint",
            ignore=(*ignored, ROUTERS),
            scales=scales,
            scale_name=name,
            has_input_scale=has_input,
        )
    return Quantization(format="int8", source="checkpoint", ignore=names_in(section, "ignore"))


def _packed(packing: IntPacking, ignore: tuple[str, ...]) -> Quantization:
    name: Literal["int4", "int8"] = "int4" if packing.bits == 4 else "int8"
    return Quantization(format=name, source="checkpoint", ignore=ignore, packing=packing)


def _compressed_packing(section: Fields) -> IntPacking | str:
    group = _dynamic_group(section)
    if isinstance(group, str):
        return group
    return read_packed_compressed(group.section("weights"))


def _problem_of_compressed_tensors(section: Fields) -> str:
    layout = section.text("format", "")
    if layout != "int-quantized":
        return f"format {layout!r} is not supported (int-quantized and pack-quantized are)"
    group = _dynamic_group(section)
    if isinstance(group, str):
        return group
    wanted = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    weights = group.section("weights")
    for name, value in wanted.items():
        if weights.get(name) != value:
            return f"weights.{name} = {weights.get(name)!r} is not supported, only {value!r}"
    return ""


def _dynamic_group(section: Fields) -> Fields | str:
    group = compressed_group(section)
    if isinstance(group, str):
        return group
    activations = group.section("input_activations")
    # Rows are kept more exactly than in 8 bits; a fixed scale would be one more tensor for each
    # layer.
    if list(activations) and activations.get("dynamic") is not True:
        return "input_activations with fixed scales are not supported, only dynamic ones"
    return group


def _refused(problem: str) -> ConfigError:
    return ConfigError(f"quantization: {problem}", param="quantization")
