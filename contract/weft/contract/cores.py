"""Cores: how many this process may use, and lists of them. Pure Python."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def num_cores(bound: Container[int] | None = None) -> int:
    """Cores by the process's affinity and its control group's quota, rounded up; at least 1.
    `bound`: counts those that a process will be bound to.
    """
    # Python knows the affinity on Linux only.
    is_told = hasattr(os, "sched_getaffinity")
    own = os.sched_getaffinity(0) if is_told else range(os.cpu_count() or 1)
    cores = sum(bound is None or core in bound for core in own)
    try:
        quota, period = map(int, _QUOTA.read_text().split())
    except (OSError, ValueError):  # none: `max`, or another system
        return max(1, cores)
    return max(1, min(cores, -(-quota // max(1, period))))


def parse_cores(text: str) -> frozenset[int]:
    """Reads a list of cores, or of NUMA nodes, in the kernel's form, as 0-3,8; empty: none. Raises
    ValueError if the text has another form.
    """
    cores: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is no core and no range of cores, as 0-3,8")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def list_cores(cores: Iterable[int]) -> str:
    """Writes a list of cores in the kernel's form."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)
