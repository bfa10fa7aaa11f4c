"""How many cores this process may use. Pure Python."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def num_cores() -> int:
    """Cores by the process's affinity and its control group's quota, rounded up; at least 1."""
    # Python knows the affinity on Linux only.
    is_told = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if is_told else os.cpu_count() or 1
    try:
        quota, period = map(int, _QUOTA.read_text().split())
    except (OSError, ValueError):  # none: `max`, or another system
        return cores
    return max(1, min(cores, -(-quota // max(1, period))))
