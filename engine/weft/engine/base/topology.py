"""What the kernel shows of a host: NUMA nodes, GPUs, network ports, and how near they are to one
another.

Files are read below a root folder and nothing is imported that allocates, so that processes can be
bound before they begin.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Literal, NamedTuple

from weft.contract.cores import parse_cores
from weft.engine.base.gpus import driver_gpus

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""Start of the PCI class of what draws or computes."""
_SYS_PTRACE = 19
"""Number of the capability."""
_SWITCHED = 2
"""Steps from a device to the ports of the switch that it shares with a neighbour."""


class Distance(NamedTuple):
    """How far apart two PCI devices are; the nearest sorts first."""

    level: int
    steps: int
    """PCI devices on the way from one to the other."""

    @property
    def word(self) -> str:
        """The word of `nvidia-smi topo`: PIX, one switch; PXB, several; PHB, through the CPU's own
        bridge; NODE, in one NUMA node; SYS, in different ones; - where the host does not say.
        """
        return ("PIX", "PXB", "PHB", "NODE", "SYS", "-")[self.level]


@dataclass(frozen=True, slots=True)
class PciDevice:
    address: str
    """As 0000:1b:00.0."""
    path: tuple[str, ...]
    """From its root, as pci0000:15, to the device itself; empty: the host does not show it."""
    numa_node: int | None
    """Nearest NUMA node; None: the host does not say."""

    def distance(self, other: PciDevice) -> Distance:
        if not self.path or not other.path:
            return Distance(5, 0)
        pairs = zip(self.path, other.path, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        sides = len(self.path) - common, len(other.path) - common
        if common > 1:
            return Distance(0 if max(sides) <= _SWITCHED else 1, sum(sides))
        if common:
            return Distance(2, sum(sides))
        return Distance(3 if self.numa_node == other.numa_node else 4, sum(sides))


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that CUDA shows this process."""

    index: int
    """Its number for CUDA and torch."""
    device: PciDevice
    model: str = ""
    """Empty: unknown."""


@dataclass(frozen=True, slots=True)
class NetPort:
    """A port of an RDMA device, or a network interface."""

    name: str
    """As UCX names it: mlx5_0:1, or eth0."""
    kind: Literal["rdma", "interface"]
    state: str
    """In the kernel's words: ACTIVE, DOWN; up, down, unknown."""
    device: PciDevice | None
    """None: it is virtual."""

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE" if self.kind == "rdma" else self.state in ("up", "unknown")


class Host:
    """A host as its kernel shows it below `root`.

    Args:
        environ: The environment that CUDA reads; by default the process's.
        ask_driver: Returns PCI addresses of the GPUs in CUDA's order. It is called where files do
            not say which GPUs CUDA shows.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        environ: Mapping[str, str] | None = None,
        ask_driver: Callable[[], Sequence[str]] = driver_gpus,
    ) -> None:
        self.root = root
        self._sys, self._proc = root / "sys", root / "proc"
        self._environ = os.environ if environ is None else environ
        self._ask_driver = ask_driver

    @cached_property
    def nodes(self) -> dict[int, frozenset[int]]:
        """The cores of each NUMA node that has any. Memory of GPUs may be nodes without cores."""
        found: dict[int, frozenset[int]] = {}
        for folder in (self._sys / "devices" / "system" / "node").glob("node[0-9]*"):
            try:
                cores = parse_cores(_read(folder / "cpulist"))
            except ValueError:
                continue
            if cores:
                found[int(folder.name.removeprefix("node"))] = cores
        return dict(sorted(found.items()))

    def pci_device(self, address: str) -> PciDevice:
        """The device at an address, of which the host may show nothing more."""
        folder = self._sys / "bus" / "pci" / "devices" / address
        text = _read(folder / "numa_node")
        node = int(text) if text.isdecimal() else None
        if node is None and len(self.nodes) == 1:
            node = next(iter(self.nodes))
        parts = folder.resolve().parts if folder.exists() else ()
        path = tuple(part for part in parts if _ROOT.fullmatch(part) or _ADDRESS.fullmatch(part))
        return PciDevice(address, path, node)

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that CUDA shows a process of this environment, in its order."""
        listed = self._listed_gpus()
        chosen = None if listed is None else self._visible(listed)
        if chosen is None:
            models = {one.address: one.model for one in listed or ()}
            chosen = [_Listed(one, models.get(one, "")) for one in self._ask_driver()]
        return tuple(
            Gpu(index, self.pci_device(one.address), one.model) for index, one in enumerate(chosen)
        )

    @cached_property
    def driver_version(self) -> str:
        """Version of NVIDIA's kernel driver; empty: none is loaded."""
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _read(self._nvidia / "version"))
        return "" if found is None else found[1]

    @cached_property
    def ports(self) -> tuple[NetPort, ...]:
        """All ports of RDMA devices, then all network interfaces."""
        found: list[NetPort] = []
        for device in _folders(self._sys / "class" / "infiniband"):
            for port in _folders(device / "ports"):
                state = _read(port / "state").rpartition(":")[2].strip()
                name = f"{device.name}:{port.name}"
                found.append(NetPort(name, "rdma", state, self._device_of(device)))
        for interface in _folders(self._sys / "class" / "net"):
            state = _read(interface / "operstate")
            if state:
                device_of = self._device_of(interface)
                found.append(NetPort(interface.name, "interface", state, device_of))
        return tuple(found)

    def by_distance(self, device: PciDevice) -> list[tuple[NetPort, Distance]]:
        """All ports that are PCI devices, the nearest to a device first."""
        near = [
            (port, device.distance(port.device)) for port in self.ports if port.device is not None
        ]
        return sorted(near, key=lambda one: (one[1], one[0].name))

    def rdma_port_of(self, device: PciDevice) -> NetPort | None:
        """The active RDMA port for a GPU: the nearest, and of equally near ones another for each
        GPU of the host. All processes choose alike. None: there is none.
        """
        active = [
            (port, port.device)
            for port in self.ports
            if port.kind == "rdma" and port.is_active and port.device is not None
        ]
        taken: Counter[str] = Counter()
        for address in sorted({*self.nvidia_addresses, device.address}) if active else ():
            gpu = self.pci_device(address)
            _, _, name = min((gpu.distance(at), taken[port.name], port.name) for port, at in active)
            if address == device.address:
                return next(port for port, _ in active if port.name == name)
            taken[name] += 1
        return None

    @cached_property
    def nvidia_addresses(self) -> list[str]:
        """PCI addresses of all NVIDIA GPUs of the host, also of those that CUDA does not show."""
        return [
            folder.name
            for folder in _folders(self._sys / "bus" / "pci" / "devices")
            if _read(folder / "vendor") == _NVIDIA and _read(folder / "class").startswith(_DISPLAY)
        ]

    @property
    def may_attach(self) -> bool:
        """Whether this process may read any other's memory: the capability SYS_PTRACE."""
        lines = self.read("proc/self/status").splitlines()
        held = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
        return bool(int(held, 16) >> _SYS_PTRACE & 1)

    def read(self, path: str) -> str:
        """The stripped text of a file below the root; empty if it cannot be read."""
        return _read(self.root / path)

    # -- internals -------------------------------------------------------------------------------

    @property
    def _nvidia(self) -> Path:
        return self._proc / "driver" / "nvidia"

    def _device_of(self, folder: Path) -> PciDevice | None:
        """The PCI device that a class's entry belongs to."""
        link = folder / "device"
        if not link.exists():
            return None
        addresses = [part for part in link.resolve().parts if _ADDRESS.fullmatch(part)]
        return self.pci_device(addresses[-1]) if addresses else None

    def _listed_gpus(self) -> list[_Listed] | None:
        """What the driver lists, without those whose device file this container lacks; None: the
        driver lists nothing.
        """
        found: list[_Listed] = []
        for folder in _folders(self._nvidia / "gpus"):
            lines = _read(folder / "information").splitlines()
            facts = {name.strip(): value.strip() for name, _, value in map(_split, lines)}
            minor = facts.get("Device Minor", "")
            if not minor or (self.root / "dev" / f"nvidia{minor}").exists():
                address = facts.get("Bus Location", folder.name).lower()
                found.append(_Listed(address, facts.get("Model", ""), facts.get("GPU UUID", "")))
        return sorted(found) or None

    def _visible(self, listed: Sequence[_Listed]) -> list[_Listed] | None:
        """The GPUs that `CUDA_VISIBLE_DEVICES` leaves, in CUDA's order; None: only the driver
        knows.
        """
        by_address = self._environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        is_ordered = by_address or len({one.model for one in listed}) == 1
        text = self._environ.get("CUDA_VISIBLE_DEVICES")
        if text is None:
            return list(listed) if is_ordered else None
        chosen: list[_Listed] = []
        for word in (word.strip() for word in text.split(",")):
            if word.startswith("MIG"):
                return None
            if word.startswith("GPU-"):
                named = [one for one in listed if one.uuid.startswith(word)]
            elif not is_ordered:
                return None
            else:
                named = list(listed[int(word) : int(word) + 1]) if word.isdecimal() else []
            if len(named) != 1:
                break  # As CUDA does: what follows a name that there is not is not shown.
            chosen += named
        return chosen


class _Listed(NamedTuple):
    address: str
    model: str = ""
    uuid: str = ""


def _split(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    """The stripped text of a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
