"""A host's files as its kernel shows them: two sockets, four GPUs, two RDMA cards.

node 0, cores 0-3,8-11                      node 1, cores 4-7,12-15
  pci0000:00 - eth0                           pci0000:97 - switch - GPU 2
  pci0000:15 - switch - GPU 0                                     - switch - mlx5_1
                      - mlx5_0                pci0000:aa - GPU 3
  pci0000:29 - GPU 1
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

CORES = {0: "0-3,8-11", 1: "4-7,12-15"}
GPUS = ("0000:18:00.0", "0000:2a:00.0", "0000:9a:00.0", "0000:ab:00.0")
GPU_NODES = (0, 0, 1, 1)
MODEL = "NVIDIA H200"
_PATHS = {
    "0000:00:1f.6": ("pci0000:00",),
    "0000:18:00.0": ("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:00.0"),
    "0000:19:00.0": ("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:01.0"),
    "0000:2a:00.0": ("pci0000:29", "0000:29:01.0"),
    "0000:9a:00.0": ("pci0000:97", "0000:97:01.0", "0000:98:00.0", "0000:99:00.0"),
    "0000:9e:00.0": (
        *("pci0000:97", "0000:97:01.0", "0000:98:00.0", "0000:99:01.0"),
        *("0000:9b:00.0", "0000:9d:00.0"),
    ),
    "0000:ab:00.0": ("pci0000:aa", "0000:aa:01.0"),
}
_NODES = {"0000:00:1f.6": 0, "0000:19:00.0": 0, "0000:9e:00.0": 1} | dict(
    zip(GPUS, GPU_NODES, strict=True)
)


class FakedHost:
    """The files below `root`, which a test may change before they are read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for node, cores in CORES.items():
            self.write(f"sys/devices/system/node/node{node}/cpulist", cores)
        for address, parents in _PATHS.items():
            folder = self.root.joinpath("sys/devices", *parents, address)
            folder.mkdir(parents=True)
            (folder / "numa_node").write_text(f"{_NODES[address]}\n")
            is_gpu = address in GPUS
            (folder / "vendor").write_text("0x10de\n" if is_gpu else "0x15b3\n")
            (folder / "class").write_text("0x030200\n" if is_gpu else "0x020700\n")
            self.link(f"sys/bus/pci/devices/{address}", folder)
        self.rdma("mlx5_0", "0000:19:00.0", "4: ACTIVE")
        self.rdma("mlx5_1", "0000:9e:00.0", "4: ACTIVE")
        self.interface("eth0", "up", "0000:00:1f.6")
        self.interface("lo", "unknown")
        self.interface("docker0", "down")
        self.list_gpus()

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def link(self, path: str, target: Path) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(os.path.relpath(target, (self.root / path).parent))

    def device(self, address: str) -> Path:
        return self.root / "sys/bus/pci/devices" / address

    def rdma(self, name: str, address: str, *states: str) -> None:
        """An RDMA card with one port for each state."""
        for number, state in enumerate(states, 1):
            self.write(f"sys/class/infiniband/{name}/ports/{number}/state", state)
        self.link(f"sys/class/infiniband/{name}/device", self.device(address).resolve())

    def interface(self, name: str, state: str, address: str = "") -> None:
        """A network interface; without an address it is virtual."""
        self.write(f"sys/class/net/{name}/operstate", state)
        if address:
            self.link(f"sys/class/net/{name}/device", self.device(address).resolve())

    def list_gpus(self, models: Sequence[str] = (MODEL,) * 4) -> None:
        """What NVIDIA's driver lists."""
        version = (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
        )
        self.write("proc/driver/nvidia/version", version)
        for number, (address, model) in enumerate(zip(GPUS, models, strict=True)):
            text = (
                f"Model: \t\t {model}\nGPU UUID: \t {uuid_of(number)}\nBus Location: \t {address}\n"
            )
            self.write(
                f"proc/driver/nvidia/gpus/{address}/information", f"{text}Device Minor: \t {number}"
            )
            self.write(f"dev/nvidia{number}", "")


def uuid_of(number: int) -> str:
    return f"GPU-{number}a7f2c1e-0000-4000-8000-00000000000{number}"
