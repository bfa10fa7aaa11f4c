"""Where a worker's ranks run: decided before its engine starts, told in `GetInfo`."""

from __future__ import annotations

from collections.abc import Sequence

from weft.common.rpc.listen import keep_nixl_on_loopback
from weft.engine.base.config import EngineConfig
from weft.engine.base.placement import ProcessLimits, RankPlacement, place_ranks
from weft.engine.base.topology import Distance, Host, NetPort
from weft.v1 import worker_pb2


def place_worker(config: EngineConfig, host: str) -> tuple[RankPlacement, ...]:
    """Decides for each rank of a worker that listens on `host`. Raises ConfigError if a node, a
    core or a network device that the settings name does not exist here, or may not be used.
    """
    if config.nics == "auto":
        keep_nixl_on_loopback(host)
    return place_ranks(config, Host(), ProcessLimits.of_this_process())


def notes_of(placements: Sequence[RankPlacement]) -> list[str]:
    """What could not be as it should be, in words, once each."""
    return list(dict.fromkeys(note for one in placements for note in one.notes))


def told(placements: Sequence[RankPlacement]) -> list[worker_pb2.RankPlacement]:
    return [
        worker_pb2.RankPlacement(
            device=one.device,
            pci_address="" if one.gpu is None else one.gpu.address,
            numa_node=None if one.gpu is None else one.gpu.numa_node,
            cores=one.binding.cores,
            memory_node=one.binding.memory_node,
            net_devices=one.net_devices,
            ports=[_port(port, distance) for port, distance in one.ports],
        )
        for one in placements
    ]


def _port(port: NetPort, distance: Distance | None) -> worker_pb2.NetPort:
    return worker_pb2.NetPort(
        name=port.name,
        state=port.state,
        distance="" if distance is None else distance.word,
        numa_node=None if port.device is None else port.device.numa_node,
    )
