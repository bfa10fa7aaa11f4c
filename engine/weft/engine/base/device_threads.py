"""Threads that launch kernels."""

from __future__ import annotations

import torch


def use_device(device: torch.device) -> None:
    """Has the calling thread launch its kernels on a device. CUDA has a current device for each
    thread, which at first is GPU 0. Raises RuntimeError if the GPU has failed.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
