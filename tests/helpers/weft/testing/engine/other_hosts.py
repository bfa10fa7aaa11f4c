"""The other hosts of engines whose host 0 is this process, as processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from weft.cli.up.ports import free_ports
from weft.engine.base.config import Role
from weft.testing.engine import host_process
from weft.testing.engine.host_network import Network
from weft.testing.engine.nccl_members import sharing_a_gpu


@contextmanager
def other_hosts(
    folder: Path,
    count: int,
    network: Network | None = None,
    devices: Sequence[str] = (),
    role: Role = "decode",
    tp: int = 1,
) -> Iterator[dict[str, Any]]:
    """Starts them for a model; the value is the settings of host 0. Close its engine first.

    Args:
        network: In which they are; None: loopback.
        devices: Those of each host, separated by commas; empty: the CPU. If the first ranks of
            consecutive stages share a GPU, NCCL connects them over sockets.
        tp: Ranks of each host.
    """
    (port,) = free_ports("127.0.0.1", 1)
    meet = "127.0.0.1" if network is None else network.of_tests
    settings = {"pp": count, "hosts": count, "tp": tp, "num_threads": 1}
    settings |= {"rendezvous": f"{meet}:{port}"}
    processes = []
    firsts = [one.partition(",")[0] for one in [*devices[1:], *devices[:1]]]
    is_shared = any(one == other for one, other in pairwise(firsts))
    members = [sharing_a_gpu(f"host {host}") if is_shared else {} for host in range(count)]
    try:
        for host in range(1, count):
            device = {"device": devices[host]} if devices else {}
            own = json.dumps(settings | {"host_rank": host, "role": role} | device)
            command = [] if network is None else network.before(host)
            command += [sys.executable, "-m", host_process.__name__, str(folder), own, "[]"]
            environment = os.environ | members[host]
            processes.append(subprocess.Popen(command, env=environment))
        with patch.dict(os.environ, members[0]):
            yield settings | ({"device": devices[0]} if devices else {})
    finally:
        for process in processes:
            process.kill()
            process.wait()
