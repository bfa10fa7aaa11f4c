"""`weft status --hosts` on workers of a faked host of two sockets."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from weft.cli.hosts import ranks_of, show_hosts
from weft.common.worker.placements import told
from weft.engine.base.config import EngineConfig
from weft.engine.base.placement import ProcessLimits, place_ranks
from weft.engine.base.topology import Host
from weft.testing.engine.faked_host import FakedHost
from weft.v1 import worker_pb2


def test_ranks_and_the_ports_next_to_them(tmp_path: Path) -> None:
    config = EngineConfig(model_dir=tmp_path, device="cuda", tp=4)
    limits = ProcessLimits(
        cores=frozenset(range(8)), memory_nodes=frozenset({0, 1}), memory_refusal="no"
    )
    placed = place_ranks(config, Host(FakedHost(tmp_path).root, {}), limits)
    info = worker_pb2.GetInfoResponse(ranks=told(placed))
    ranks = ranks_of(worker_pb2.GetInfoResponse.FromString(info.SerializeToString()))
    out = io.StringIO()
    named = [(f"decode-0/{number}", rank) for number, rank in enumerate(ranks)]
    show_hosts(Console(file=out, width=100), {"box": named})
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines[0] == ["host", "box"]
    assert lines[2] == [
        *("decode-0/0", "cuda:0", "0000:18:00.0", "0", "0-3", "not", "bound", "mlx5_0:1,eth0,lo")
    ]
    assert lines[5][:6] == ["decode-0/3", "cuda:3", "0000:ab:00.0", "1", "4-7", "not"]
    assert lines[5][-1] == "mlx5_1:1,eth0,lo"
    (first,) = [
        line for line in out.getvalue().splitlines() if line.startswith("ports from decode-0/0,")
    ]
    assert first == (
        "ports from decode-0/0, nearest first: mlx5_0:1 PIX ACTIVE, eth0 NODE up, "
        "mlx5_1:1 SYS ACTIVE, docker0 down, lo unknown"
    )
