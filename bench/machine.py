"""What figures depend on: machine, versions, commit, and other use of the machine meanwhile."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[1]
FAST_FLAGS = (
    *("avx512_bf16", "amx_bf16", "amx_int8", "amx_tile"),
    *("avx512_vnni", "avx512f", "avx2"),
)
GOAL_FLAGS = ("avx512_bf16", "amx_bf16")
"""CPUs with one of these are held to the goals."""
PACKAGES = (
    *("weft", "torch", "triton", "transformers", "numpy", "grpcio", "nixl", "llguidance"),
    "fa3-fwd",
)
_TIMEOUT_S = 20.0


def describe_machine(commit: str = "") -> dict[str, Any]:
    """Everything that figures depend on.

    Args:
        commit: Of the sources; empty: git is asked.
    """
    flags = _cpu_field("flags").split()
    torch = sys.modules.get("torch")
    cards = _lines("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or commit_of(ROOT),
        "cpu": _cpu_field("model name") or platform.processor() or platform.machine(),
        "cpu_flags": [flag for flag in FAST_FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "cards": cards,
        "threads": None if torch is None else torch.get_num_threads(),
        "openmp": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "GOMP_"))},
        "load_average_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version()} | _versions(),
    }


def one_line(machine: dict[str, Any]) -> str:
    """The machine in words, for below a table."""
    cards = ", ".join(machine["cards"]) or "no card"
    shown = ("python", "torch", "triton", "transformers", "nixl")
    known = (f"{n} {machine['versions'][n]}" for n in shown if n in machine["versions"])
    flags = " ".join(machine["cpu_flags"][:2])
    return (
        f"{machine['date']}, commit {machine['commit']}; {machine['cpu']} ({flags}), "
        f"{machine['cores']} cores, load {machine['load_average_before']}; {cards}; "
        + ", ".join(known)
    )


def has_goals(machine: dict[str, Any]) -> bool:
    """The CPU is one of those that the goals are set for."""
    return any(flag in machine["cpu_flags"] for flag in GOAL_FLAGS)


def commit_of(tree: Path) -> str:
    """Commit of a working tree, and whether it was changed; empty without git."""
    git = ("git", "-C", str(tree))
    commit = "".join(_lines(*git, "rev-parse", "--short", "HEAD"))
    is_changed = _lines(*git, "status", "--porcelain", "--untracked-files=no")
    return commit + (" with changes" if commit and is_changed else "")


@dataclass(frozen=True, slots=True)
class MachineUse:
    """Processor time since the machine started, of all programs and of this process's family."""

    wall_s: float
    busy_s: float
    own_s: float

    @staticmethod
    def now() -> MachineUse:
        """The present state."""
        times = psutil.cpu_times()
        busy_s = sum(getattr(times, name) for name in ("user", "nice", "system"))
        return MachineUse(time.perf_counter(), busy_s, _own_cpu_s())

    def others_since(self, before: MachineUse) -> float:
        """Cores that other programs kept busy in the mean."""
        others_s = self.busy_s - before.busy_s - (self.own_s - before.own_s)
        return max(0.0, others_s / (self.wall_s - before.wall_s))


def cpu_seconds(pid: int) -> dict[int, float]:
    """Processor seconds so far of a process and its descendants, by process id."""
    root = psutil.Process(pid)
    found = {}
    for process in (root, *root.children(recursive=True)):
        times = process.cpu_times()
        found[process.pid] = times.user + times.system
    return found


def _own_cpu_s() -> float:
    this = psutil.Process()
    total_s = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _lines(*command: str) -> list[str]:
    """Lines that a program prints; none where it cannot be run."""
    if shutil.which(command[0]) is None:
        return []
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def _cpu_field(name: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    found = [line.partition(":")[2].strip() for line in lines if line.split("\t")[0] == name]
    return found[0] if found else ""
