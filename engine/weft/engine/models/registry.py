"""Architecture names to model classes, imported when first needed."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from weft.engine.errors import ModelError
from weft.engine.models.interface import CausalLMClass

ENTRY_POINT_GROUP = "weft.models"
"""Entry-point group in which other distributions register architectures: name = architecture, value
= module:class.
"""

_BUILT_IN = {
    "LlamaForCausalLM": ("weft.engine.models.llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("weft.engine.models.llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("weft.engine.models.qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("weft.engine.models.qwen3", "Qwen3ForCausalLM"),
    "Qwen3MoeForCausalLM": ("weft.engine.models.qwen3_moe", "Qwen3MoeForCausalLM"),
}


def supported_architectures() -> tuple[str, ...]:
    """Names that `model_class` knows, sorted."""
    return tuple(sorted({*_BUILT_IN, *(point.name for point in _entry_points())}))


def model_class(architecture: str) -> CausalLMClass:
    """The class that implements `architectures[0]` of a Hugging Face configuration.

    Raises:
        ModelError: No such architecture, or its module cannot be imported.
    """
    if location := _BUILT_IN.get(architecture):
        module, name = location
        return cast(CausalLMClass, getattr(import_module(module), name))
    for point in _entry_points():
        if point.name == architecture:
            return _load(point)
    supported = ", ".join(supported_architectures())
    raise ModelError(
        f"architectures: {architecture!r} is not supported; supported: {supported}",
        param="architectures",
    )


def _entry_points() -> list[EntryPoint]:
    return list(entry_points(group=ENTRY_POINT_GROUP))


def _load(point: EntryPoint) -> CausalLMClass:
    try:
        return cast(CausalLMClass, point.load())
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"architecture {point.name!r}: cannot load {point.value}: {error}"
        ) from error
