"""What Weft makes of a host: one finding for each thing that a mesh runs on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weft.cli.doctor.facts import Facts
from weft.contract.cores import list_cores
from weft.engine.base.config import EngineConfig
from weft.engine.base.placement import RankPlacement, place_ranks

State = Literal["ok", "holds back", "missing"]

_MANY_FILES = 4096
"""Each stream of an answer holds an open file in the edge and another one in the gateway."""
_ENOUGH_SHARED_BYTES = 256 << 20
_ENOUGH_BYTES = 2 << 30
"""Free memory in which the demo model runs."""
_ATTACH_ALL = "1"
"""Most that Yama's ptrace_scope may be, so that processes can read one another's memory."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    what: str
    state: State
    found: str
    advice: str = ""
    """What to do; empty: nothing."""
    stops: bool = False
    """Whether no mesh can run because of it, or none on the GPUs that there are."""


def findings(facts: Facts) -> list[Finding]:
    """Everything that Weft uses of a host, in the order in which a mesh needs it."""
    placements = _placements(facts)
    return [
        _torch(facts),
        _gpus(facts),
        *_peers(facts),
        _compiler(facts),
        *_triton(facts),
        _native(facts),
        *_numa(facts, placements),
        _network(facts, placements),
        _nixl(facts),
        _copies(facts),
        _rest(facts),
        _memory(facts),
        *_huge_pages(facts),
        *_limits(facts),
        _cache(facts),
    ]


def _placements(facts: Facts) -> tuple[RankPlacement, ...]:
    """Where ranks would run: one on each GPU, or one on the CPU."""
    config = EngineConfig(
        model_dir=Path(),
        device="cuda" if facts.host.gpus else "cpu",
        tp=max(1, min(64, len(facts.host.gpus))),
    )
    return place_ranks(config, facts.host, facts.limits)


def _torch(facts: Facts) -> Finding:
    known = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    if problem := facts.probe.torch_problem:
        return Finding(
            what="torch",
            state="missing",
            found=f"it cannot be imported ({problem}); {known}",
            advice="install Weft's requirements again: `make setup`, or `pip install weft`",
            stops=True,
        )
    return Finding(what="torch", state="ok", found=known)


def _gpus(facts: Facts) -> Finding:
    host, shown = facts.host, len(facts.host.gpus)
    there = max(shown, len(host.nvidia_addresses))
    driver = f"driver {host.driver_version}" if host.driver_version else "no driver"
    models = ", ".join(dict.fromkeys(gpu.model or "GPU" for gpu in host.gpus))
    if facts.num_gpus:
        found = f"{facts.num_gpus} x {models or 'GPU'}, {driver}, CUDA {facts.probe.cuda}"
        if facts.num_gpus >= there:
            return Finding(what="GPUs", state="ok", found=found)
        return Finding(
            what="GPUs",
            state="holds back",
            found=f"{found}; the host has {there}",
            advice="CUDA_VISIBLE_DEVICES or the container hides the others",
        )
    if not there:
        return Finding(what="GPUs", state="ok", found="none; workers run on the CPU")
    if not facts.torch_has_cuda and not facts.probe.torch_problem:
        advice = "install a torch that is built for CUDA"
    elif not host.driver_version:
        advice = "install NVIDIA's driver, or start the container with the GPUs"
    else:
        advice = "`nvidia-smi` and CUDA_VISIBLE_DEVICES tell more; a driver may be too old"
    return Finding(
        what="GPUs",
        state="missing",
        found=f"{there} in the host, none that torch can use ({driver}); workers run on the CPU",
        advice=advice,
    )


def _peers(facts: Facts) -> Iterator[Finding]:
    reached = facts.probe.reached_gpus
    if len(reached) < 2:
        return
    apart = [
        f"cuda:{one} does not reach cuda:{other}"
        for one, others in enumerate(reached)
        for other in range(len(reached))
        if other not in (one, *others)
    ]
    if apart:
        yield Finding(
            what="peer access",
            state="holds back",
            found=f"{'; '.join(apart[:3])}{' ...' if len(apart) > 3 else ''}: workers there "
            "exchange pages through host memory, and cannot be ranks of one",
            advice="a virtual machine must pass NVLink or PCIe peer access on",
        )
    else:
        yield Finding(
            what="peer access", state="ok", found=f"all GPUs reach one another {facts.probe.link}"
        )


def _compiler(facts: Facts) -> Finding:
    if facts.compiler is not None:
        return Finding(what="C compiler", state="ok", found=facts.compiler)
    if not (facts.probe.native_notices or facts.probe.torch_problem):
        return Finding(
            what="C compiler", state="ok", found="none; the operations for CPUs are compiled"
        )
    return Finding(
        what="C compiler",
        state="missing",
        found="no `cc` on the PATH, which compiles the operations for CPUs",
        advice="install gcc or clang, or Weft's wheel, in which they are compiled",
    )


def _triton(facts: Facts) -> Iterator[Finding]:
    if not facts.num_gpus:
        return
    if problem := facts.probe.triton_problem:
        yield Finding(
            what="Triton",
            state="missing",
            found=f"it cannot be imported ({problem})",
            advice="install Weft's requirements again",
            stops=True,
        )
    elif facts.compile_problem:
        yield Finding(what="Triton", state="missing", found=facts.compile_problem, stops=True)
    else:
        yield Finding(what="Triton", state="ok", found="a compiler and Python's headers are there")


def _native(facts: Facts) -> Finding:
    name = "CPU operations"
    if facts.probe.torch_problem:
        return Finding(what=name, state="missing", found="not asked, since torch is missing")
    if facts.probe.native_notices:
        return Finding(
            what=name,
            state="holds back",
            found="; ".join(facts.probe.native_notices),
            advice="only workers on the CPU need them"
            if facts.num_gpus
            else "a C compiler makes them; sandboxes may refuse AMX",
        )
    uses = ", ".join(facts.probe.native) or "AVX and floats"
    dtype = "bfloat16" if facts.has_fast_bfloat16 else "float32"
    return Finding(
        what=name,
        state="ok",
        found=f"{uses}; --dtype auto is {dtype} on the CPU; {facts.num_cores} cores",
    )


def _numa(facts: Facts, placements: tuple[RankPlacement, ...]) -> Iterator[Finding]:
    nodes = facts.host.nodes
    shown = ", ".join(f"node {node}: cores {list_cores(own)}" for node, own in nodes.items())
    gpus = ", ".join(
        f"{one.device} at node {one.gpu.numa_node}" for one in placements if one.gpu is not None
    )
    notes = list(dict.fromkeys(note for one in placements for note in one.notes))
    if not notes and len(nodes) > 1 and facts.limits.memory_refusal:
        notes = [f"memory cannot be bound: {facts.limits.memory_refusal}"]
    if notes:
        yield Finding(
            what="NUMA",
            state="holds back",
            found=f"{shown}; {'; '.join(notes)}",
            advice="--numa-bind-nodes and --numa-bind-cpus choose; "
            "containers need the capability SYS_NICE and the cores of all nodes",
        )
    else:
        found = "; ".join(filter(None, (shown or "the host shows no nodes", gpus)))
        yield Finding(what="NUMA", state="ok", found=found)


def _network(facts: Facts, placements: tuple[RankPlacement, ...]) -> Finding:
    rdma = [port for port in facts.host.ports if port.kind == "rdma"]
    chosen = ", ".join(
        f"{one.device}: {port.name}"
        for one in placements
        if one.gpu is not None and (port := facts.host.rdma_port_of(one.gpu)) is not None
    )
    variable = facts.limits.net_devices
    found = ", ".join(f"{port.name} {port.state}" for port in rdma)
    if variable:
        found = f"UCX_NET_DEVICES is {variable}" + (f"; {found}" if found else "")
    if not rdma:
        found = f"{found}; " if found else ""
        return Finding(
            what="network",
            state="ok",
            found=f"{found}no RDMA; between hosts pages travel over TCP",
        )
    if not any(port.is_active for port in rdma):
        return Finding(
            what="network",
            state="holds back",
            found=f"{found}: no port is active, so between hosts pages travel over TCP",
            advice="`ibstat` and `rdma link` tell why",
        )
    if not (facts.host.root / "dev" / "infiniband").is_dir():
        return Finding(
            what="network",
            state="holds back",
            found=f"{found}, but there is no /dev/infiniband: pages travel over TCP",
            advice="start the container with --device /dev/infiniband",
        )
    return Finding(
        what="network", state="ok", found=f"{found}; {chosen}" if chosen and not variable else found
    )


def _nixl(facts: Facts) -> Finding:
    if problem := facts.probe.nixl_problem or facts.probe.torch_problem:
        return Finding(
            what="NIXL",
            state="missing",
            found=f"{problem}; pages travel as gRPC data, several times slower",
            advice="`pip install nixl-cu13`, or nixl-cu12",
        )
    return Finding(what="NIXL", state="ok", found=f"back ends {', '.join(facts.probe.plugins)}")


def _copies(facts: Facts) -> Finding:
    """Copies of pages between processes of the host."""
    scope = facts.host.read("proc/sys/kernel/yama/ptrace_scope")
    if scope > _ATTACH_ALL and not facts.host.may_attach:
        return Finding(
            what="shared memory",
            state="holds back",
            found=f"ptrace_scope is {scope}: workers of the host cannot read one another's memory, "
            "and copy pages twice",
            advice="`sysctl kernel.yama.ptrace_scope=1`, or the capability SYS_PTRACE",
        )
    if facts.shared_bytes is None or facts.shared_bytes < _ENOUGH_SHARED_BYTES:
        size = "is not there" if facts.shared_bytes is None else _bytes(facts.shared_bytes)
        return Finding(
            what="shared memory",
            state="holds back",
            found=f"/dev/shm: {size}; UCX's lanes between workers of this host lie there",
            advice="--shm-size 1g for a container, an emptyDir of medium Memory for a pod",
        )
    return Finding(
        what="shared memory", state="ok", found=f"/dev/shm: {_bytes(facts.shared_bytes)}"
    )


def _rest(facts: Facts) -> Finding:
    if facts.rest_binary is not None:
        return Finding(what="REST edge", state="ok", found=str(facts.rest_binary))
    return Finding(
        what="REST edge",
        state="missing",
        found="weft-rest is not built: a mesh has gRPC only",
        advice="`make rest` builds it (needs Go)",
    )


def _memory(facts: Facts) -> Finding:
    found = f"{_bytes(facts.memory_bytes)} free" if facts.memory_bytes else "unknown"
    if 0 < facts.memory_bytes < _ENOUGH_BYTES:
        return Finding(
            what="memory",
            state="holds back",
            found=found,
            advice="a KV pool on a CPU takes 1 GiB beside the weights: --kv-memory-bytes sets it",
        )
    return Finding(what="memory", state="ok", found=found)


def _huge_pages(facts: Facts) -> Iterator[Finding]:
    text = facts.host.read("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        yield Finding(
            what="huge pages",
            state="holds back",
            found="transparent huge pages are off: steps on CPUs and host tiers are slower",
            advice="`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`",
        )
    elif chosen:
        yield Finding(what="huge pages", state="ok", found=f"transparent, {chosen}")


def _limits(facts: Facts) -> Iterator[Finding]:
    if facts.open_files is not None and facts.open_files < _MANY_FILES:
        yield Finding(
            what="open files",
            state="holds back",
            found=f"at most {facts.open_files:,} for a process: gateways and edges serve fewer "
            "streams",
            advice="`ulimit -n 65536`",
        )
    else:
        shown = "unlimited" if facts.open_files is None else f"{facts.open_files:,}"
        yield Finding(what="open files", state="ok", found=f"{shown} for a process")
    has_rdma = any(port.kind == "rdma" and port.is_active for port in facts.host.ports)
    if facts.locked_bytes is None:
        yield Finding(what="locked memory", state="ok", found="unlimited")
    elif has_rdma:
        yield Finding(
            what="locked memory",
            state="holds back",
            found=f"{facts.locked_bytes >> 10:,} KiB for a process, and RDMA reads and writes "
            "locked memory only",
            advice="`ulimit -l unlimited`, or --ulimit memlock=-1 for a container",
        )
    else:
        found = f"{facts.locked_bytes >> 10:,} KiB for a process, which only RDMA would exceed"
        yield Finding(what="locked memory", state="ok", found=found)


def _cache(facts: Facts) -> Finding:
    if facts.cache_problem:
        return Finding(
            what="cache folder",
            state="holds back",
            found=f"{facts.cache_problem}: compiled code and converted models are not kept",
            advice="WEFT_CACHE_DIR names another folder",
        )
    return Finding(what="cache folder", state="ok", found="it can be written to")


def _bytes(number: int) -> str:
    return f"{number / _GIB:,.1f} GiB"
