"""Real Valkey or Redis servers for tests: alone, or as a cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from valkey import Valkey
from valkey.exceptions import ValkeyError
from weft.cli.up.ports import free_ports

UNPACKED = Path(__file__).resolve().parents[4] / "tools" / "valkey"
NUM_SLOTS = 16384
READY_S = 60.0


def server_binary() -> str:
    """The server that this machine has."""
    folder = UNPACKED / "usr" / "bin"
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name) or shutil.which(name, path=str(folder)):
            return found
    raise AssertionError("no server: mark the test with needs('valkey')")


class ValkeyServer:
    """One server process; stores nothing on disk except a cluster's map.

    Args:
        folder: For its log.
        flags: Further ones.
        port: 0: any.
        tls: Folder of `weft certs`: it speaks TLS alone, with the certificate of `valkey`, and
            wants one of its clients.
    """

    def __init__(self, folder: Path, *flags: str, port: int = 0, tls: Path | None = None) -> None:
        self.port = port or free_ports("127.0.0.1", 1)[0]
        self._folder = folder / str(self.port)
        self._folder.mkdir(exist_ok=True)
        self._flags = flags
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        if self._tls is None:
            return f"valkey://127.0.0.1:{self.port}"
        return self.tls_url(self._tls / "ca.pem", self._tls)

    def tls_url(self, authority: Path, own: Path | None) -> str:
        """URL for a store that trusts an authority, with the store's certificate of a folder or
        none.
        """
        files = {"ssl_ca_certs": authority}
        if own is not None:
            files |= {"ssl_certfile": own / "kvstore.pem", "ssl_keyfile": own / "kvstore-key.pem"}
        query = "&".join(f"{name}={path}" for name, path in files.items())
        return f"valkeys://127.0.0.1:{self.port}?{query}"

    def start(self) -> None:
        """Starts it, with nothing in it, on the same port as before."""
        libraries = ":".join(str(folder) for folder in (UNPACKED / "usr/lib").glob("*-linux-gnu"))
        command = [
            server_binary(),
            *self._port_flags(),
            *("--bind", "127.0.0.1"),
            *("--dir", str(self._folder)),
            *("--save", ""),
            *("--appendonly", "no"),
            *("--logfile", "server.log"),
            *self._flags,
        ]
        paths = f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        self._process = subprocess.Popen(command, env=os.environ | {"LD_LIBRARY_PATH": paths})
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(ValkeyError), self.client() as client:
                client.ping()
                return
            assert self._process.poll() is None, (self._folder / "server.log").read_text()
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)

    def _port_flags(self) -> list[str]:
        if self._tls is None:
            return ["--port", str(self.port)]
        flags = ["--port", "0", "--tls-port", str(self.port)]
        files = {"cert": "valkey.pem", "key": "valkey-key.pem", "ca-cert": "ca.pem"}
        for kind, name in files.items():
            flags += [f"--tls-{kind}-file", str(self._tls / name)]
        return flags

    def client(self) -> Valkey:
        """A plain client of this server alone."""
        return Valkey.from_url(self.url, socket_timeout=10)

    def page_names(self) -> list[bytes]:
        """Names of the pages in the server."""
        with self.client() as client:
            return sorted(client.scan_iter(match="weft*", count=1000))

    def pause(self) -> None:
        """Stops answering, but keeps the connections."""
        assert self._process is not None
        os.kill(self._process.pid, 19)

    def go_on(self) -> None:
        """Ends `pause`."""
        assert self._process is not None
        os.kill(self._process.pid, 18)

    def kill(self) -> None:
        """Ends it at once; what it holds is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def valkey_server(folder: Path, *flags: str, tls: Path | None = None) -> Iterator[ValkeyServer]:
    """Runs a server for the duration of the block."""
    server = ValkeyServer(folder, *flags, tls=tls)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def valkey_cluster(folder: Path, num_nodes: int = 3) -> Iterator[list[ValkeyServer]]:
    """Nodes with equal shares of the slots, that know one another."""
    nodes: list[ValkeyServer] = []
    flags = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
    buses = free_ports("127.0.0.1", num_nodes)
    try:
        for bus in buses:
            nodes.append(ValkeyServer(folder, *flags, "--cluster-port", str(bus)))
        _join(nodes, buses[0])
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def _join(nodes: Sequence[ValkeyServer], first_bus: int) -> None:
    share = -(-NUM_SLOTS // len(nodes))
    for index, node in enumerate(nodes):
        with node.client() as client:
            first, last = index * share, min((index + 1) * share, NUM_SLOTS) - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, first_bus)
    deadline = time.monotonic() + READY_S
    for node in nodes:
        with node.client() as client:
            while not (
                len(client.execute_command("CLUSTER SLOTS")) == len(nodes)
                and client.execute_command("CLUSTER INFO")["cluster_state"] == "ok"
            ):
                assert time.monotonic() < deadline, "the cluster does not form"
                time.sleep(0.05)
