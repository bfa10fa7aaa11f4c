"""How a model's products are quantised: as its checkpoint says, or as they are made at load.

Pure Python: settings are resolved and digests computed without torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Literal

from weft.engine.base.errors import ConfigError
from weft.engine.checkpoint.fields import Fields

AT_LOAD = ("int8",)
"""Formats that can be made at load from weights in floats."""
_ROUTERS = r"re:.*\.gate$"
"""Which experts a token gets is decided in floats: it is little to read, and much depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The number format of a model's products."""

    format: Literal["int8"]
    """Which scheme reads it (`weft.engine.model.weights.schemes`)."""
    source: Literal["checkpoint", "load"]
    """Whether the checkpoint has it, or it is made of floats at load."""
    ignore: tuple[str, ...] = ()
    """Modules whose weights stay in floats: full names, or `re:` and a regular expression that
    matches the beginning of the name.
    """

    def ignores(self, module: str) -> bool:
        """Whether the weights of a module, by its full name, stay in floats."""
        return any(_matches(pattern, module) for pattern in self.ignore)

    def fingerprint(self) -> bytes:
        """Canonical bytes of what changes hidden states, part of the model's digest."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()


def resolve_quantization(
    asked: str, found: Quantization | None, device: str
) -> Quantization | None:
    """What to load a model with.

    Args:
        asked: auto (what the checkpoint has), or one of `AT_LOAD`.
        found: What the checkpoint has; None: floats.
        device: A torch device such as cpu or cuda:1.

    Returns:
        None: products stay in floats.

    Raises:
        ConfigError: There is no such format, or not for this checkpoint or device.
    """
    if asked not in ("auto", *AT_LOAD):
        raise _refused(f"{asked!r} is none of auto, {', '.join(AT_LOAD)}")
    if asked == "auto":
        chosen = found
    elif found is not None:
        raise _refused(f"the checkpoint is {found.format} already; leave quantization at auto")
    else:
        chosen = Quantization(format="int8", source="load", ignore=(_ROUTERS,))
    if chosen is not None and device.partition(":")[0] != "cpu":
        raise _refused(f"{chosen.format} weights are supported on CPUs only, not on {device}")
    return chosen


def read_quantization(fields: Fields) -> Quantization | None:
    """Reads `quantization_config` of a config.json; None: it has none.

    Raises:
        ModelError: A format that is not supported; the message names the field.
    """
    if not fields.get("quantization_config"):
        return None
    section = fields.section("quantization_config")
    method = section.text("quant_method", "")
    if method != "compressed-tensors":
        raise fields.error(
            "quantization_config",
            f"quant_method {method!r} is not supported (compressed-tensors is)",
        )
    problem = _problem_of_compressed_tensors(section)
    if problem:
        raise fields.error("quantization_config", problem)
    return Quantization(format="int8", source="checkpoint", ignore=_ignored(section))


def _problem_of_compressed_tensors(section: Fields) -> str:
    """What of a configuration of compressed-tensors is not supported; empty: nothing."""
    layout = section.text("format", "")
    if layout != "int-quantized":
        return f"format {layout!r} is not supported (int-quantized is)"
    if section.text("quantization_status", "compressed") != "compressed":
        return "quantization_status must be compressed"
    for name in ("kv_cache_scheme", "transform_config"):
        if section.get(name):
            return f"{name} is not supported"
    if list(section.section("sparsity_config")):
        return "sparsity_config is not supported"
    groups = section.section("config_groups")
    names = list(groups)
    if len(names) != 1:
        return f"{len(names)} config_groups are not supported, only one"
    group = groups.section(names[0])
    if group.get("targets") != ["Linear"]:
        return f"targets {group.get('targets')!r} are not supported, only ['Linear']"
    wanted = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    weights = group.section("weights")
    for name, value in wanted.items():
        if weights.get(name) != value:
            return f"weights.{name} = {weights.get(name)!r} is not supported, only {value!r}"
    if group.get("output_activations"):
        return "output_activations are not supported"
    activations = group.section("input_activations")
    # Rows are kept more exactly than their 8 bits; a fixed scale would be one more tensor a layer.
    if list(activations) and activations.get("dynamic") is not True:
        return "input_activations with fixed scales are not supported, only dynamic ones"
    return ""


def _ignored(section: Fields) -> tuple[str, ...]:
    names = section.get("ignore") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise section.error("ignore", f"expected a list of names, got {names!r}")
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except re.error as error:
                raise section.error("ignore", f"{name!r}: {error}") from error
    return tuple(names)


def _refused(problem: str) -> ConfigError:
    return ConfigError(f"quantization: {problem}", param="quantization")


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern
