"""Threads that launch kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def start_device_thread(
    name: str, device: torch.device, run: Callable[[], None]
) -> threading.Thread:
    """Starts a daemon thread that launches kernels on a device. CUDA has a current device for each
    thread, which at first is GPU 0.
    """

    def run_on_device() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        run()

    thread = threading.Thread(target=run_on_device, name=name, daemon=True)
    thread.start()
    return thread
