"""Architecture names to model classes, imported when first needed."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from weft.engine.models.architectures import BUILT_IN, foreign_class
from weft.engine.models.interface import CausalLMClass


def model_class(architecture: str) -> CausalLMClass:
    """The class that implements `architectures[0]` of a Hugging Face configuration.

    Raises:
        ModelError: No such architecture, or its module cannot be imported.
    """
    if location := BUILT_IN.get(architecture):
        module, name = location
        return cast(CausalLMClass, getattr(import_module(module), name))
    return cast(CausalLMClass, foreign_class(architecture))
