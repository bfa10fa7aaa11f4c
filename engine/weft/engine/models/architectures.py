"""The architectures that can be served, Weft's own and those of other distributions. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from weft.engine.errors import ModelError

ENTRY_POINT_GROUP = "weft.models"
"""Entry-point group in which other distributions register architectures: name = architecture, value
= module:class.
"""
BUILT_IN = {
    "LlamaForCausalLM": ("weft.engine.models.llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("weft.engine.models.llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("weft.engine.models.qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("weft.engine.models.qwen3", "Qwen3ForCausalLM"),
    "Qwen3MoeForCausalLM": ("weft.engine.models.qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""Module and class by `architectures[0]`."""
ReadConfig = Callable[[Mapping[str, Any], Mapping[str, Any], str], Any]
"""Makes a `ModelConfig` from config.json, generation_config.json and what messages call the source.
"""


def supported_architectures() -> tuple[str, ...]:
    """Names of all architectures that can be served, sorted."""
    return tuple(sorted({*BUILT_IN, *(point.name for point in _entry_points())}))


def foreign_class(architecture: str, where: str = "") -> Any:
    """The class by which another distribution implements an architecture.

    Args:
        architecture: `architectures[0]` of config.json; not one of `BUILT_IN`.
        where: What messages call its directory.

    Raises:
        ModelError: No such architecture, or its module cannot be imported.
    """
    for point in _entry_points():
        if point.name == architecture:
            return _load(point)
    supported = ", ".join(supported_architectures())
    place = f"{where}: " if where else ""
    raise ModelError(
        f"{place}architectures: {architecture!r} is not supported; supported: {supported}",
        param="architectures",
    )


def config_reader(architecture: str, where: str) -> ReadConfig | None:
    """What reads the configuration of an architecture that another distribution brings.

    Args:
        architecture: `architectures[0]` of config.json.
        where: What messages call its directory.

    Returns:
        The class's `read_config`; None: the class has none, or the architecture is Weft's own, and
        `ModelConfig.from_dict` reads it.

    Raises:
        ModelError: No such architecture, or its module cannot be imported.
    """
    if architecture in BUILT_IN:
        return None
    return cast(
        "ReadConfig | None", getattr(foreign_class(architecture, where), "read_config", None)
    )


def _entry_points() -> list[EntryPoint]:
    return list(entry_points(group=ENTRY_POINT_GROUP))


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"architecture {point.name!r}: cannot load {point.value}: {error}"
        ) from error
