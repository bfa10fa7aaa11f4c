"""How many programs a GPU runs at the same time."""

from __future__ import annotations

import functools

import torch


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 4 for other devices (Triton's interpreter)."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
