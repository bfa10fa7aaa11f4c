"""Whether a device has compute capability 9.0 or above, whose instructions some kernels use."""

from __future__ import annotations

import functools

import torch
import triton
from triton.language.target_info import cuda_capability_geq


@functools.cache
def is_sm90(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.constexpr_function
def on_sm90() -> bool:
    """`is_sm90` of the device that a kernel is compiled for; False in Triton's interpreter."""
    return not triton.knobs.runtime.interpret and cuda_capability_geq(9, 0)
