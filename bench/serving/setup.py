"""The set-up that the figures depend on, and other use of the machine meanwhile."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

ROOT = Path(__file__).resolve().parents[2]
FAST_FLAGS = (
    *("avx512_bf16", "amx_bf16", "amx_int8", "amx_tile"),
    *("avx512_vnni", "avx512f", "avx2"),
)
GOAL_FLAGS = ("avx512_bf16", "amx_bf16")
"""CPUs with one of these are held to the goals."""
PACKAGES = ("weft", "torch", "transformers", "grpcio", "nixl")


def describe_setup(dtype: str, num_threads: int) -> dict[str, Any]:
    """Describes everything that the figures depend on."""
    flags = _cpu_field("flags").split()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_field("model name") or platform.processor() or platform.machine(),
        "cpu_flags": [flag for flag in FAST_FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "threads": num_threads,
        "openmp": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "GOMP_"))},
        "dtype": dtype,
        "load_average_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {name: _version(name) for name in PACKAGES},
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def has_goals(setup: dict[str, Any]) -> bool:
    """The CPU is one of those that the goals are set for."""
    return any(flag in setup["cpu_flags"] for flag in GOAL_FLAGS)


def describe_lines(setup: dict[str, Any]) -> list[str]:
    """The set-up for people."""
    versions = ", ".join(f"{name} {version}" for name, version in setup["versions"].items())
    openmp = " ".join(f"{k}={v}" for k, v in setup["openmp"].items()) or "no OMP_* or GOMP_* set"
    flags = " ".join(setup["cpu_flags"]) or "no vector flags known"
    return [
        f"{setup['cpu']}, {setup['cores']} cores ({flags}); {setup['threads']} threads, "
        f"{openmp}; {setup['dtype']}",
        f"{versions}, Python {setup['python']}, {setup['system']}",
        f"commit {setup['commit']}, {setup['date']}, load average before: "
        f"{setup['load_average_before']:.1f}",
    ]


@dataclass(frozen=True, slots=True)
class MachineUse:
    """CPU time since the machine's start."""

    wall_s: float
    busy_s: float
    """Busy seconds of all cores and programs."""
    own_s: float
    """CPU seconds of this process and its descendants."""

    @classmethod
    def now(cls) -> MachineUse:
        """The current values."""
        times = psutil.cpu_times()
        busy_s = sum(getattr(times, name) for name in ("user", "nice", "system"))
        return cls(time.perf_counter(), busy_s, _own_cpu_s())

    def others_since(self, before: MachineUse) -> float:
        """Cores that other programs kept busy, on average."""
        others_s = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return max(0.0, others_s / (self.wall_s - before.wall_s))


def _own_cpu_s() -> float:
    this = psutil.Process()
    times = this.cpu_times()
    total_s: float = times.user + times.system + times.children_user + times.children_system
    for child in this.children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system
        total_s += times.children_user + times.children_system
    return total_s


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    is_changed = git("status", "--porcelain", "--untracked-files=no")
    return commit + (" with changes" if is_changed else "")


def _cpu_field(name: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    found = [line.partition(":")[2].strip() for line in lines if line.split("\t")[0] == name]
    return found[0] if found else ""
