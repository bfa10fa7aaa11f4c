"""How a model's products are quantised: as its checkpoint says, or as they are made at load.

Pure Python: settings are resolved and digests computed without torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Literal

from weft.engine.base.errors import ConfigError, ModelError
from weft.engine.checkpoint.fields import Fields

AT_LOAD = ("int8",)
"""Formats that can be made at load from weights in floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The number format of a model's products."""

    format: Literal["int8"]
    """Which scheme reads it (`weft.engine.model.weights.schemes`)."""
    source: Literal["checkpoint", "load"]
    """Whether the checkpoint has it, or it is made of floats at load."""
    ignore: tuple[str, ...] = ()
    """Modules whose weights stay in floats: full names, endings after a dot, or `re:` and a regular
    expression that matches the beginning of the name.
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
        chosen = Quantization(format="int8", source="load")
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
    raise fields.error("quantization_config", f"quant_method {method!r} is not supported")


def _refused(problem: str) -> ConfigError:
    return ConfigError(f"quantization: {problem}", param="quantization")


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise ModelError(f"quantization_config: ignore: {pattern!r}: {error}") from error
    return module == pattern or module.endswith(f".{pattern}")
