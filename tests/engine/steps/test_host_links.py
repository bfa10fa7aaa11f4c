"""What the first ranks of hosts do with their connections, both in this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from weft.cli.up.ports import free_ports
from weft.engine.base.config import EngineConfig
from weft.engine.executor.ranks.hosts import HostRanks, Joined, join
from weft.engine.parallel.stage_links import SocketStages

LONG_S, LARGE = 60.0, (512, 1024)
"""LARGE: rows that fit into no buffer of a connection."""


def join_and_agree(config: EngineConfig) -> Joined:
    host = join(config)
    host.link.send({"phase": "connected", "number": 0, "text": "", "notices": []})
    host.link.receive()
    return host


@contextmanager
def two_hosts() -> Iterator[tuple[HostRanks, Joined]]:
    (port,) = free_ports("127.0.0.1", 1)
    config = EngineConfig(model_dir=Path(), pp=2, hosts=2, rendezvous=f"127.0.0.1:{port}")
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(join_and_agree, replace(config, host_rank=1))
        ranks = HostRanks(config)
        try:
            yield ranks, other.result(LONG_S)
        finally:
            ranks.close()


def test_closing_ends_the_thread_that_reads_rows_ahead(seed: int) -> None:
    with two_hosts() as (ranks, other):
        first = SocketStages(other.rows, other.group, 0, ("", "host 0"), LARGE[0])
        rows, neighbours = torch.randn(LARGE), ranks.neighbours
        assert isinstance(neighbours, SocketStages)
        first.send(rows)
        assert torch.equal(neighbours.receive(rows.shape, rows.dtype), rows)
        ranks.close()
        # The other host's connection is still open, so nothing else ends that thread.
        assert neighbours._coming is not None
        assert neighbours._coming.done()
        first.close()
