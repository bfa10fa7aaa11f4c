"""The number format of K and V in pages: the one that the settings ask for, if the device supports
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.contract.errors import ConfigError
from weft.contract.layout import FP8, INT8, CacheLayout, PagedPlane, in_8_bits
from weft.engine.base.config import EngineConfig
from weft.engine.executor.routes import route_plane

if TYPE_CHECKING:
    from weft.engine.model.loader import LoadedModel

_CAPABILITY = (8, 9)
"""Least compute capability of GPUs with instructions for FP8."""
_DTYPES = {FP8: torch.uint8, INT8: torch.int8}


def kept_layout(
    config: EngineConfig,
    loaded: LoadedModel,
    device: torch.device,
    layout: CacheLayout | None = None,
) -> CacheLayout:
    """Layout of the model's pages in the configured number format, with routes of experts if the
    settings ask for them. Raises ConfigError if the device lacks the format, or the model has no
    experts.

    Args:
        layout: Of other layers of the model; None: of those of this process.
    """
    layout = loaded.model.kv_layout(config.page_size) if layout is None else layout
    if config.enable_return_routed_experts:
        layout = layout.with_routes(route_plane(loaded.config))
    if config.kv_dtype == "auto":
        return layout
    if device.type == "cuda" and config.kv_dtype == FP8:
        capability = torch.cuda.get_device_capability(device)
        if capability < _CAPABILITY:
            raise ConfigError(
                f"kv_dtype: {FP8} needs compute capability {_CAPABILITY}, {device} has "
                f"{capability}; take {INT8}, or leave it at auto",
                param="kv_dtype",
            )
    return in_8_bits(layout, config.kv_dtype)


def dtype_of(plane: PagedPlane) -> torch.dtype:
    return _DTYPES.get(plane.dtype) or getattr(torch, plane.dtype)
