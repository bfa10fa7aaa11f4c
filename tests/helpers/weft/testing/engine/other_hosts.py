"""The other hosts of engines whose host 0 is this process, as processes of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.cli.up.ports import free_ports
from weft.engine.base.config import Role
from weft.testing.engine import host_process
from weft.testing.engine.host_network import Network


@contextmanager
def other_hosts(
    folder: Path,
    count: int,
    network: Network | None = None,
    devices: Sequence[str] = (),
    role: Role = "decode",
) -> Iterator[dict[str, Any]]:
    """Starts them for a model; the value is the settings of host 0. Close its engine first.

    Args:
        network: In which they are; None: loopback.
        devices: That of each host; empty: the CPU.
    """
    (port,) = free_ports("127.0.0.1", 1)
    meet = "127.0.0.1" if network is None else network.of_tests
    settings = {"pp": count, "hosts": count, "rendezvous": f"{meet}:{port}", "num_threads": 1}
    processes = []
    try:
        for host in range(1, count):
            device = {"device": devices[host]} if devices else {}
            own = json.dumps(settings | {"host_rank": host, "role": role} | device)
            command = [] if network is None else network.before(host)
            command += [sys.executable, "-m", host_process.__name__, str(folder), own, "[]"]
            processes.append(subprocess.Popen(command))
        yield settings | ({"device": devices[0]} if devices else {})
    finally:
        for process in processes:
            process.kill()
            process.wait()
