"""Architecture names to classes, imported when first needed.

Nothing here imports torch before a class is asked for: services read configurations too.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from weft.engine.base.errors import ModelError

ENTRY_POINT_GROUP = "weft.models"
"""Entry-point group in which other distributions register architectures: name = architecture, value
= module:class.
"""

_BUILT_IN = {
    "LlamaForCausalLM": ("weft.engine.model.archs.llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("weft.engine.model.archs.llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("weft.engine.model.archs.qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("weft.engine.model.archs.qwen3", "Qwen3ForCausalLM"),
    "Qwen3MoeForCausalLM": ("weft.engine.model.archs.qwen3_moe", "Qwen3MoeForCausalLM"),
}


HEADLESS, CLASSIFIER, LANGUAGE_MODEL = "Model", "ForSequenceClassification", "ForCausalLM"
"""Ends of the names of a decoder's architectures: without a head, with one that gives classes, and
with an LM head."""
_ENCODERS = {
    f"{stem}{end}": location
    for stem, location in {
        "Bert": ("weft.engine.model.archs.bert", "BertModel"),
        "Roberta": ("weft.engine.model.archs.bert", "BertModel"),
        "XLMRoberta": ("weft.engine.model.archs.bert", "BertModel"),
        "ModernBert": ("weft.engine.model.archs.modern_bert", "ModernBertModel"),
    }.items()
    for end in (HEADLESS, CLASSIFIER, "ForMaskedLM")
}
_LOCATIONS = {**_BUILT_IN, **_ENCODERS}


def language_model_name(architecture: str) -> str:
    """The name of the same decoder with an LM head; one class implements them all."""
    for end in (HEADLESS, CLASSIFIER):
        if architecture.endswith(end):
            name = architecture.removesuffix(end) + LANGUAGE_MODEL
            return name if name in _BUILT_IN else architecture
    return architecture


def supported_architectures() -> tuple[str, ...]:
    """Names that there are classes for, sorted."""
    return tuple(sorted({*_LOCATIONS, *(point.name for point in _entry_points())}))


def check_architecture(architecture: str) -> None:
    """Raises ModelError for an architecture that no class implements; imports none."""
    if language_model_name(architecture) not in supported_architectures():
        raise _unsupported(architecture)


def load_class(architecture: str) -> Any:
    """The class that implements `architectures[0]` of a Hugging Face configuration.

    Raises:
        ModelError: No such architecture, or its module cannot be imported.
    """
    if location := _LOCATIONS.get(language_model_name(architecture)):
        module, name = location
        return getattr(import_module(module), name)
    for point in _entry_points():
        if point.name == architecture:
            return _load(point)
    raise _unsupported(architecture)


def configuration_reader(architecture: str) -> Callable[..., Any] | None:
    """What reads config.json in place of `ModelConfig`: for encoders a function of their own, and
    what the class of another distribution brings; None: nothing does.

    Raises:
        ModelError: No such architecture, or its module cannot be imported.
    """
    if language_model_name(architecture) in _BUILT_IN:
        return None
    if architecture in _ENCODERS:
        return _encoder_reader
    reader: Callable[..., Any] | None = getattr(load_class(architecture), "read_config", None)
    return reader


def _encoder_reader(*arguments: Any) -> Any:
    # Imported here: it needs the class that it makes.
    from weft.engine.checkpoint.encoder_config import read_encoder_config

    return read_encoder_config(*arguments)


def _unsupported(architecture: str) -> ModelError:
    supported = ", ".join(supported_architectures())
    return ModelError(
        f"architectures: {architecture!r} is not supported; supported: {supported}",
        param="architectures",
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
