"""A mesh of its own for the benchmark: `weft up` on free ports."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from serving.load import LoadError
from serving.rest_client import get_json

WEFT = (sys.executable, "-m", "weft.cli")
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0


class MeshError(Exception):
    """The mesh did not start."""


class MeshProcess:
    """A `weft up` with a state folder of its own."""

    def __init__(
        self, model: str, dtype: str, flags: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts it; `wait_until_ready` comes next.

        Args:
            model: As `--model`.
            dtype: As `--dtype`.
            flags: Further flags of `weft up`, in one string.
            environment: Variables beside those of this process.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="weft-bench-")
        self.state = Path(self._folder.name) / "mesh"
        """State folder of the mesh."""
        rest_port, grpc_port = free_ports(2)
        self.url = f"http://127.0.0.1:{rest_port}"
        self.grpc_address = f"127.0.0.1:{grpc_port}"
        self._log_path = Path(self._folder.name) / "up.log"
        arguments = {
            "--model": model,
            "--dtype": dtype,
            "--rest-port": str(rest_port),
            "--grpc-port": str(grpc_port),
            "--state-dir": str(self.state),
        }
        pairs = [part for pair in arguments.items() for part in pair]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*WEFT, "up", *pairs, *shlex.split(flags)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "NO_COLOR": "1", **(environment or {})},
            )

    @property
    def pid(self) -> int:
        """Process id of `weft up`; every other process of the mesh descends from it."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Waits until the mesh answers.

        Raises:
            MeshError: It ended, or was not ready in time; the message ends with its last words.
        """
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            status = self._process.poll()
            if status is not None:
                raise MeshError(f"`weft up` ended with status {status}: {self._last_words()}")
            try:
                get_json(self.url, "/readyz")
            except (OSError, LoadError, ValueError):
                time.sleep(0.25)
            else:
                return
        raise MeshError(f"not ready after {READY_TIMEOUT_S:.0f} s: {self._last_words()}")

    def stop(self) -> None:
        """Stops the mesh as Ctrl-C does."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def _last_words(self) -> str:
        return self._log_path.read_text(errors="replace")[-1500:]


def free_ports(count: int) -> list[int]:
    """Ports of loopback that were free just now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
