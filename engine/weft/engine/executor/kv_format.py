"""The number format of K and V in pages: what the settings ask for, where a device has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.engine.base.config import EngineConfig
from weft.engine.base.errors import ConfigError
from weft.engine.memory.layout import FP8, CacheLayout, PagedPlane, in_fp8

if TYPE_CHECKING:
    from weft.engine.model.loader import LoadedModel

_FP8_CAPABILITY = (8, 9)
"""Compute capability of GPUs with instructions for FP8."""


def kept_layout(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> CacheLayout:
    """How the model's KV lies, in the number format that is asked for; encoders keep none.

    Raises:
        ConfigError: The device or a kernel lacks the format; the message names what.
    """
    layout = loaded.model.kv_layout(config.page_size)
    if config.kv_dtype == "auto" or loaded.config.is_encoder:
        return layout
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _FP8_CAPABILITY:
            raise ConfigError(
                f"kv_dtype: {config.kv_dtype} needs compute capability {_FP8_CAPABILITY}, "
                f"{device} has {capability}; leave it at auto",
                param="kv_dtype",
            )
    return in_fp8(layout)


def dtype_of(plane: PagedPlane) -> torch.dtype:
    """The dtype of a plane's pool: bytes where its vectors are in FP8."""
    dtype: torch.dtype = torch.uint8 if plane.dtype == FP8 else getattr(torch, plane.dtype)
    return dtype
