"""The set-up that GPU measurements depend on."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "nixl", "llguidance", "fa3-fwd")
_TIMEOUT_S = 20.0


def describe_gpu(commit: str = "") -> dict[str, Any]:
    """Date, commit, device, driver and versions, for a JSON.

    Args:
        commit: Commit of the sources; default: that of the folder's git, empty without git.
    """
    is_cuda = torch.cuda.is_available()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "device": torch.cuda.get_device_name() if is_cuda else platform.machine(),
        "num_devices": torch.cuda.device_count() if is_cuda else 0,
        "driver": _driver() if is_cuda else "",
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _output(*command: str) -> str:
    """First line that a program prints; empty where it cannot be run."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""
