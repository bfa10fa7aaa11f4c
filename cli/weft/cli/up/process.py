"""One incarnation of a service: its process, its engine process, its log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

LAUNCHER = Path(__file__).with_name("launch.py")
_POLL_S = 0.05
_SERVER_GRACE_S = 5.0
_TAIL_BYTES = 1 << 16


class ReadyFile(BaseModel):
    """Content of the file that a service writes once it serves. Only workers set the last three
    fields.
    """

    address: str
    pid: int
    metrics_address: str = ""
    admin_address: str = ""
    engine_pid: int | None = None
    worker_id: str | None = None
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """How to start a service; the same for every incarnation."""

    name: str
    """Unique in the mesh, such as `decode-0`; also a worker's id."""
    command: tuple[str, ...]
    """Command line without --ready-file, which is added."""
    ready_file: Path
    log_file: Path
    stop_phase: int = 0
    """Services of a lower phase are stopped first."""
    tells_health: bool = True
    """Whether it answers questions about its liveness over gRPC."""


class ExitedEarly(Exception):
    """A service ended before it was ready, or had to be ended."""

    def __init__(self, name: str, how: str) -> None:
        """`how` describes the service's end."""
        self.name = name
        self.how = how
        super().__init__(f"{name} {how}")


class NotStarted(ExitedEarly):
    """The system could not start the process or open its log: memory, ids or disk are used up."""


def describe_status(status: int) -> str:
    """Exit status in words. As in Popen, it is negative for signals."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


class ProcessWatch:
    """Watches for the end of a process, whoever its parent is. Reuse of the pid does not confuse
    it.
    """

    def __init__(self, pid: int) -> None:
        """Needs a running loop. Raises ProcessLookupError if there is no such process."""
        self._descriptor = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._on_exit)
        self.gone = asyncio.Event()

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self.gone.set()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal. Does nothing if the process is gone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)


class ServiceProcess:
    """A started service, which is reaped when it ends."""

    def __init__(self, spec: ServiceSpec) -> None:
        """Starts the process, or raises NotStarted. Needs a running loop and the main thread: the
        parent-death signal is tied to the forking thread, so that thread must live on.
        """
        self.spec = spec
        self.ready: ReadyFile | None = None
        self._started_at_s = time.monotonic()
        self._engine: ProcessWatch | None = None
        self._follower: asyncio.Task[None] | None = None
        self._progress_file = spec.ready_file.with_suffix(".progress")
        try:
            self._remove_files()
            self._popen, self._server, self._log_begin = _spawn(spec)
        except OSError as error:
            raise NotStarted(
                spec.name, f"could not be started: {error.strerror} ({spec.log_file})"
            ) from error
        self._reaper = asyncio.create_task(self._reap())

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started_at_s

    def last_error(self) -> str:
        """The message of the last error that this incarnation has logged; empty: none is found."""
        try:
            with self.spec.log_file.open("rb") as log:
                log.seek(max(self._log_begin, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = log.read().splitlines()
        except OSError:
            return ""
        for line in reversed(lines):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                entry = json.loads(line)
                if entry["level"] == "error":
                    return str(entry["message"])
        return ""

    @property
    def is_gone(self) -> bool:
        """Whether server and engine have ended."""
        return self._reaper.done()

    async def wait_ready(self, on_progress: Callable[[int, int, str], None]) -> ReadyFile:
        """Waits for the ready file. Calls `on_progress` with (done, total, description) of a phase
        of a worker's start; total 0: unknown. Raises ExitedEarly if the process ends first.
        """
        while not self._server.gone.is_set():
            if (ready := self._read_ready_file()) is not None:
                return ready
            if (loaded := read_progress(self._progress_file)) is not None:
                on_progress(*loaded)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.gone.wait(), _POLL_S)
        how = describe_status(await self.gone())
        raise ExitedEarly(self.spec.name, f"{how} before it was ready")

    async def gone(self) -> int:
        """Waits until both the server and its engine are certainly gone; returns the exit status.
        When one of them ends, the other is killed: the engine at once, the server after a grace
        period, since it ends by itself.
        """
        return await asyncio.shield(self._reaper)

    def send(self, number: signal.Signals) -> None:
        if not self.is_gone:
            self._server.send(number)

    def kill(self) -> None:
        """Ends the server and its engine at once."""
        self.send(signal.SIGKILL)  # `_reap` then kills the engine.

    def _read_ready_file(self) -> ReadyFile | None:
        try:
            content = self.spec.ready_file.read_bytes()
            self.ready = ReadyFile.model_validate_json(content)
        except (FileNotFoundError, ValidationError):  # not there yet, or being written
            return None
        if self.ready.engine_pid is not None:
            # If the engine is gone, the server ends by itself.
            with contextlib.suppress(ProcessLookupError):
                self._engine = ProcessWatch(self.ready.engine_pid)
                self._follower = asyncio.create_task(self._follow_engine(self._engine))
        return self.ready

    async def _follow_engine(self, engine: ProcessWatch) -> None:
        await engine.gone.wait()
        try:
            await asyncio.wait_for(self._server.gone.wait(), _SERVER_GRACE_S)
        except TimeoutError:
            self._server.send(signal.SIGKILL)

    async def _reap(self) -> int:
        await self._server.gone.wait()
        # The process has not been waited for, so its pid and group id cannot have been reused.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        if self.ready is None:
            self._read_ready_file()
        if self._engine is not None:
            self._engine.send(signal.SIGKILL)
            await self._engine.gone.wait()
            self._engine.close()
        if self._follower is not None:
            self._follower.cancel()
        self._server.close()
        self._remove_files()
        return self._popen.wait()

    def _remove_files(self) -> None:
        self.spec.ready_file.unlink(missing_ok=True)
        self._progress_file.unlink(missing_ok=True)


def _spawn(spec: ServiceSpec) -> tuple[subprocess.Popen[bytes], ProcessWatch, int]:
    """Makes the service's folders again if they were removed. The last result is where its part of
    the log begins.
    """
    for folder in (spec.log_file.parent, spec.ready_file.parent):
        folder.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid())]
    with spec.log_file.open("ab") as log:
        log_begin = log.tell()
        popen = subprocess.Popen(
            [*launcher, *spec.command, "--ready-file", str(spec.ready_file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # The supervisor handles Ctrl-C and stops services in its own order.
            start_new_session=True,
        )
    try:
        return popen, ProcessWatch(popen.pid), log_begin
    except OSError:
        popen.kill()
        popen.wait()
        raise


def read_progress(file: Path) -> tuple[int, int, str] | None:
    """Reads the line `done total what` of the file that a worker keeps next to its ready file while
    it loads; None: there is no line yet.
    """
    try:
        done, total, what = file.read_text().split(maxsplit=2)
        return int(done), int(total), what.strip()
    except (FileNotFoundError, ValueError):  # not there yet, or being written
        return None
