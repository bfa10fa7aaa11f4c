"""Decides where the processes of an engine's ranks run, and starts them there.

A rank on a GPU runs on the cores and in the memory of its GPU's NUMA node, and NIXL uses the RDMA
port next to it. What a host does not show or does not allow is left as it is, with a note.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft.contract.binding import Binding
from weft.contract.cores import list_cores, parse_cores
from weft.contract.errors import ConfigError
from weft.engine.base import bound_start
from weft.engine.base.config import EngineConfig
from weft.engine.base.topology import Distance, Host, NetPort, PciDevice

NET_VARIABLE = "UCX_NET_DEVICES"
_ALL_NODES = frozenset(range(1024))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """What this process may choose for those that it starts."""

    cores: frozenset[int]
    memory_nodes: frozenset[int]
    """NUMA nodes whose memory it may use."""
    memory_refusal: str = ""
    """Why it may not choose among them; empty: it may."""
    has_memory_policy: bool = False
    """Whether whoever started it has chosen already."""
    net_devices: str = ""
    """`UCX_NET_DEVICES` of its environment; empty: not set."""

    @classmethod
    def of_this_process(cls) -> ProcessLimits:
        """The limits as its kernel tells them."""
        refused = bound_start.memory_refusal()
        why = f"the host refuses set_mempolicy ({os.strerror(refused)})" if refused else ""
        if refused == errno.EPERM:
            why += "; a container needs the capability SYS_NICE"
        return cls(
            cores=frozenset(os.sched_getaffinity(0)),
            memory_nodes=_allowed_nodes(),
            memory_refusal=why,
            has_memory_policy=bound_start.memory_policy()[0] != 0,
            net_devices=os.environ.get(NET_VARIABLE, ""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """Where one rank runs."""

    device: str
    """As torch names it: cuda:0, or cpu."""
    gpu: PciDevice | None
    """None: the rank runs on a CPU, or the host does not show its GPU."""
    binding: Binding
    net_devices: str
    """Devices that NIXL may use for the rank's pages; empty: UCX chooses."""
    ports: tuple[tuple[NetPort, Distance | None], ...]
    """The host's network ports, the nearest to the GPU first; without a distance where there is no
    GPU or the port is virtual.
    """
    notes: tuple[str, ...]
    """What could not be as it should be."""


def place_ranks(
    config: EngineConfig, host: Host, limits: ProcessLimits
) -> tuple[RankPlacement, ...]:
    """Decides for each rank of an engine. Raises ConfigError if a node, a core or a network device
    that the settings name does not exist, or may not be used here.
    """
    nodes = _of_each_rank(config.numa_bind_nodes, ",", config.num_ranks)
    cores = _of_each_rank(config.numa_bind_cpus, "|", config.num_ranks)
    nics = _of_each_rank(config.nics, "|", config.num_ranks)
    return tuple(
        _place(config, host, limits, rank, nodes[rank], cores[rank], nics[rank])
        for rank in range(config.num_ranks)
    )


def bindings_of(placements: Sequence[RankPlacement]) -> tuple[Binding, ...]:
    """What the process of each rank is bound to. Rank 0 moves the pages of all ranks, so it has all
    of their network devices.
    """
    first, *others = (one.binding for one in placements)
    chosen = (name for one in (first, *others) for name in one.net_devices.split(",") if name)
    return (replace(first, net_devices=",".join(dict.fromkeys(chosen))), *others)


def bound_command(command: Sequence[str], binding: Binding) -> list[str]:
    """The command that runs another one, whose first word is a path, where it belongs."""
    if not binding.is_bound:
        return list(command)
    cores = ",".join(map(str, sorted(parse_cores(binding.cores))))
    node = "" if binding.memory_node is None else str(binding.memory_node)
    return [sys.executable, "-I", "-S", bound_start.__file__, cores, node, *command]


def unbound(binding: Binding, name: str) -> list[str]:
    """What this process is not bound to although it should be, in words; `name` is its own."""
    told: list[str] = []
    cores = parse_cores(binding.cores)
    if cores and not os.sched_getaffinity(0) <= cores:
        told.append(f"{name} is not bound to the cores {binding.cores}: the host refused it")
    node = binding.memory_node
    if node is not None and bound_start.memory_policy() != (bound_start.PREFERRED, node):
        told.append(f"{name}: memory is not bound to node {node}: the host refused it")
    return told


def _place(
    config: EngineConfig,
    host: Host,
    limits: ProcessLimits,
    rank: int,
    nodes: str,
    cores: str,
    nics: str,
) -> RankPlacement:
    device, gpu = config.device_of_rank(rank), None
    if config.is_on_gpu:
        index = int(device.partition(":")[2] or 0)
        gpu = next((one.device for one in host.gpus if one.index == index), None)
    notes: list[str] = []
    node, chosen = _asked_node(host, nodes), _asked_cores(limits, cores)
    is_asked = bool(config.numa_bind) or node is not None or bool(chosen)
    if node is None:
        near = None if gpu is None else gpu.numa_node
        node = _node_of(host, chosen) if chosen else near
    binding = Binding()
    if not is_asked and (config.numa_bind is False or not config.is_on_gpu or len(host.nodes) < 2):
        pass
    elif node is not None:
        binding = _bind(host, limits, node, chosen, notes, is_asked=is_asked)
    elif chosen:
        binding = Binding(cores=list_cores(chosen & limits.cores))
        notes.append("memory is not bound: the cores are of several NUMA nodes")
    else:
        where = device if gpu is None else f"{device} at {gpu.address}"
        notes.append(
            f"not bound: the host does not say which NUMA node {where} is near to; "
            "--numa-bind-nodes names it"
        )
    net_devices = _net_devices(host, limits, gpu, nics, notes)
    if not limits.net_devices:
        binding = replace(binding, net_devices=net_devices)
    return RankPlacement(
        device=device,
        gpu=gpu,
        binding=binding,
        net_devices=net_devices,
        ports=_seen_ports(host, gpu),
        notes=tuple(f"rank {rank}: {note}" if config.num_ranks > 1 else note for note in notes),
    )


def _bind(
    host: Host,
    limits: ProcessLimits,
    node: int,
    chosen: frozenset[int],
    notes: list[str],
    *,
    is_asked: bool,
) -> Binding:
    usable = (chosen or host.nodes.get(node, frozenset())) & limits.cores
    if not usable:
        own = list_cores(limits.cores)
        notes.append(f"not bound to cores of NUMA node {node}: this process may use {own}")
    refusal = limits.memory_refusal
    if not refusal and node not in limits.memory_nodes:
        refusal = f"this process may use that of {list_cores(limits.memory_nodes)}"
    if not refusal and limits.has_memory_policy and not is_asked:
        refusal = "whoever started this process has set a policy; --numa-bind overrides it"
    if refusal:
        notes.append(f"memory is not bound to NUMA node {node}: {refusal}")
    return Binding(cores=list_cores(usable), memory_node=None if refusal else node)


def _of_each_rank(text: str, separator: str, num_ranks: int) -> list[str]:
    parts = [part.strip() for part in text.split(separator)]
    return parts * num_ranks if len(parts) == 1 else parts


def _asked_node(host: Host, text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or int(text) not in host.nodes:
        there = f"there are {list_cores(host.nodes)}" if host.nodes else "the host shows none"
        raise ConfigError(
            f"numa_bind_nodes: there is no NUMA node {text}; {there}", param="numa_bind_nodes"
        )
    return int(text)


def _asked_cores(limits: ProcessLimits, text: str) -> frozenset[int]:
    try:
        cores = parse_cores(text)
    except ValueError as error:
        raise ConfigError(f"numa_bind_cpus: {error}", param="numa_bind_cpus") from error
    if cores and not cores & limits.cores:
        raise ConfigError(
            f"numa_bind_cpus: this process may not use {text}, only {list_cores(limits.cores)}",
            param="numa_bind_cpus",
        )
    return cores


def _node_of(host: Host, cores: frozenset[int]) -> int | None:
    return next((node for node, own in host.nodes.items() if cores <= own), None)


def _net_devices(
    host: Host, limits: ProcessLimits, gpu: PciDevice | None, asked: str, notes: list[str]
) -> str:
    if limits.net_devices:
        if asked != "auto":
            notes.append(f"nics is not used: {NET_VARIABLE} is {limits.net_devices}")
        return limits.net_devices
    if asked == "all":
        return ""
    if asked == "auto":
        port = None if gpu is None else host.rdma_port_of(gpu)
        # Workers without RDMA are still reached, by TCP.
        return "" if port is None else ",".join([port.name, *_interfaces(host)])
    names = [name.strip() for name in asked.split(",")]
    return ",".join(name for one in names for name in _asked_ports(host, one, notes))


def _interfaces(host: Host) -> list[str]:
    return [port.name for port in host.ports if port.kind == "interface" and port.is_active]


def _asked_ports(host: Host, name: str, notes: list[str]) -> list[str]:
    named = [port for port in host.ports if name in (port.name, port.name.partition(":")[0])]
    if not named:
        there = ", ".join(f"{port.name} ({port.state})" for port in host.ports) or "none"
        raise ConfigError(
            f"nics: there is no network device {name!r}; there are {there}", param="nics"
        )
    active = [port for port in named if port.is_active]
    if not active:
        notes.append(f"the network device {name} is {named[0].state}")
    return [port.name for port in active or named]


def _seen_ports(host: Host, gpu: PciDevice | None) -> tuple[tuple[NetPort, Distance | None], ...]:
    near = [] if gpu is None else host.by_distance(gpu)
    known = {port.name for port, _ in near}
    return (*near, *((port, None) for port in host.ports if port.name not in known))


def _allowed_nodes() -> frozenset[int]:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        told = (line.partition(":")[2].strip() for line in lines if "Mems_allowed_list" in line)
        return parse_cores(next(told))
    except (OSError, ValueError, StopIteration):
        return _ALL_NODES
