"""Model classes by the names of their architectures."""

from __future__ import annotations

from typing import cast

from weft.engine.models.architectures import load_class
from weft.engine.models.interface import CausalLMClass


def model_class(architecture: str) -> CausalLMClass:
    """The class that implements `architectures[0]` of a Hugging Face configuration.

    Raises:
        ModelError: No such architecture, or its module cannot be imported.
    """
    return cast(CausalLMClass, load_class(architecture))
