"""NVIDIA GPUs of this host, found without torch, so that settings can be resolved early."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from functools import cache
from pathlib import Path

from weft.contract.errors import ConfigError

_DRIVER = "libcuda.so.1"
_ADDRESS_BYTES = 32
_CUDA_BUILD = re.compile(r"^cuda\s*(?::[^=]*)?=\s*['\"]", re.MULTILINE)
"""Line of torch/version.py that names the CUDA version. In other builds the value is None."""


@cache
def num_usable_gpus() -> int:
    """Number of GPUs that the driver shows this process (`CUDA_VISIBLE_DEVICES` applies), if the
    installed torch is a CUDA build; 0 without a driver.
    """
    if not torch_has_cuda():
        return 0
    return _count(_driver())


def driver_gpus() -> list[str]:
    """PCI addresses, as 0000:1b:00.0, of the GPUs that the driver shows this process, in CUDA's
    order; empty without a driver.
    """
    driver, found = _driver(), list[str]()
    for index in range(_count(driver)):
        assert driver is not None
        device, text = ctypes.c_int(0), ctypes.create_string_buffer(_ADDRESS_BYTES)
        if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetPCIBusId(
            text, _ADDRESS_BYTES, device
        ):
            return []
        found.append(text.value.decode().lower())
    return found


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


def _count(driver: ctypes.CDLL | None) -> int:
    count = ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def torch_has_cuda() -> bool:
    """Does not import torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return False
    return _CUDA_BUILD.search(text) is not None


def check_device(device: str, num_gpus: int) -> None:
    """Raises ConfigError unless a device is the CPU or one of `num_gpus` GPUs."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ConfigError(f"device: there is no {device!r} here", param="device")
    if int(index or 0) >= num_gpus:
        raise ConfigError(
            f"device: there is no {device!r} here; GPUs that torch can use: {num_gpus}",
            param="device",
        )


def resolve_device(device: str) -> str:
    """Resolves `auto`: the first GPU if one is usable, else the CPU."""
    if device != "auto":
        return device
    return "cuda" if num_usable_gpus() else "cpu"
