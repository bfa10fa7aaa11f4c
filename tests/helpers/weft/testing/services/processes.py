"""Real processes for tests: started with a ready file, ended for sure."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil


class ServiceProcess:
    """A child process that writes a JSON ready file; a context manager that ends it.

    Its output goes to `<folder>/<name>.log`, which a failed start shows.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts `command` with `--ready-file` added."""
        self.name = name
        self.log_path = folder / f"{name}.log"
        self.ready_path = folder / f"{name}.ready.json"
        self.ready_path.unlink(missing_ok=True)
        self._log: IO[bytes] = self.log_path.open("ab")
        self._process = subprocess.Popen(
            [*command, "--ready-file", str(self.ready_path)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Content of the ready file, as soon as it is there."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise AssertionError(
                    f"{self.name} ended with {self._process.returncode}:\n{self.log}"
                )
            if self.ready_path.exists():
                content: dict[str, Any] = json.loads(self.ready_path.read_text())
                return content
            time.sleep(0.02)
        raise AssertionError(f"{self.name} was not ready after {timeout_s} s:\n{self.log}")

    async def ready(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Like `wait_ready`, without blocking the event loop."""
        return await asyncio.to_thread(self.wait_ready, timeout_s)

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Exit status; AssertionError when it goes on for longer."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end:\n{self.log}") from None

    def end(self) -> None:
        """SIGTERM, then SIGKILL; returns when the process is gone."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


def listening_ports() -> set[int]:
    """TCP ports that this process listens on."""
    found = psutil.Process().net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}
