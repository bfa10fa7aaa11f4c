"""Facts about this host and this process, gathered by the code that decides with them."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weft.checkpoint.dtypes import cpu_has_fast_bfloat16
from weft.cli.doctor.probe import Probe, run_probe, versions
from weft.cli.rest_binary import find_rest_binary
from weft.contract.cache_folder import cache_folder
from weft.contract.cores import num_cores
from weft.contract.errors import ConfigError
from weft.engine.base.gpus import num_usable_gpus, torch_has_cuda
from weft.engine.base.placement import ProcessLimits
from weft.engine.base.topology import Host
from weft.engine.base.triton_compiler import ensure_triton_compiles
from weft.kernels.shared.build import find_compiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    host: Host
    limits: ProcessLimits
    probe: Probe = field(default_factory=Probe)
    versions: Mapping[str, str] = field(default_factory=dict)
    num_gpus: int = 0
    """GPUs that workers can use."""
    torch_has_cuda: bool = False
    has_fast_bfloat16: bool = False
    num_cores: int = 1
    rest_binary: Path | None = None
    compiler: str | None = None
    """Compiles native code; None: there is none."""
    compile_problem: str = ""
    """Why Triton cannot compile; empty: it can, or there is no GPU."""
    cache_problem: str = ""
    """Why the cache folder cannot be written to; empty: it can."""
    open_files: int | None = None
    """Files that a process may open; None: any number."""
    locked_bytes: int | None = None
    """Memory that a process may lock; None: all."""
    shared_bytes: int | None = None
    """Size of /dev/shm; None: there is none."""
    memory_bytes: int = 0
    """Memory that is free for this process, its control group's limit included; 0: unknown."""


def gather() -> Facts:
    host, num_gpus = Host(), num_usable_gpus()
    return Facts(
        host=host,
        limits=ProcessLimits.of_this_process(),
        probe=run_probe(),
        versions=versions(),
        num_gpus=num_gpus,
        torch_has_cuda=torch_has_cuda(),
        has_fast_bfloat16=cpu_has_fast_bfloat16(),
        num_cores=num_cores(),
        rest_binary=find_rest_binary(),
        compiler=find_compiler(),
        compile_problem=_compile_problem() if num_gpus else "",
        cache_problem=_cache_problem(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        shared_bytes=_size(Path("/dev/shm")),
        memory_bytes=_free_memory(host),
    )


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _size(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _compile_problem() -> str:
    try:
        ensure_triton_compiles()
    except ConfigError as error:
        return error.message
    return ""


def _cache_problem() -> str:
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        return str(error)
    return "" if os.access(folder, os.W_OK) else f"{folder} may not be written to"


def _free_memory(host: Host) -> int:
    lines = host.read("proc/meminfo").splitlines()
    free = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "0")
    limits = [int(free) << 10]
    group = host.read("sys/fs/cgroup/memory.max"), host.read("sys/fs/cgroup/memory.current")
    if all(text.isdecimal() for text in group):
        limits.append(int(group[0]) - int(group[1]))
    return max(0, min(limits))
