"""`weft status --hosts`: where the ranks of each host's workers run, and the network ports next to
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text
from weft.cli.tables import print_table
from weft.v1 import worker_pb2


@dataclass(slots=True, kw_only=True)
class PortStatus:
    name: str
    """As UCX names it: mlx5_0:1, or eth0."""
    state: str
    """ACTIVE, DOWN; up, down, unknown."""
    distance: str = ""
    """From the rank's GPU: PIX, PXB, PHB, NODE or SYS; empty: there is no GPU, or no device."""
    numa_node: int | None = None


@dataclass(slots=True, kw_only=True)
class RankStatus:
    device: str
    pci_address: str = ""
    numa_node: int | None = None
    """Next to its GPU; None: unknown."""
    cores: str = ""
    """Cores that it is bound to, as 0-55,112-167; empty: none."""
    memory_node: int | None = None
    """None: its memory is bound to no node."""
    net_devices: str = ""
    """Devices that NIXL may use; empty: all."""
    ports: list[PortStatus] = field(default_factory=list)
    """The host's network ports, the nearest first."""


def ranks_of(info: worker_pb2.GetInfoResponse) -> list[RankStatus]:
    return [
        RankStatus(
            device=rank.device,
            pci_address=rank.pci_address,
            numa_node=rank.numa_node if rank.HasField("numa_node") else None,
            cores=rank.cores,
            memory_node=rank.memory_node if rank.HasField("memory_node") else None,
            net_devices=rank.net_devices,
            ports=[
                PortStatus(
                    name=port.name,
                    state=port.state,
                    distance=port.distance,
                    numa_node=port.numa_node if port.HasField("numa_node") else None,
                )
                for port in rank.ports
            ],
        )
        for rank in info.ranks
    ]


def show_hosts(console: Console, hosts: Mapping[str, Sequence[tuple[str, RankStatus]]]) -> None:
    """Prints the ranks of each host, with their names."""
    for number, (host, ranks) in enumerate(hosts.items()):
        if number:
            console.print()
        console.print(f"host {host}", markup=False, highlight=False, emoji=False)
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for name in ("rank", "device", "PCI address", "node", "cores", "memory", "network"):
            table.add_column(name, no_wrap=True)
        for name, rank in ranks:
            cells = (
                name,
                rank.device,
                rank.pci_address or "-",
                _node(rank.numa_node),
                rank.cores or "not bound",
                "not bound" if rank.memory_node is None else f"node {rank.memory_node}",
                rank.net_devices or "all",
            )
            # As texts, since a PCI address may look like the name of an emoji.
            table.add_row(*map(Text, cells))
        print_table(console, table)
        for line in _port_lines(ranks):
            console.print(Text(line, "dim"), soft_wrap=True)


def _port_lines(ranks: Sequence[tuple[str, RankStatus]]) -> Iterator[str]:
    """Ranks that see the same ports at the same distances share a line."""
    seen: dict[str, list[str]] = {}
    for name, rank in ranks:
        ports = ", ".join(
            " ".join(filter(None, (port.name, port.distance, port.state))) for port in rank.ports
        )
        seen.setdefault(ports, []).append(name)
    for ports, names in seen.items():
        yield f"ports from {', '.join(names)}, nearest first: {ports or 'none'}"


def _node(node: int | None) -> str:
    return "-" if node is None else str(node)
