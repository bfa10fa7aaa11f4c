"""Model classes by the names of their architectures."""

from __future__ import annotations

from typing import cast

from weft.checkpoint.architectures import load_class
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.encoder_config import EncoderConfig
from weft.engine.model.archs.bidirectional import BidirectionalDecoder
from weft.engine.model.interface import ModelClass


def class_of(config: ModelConfig) -> ModelClass:
    """The class that implements a configuration. Raises ModelError as `model_class`."""
    if config.is_encoder and not isinstance(config, EncoderConfig):
        return BidirectionalDecoder
    return model_class(config.architecture)


def model_class(architecture: str) -> ModelClass:
    """The class that implements `architectures[0]` of a Hugging Face configuration.

    Raises:
        ModelError: No such architecture, or its module cannot be imported.
    """
    return cast(ModelClass, load_class(architecture))
