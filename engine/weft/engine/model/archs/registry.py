"""Model classes by the names of their architectures."""

from __future__ import annotations

from typing import cast

from weft.engine.checkpoint.architectures import load_class
from weft.engine.model.interface import ModelClass


def model_class(architecture: str) -> ModelClass:
    """The class that implements `architectures[0]` of a Hugging Face configuration.

    Raises:
        ModelError: No such architecture, or its module cannot be imported.
    """
    return cast(ModelClass, load_class(architecture))
