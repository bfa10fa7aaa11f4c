"""The gateway's media processes: started at the first image, bounded, replaced when they fail."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from weft.contract.errors import DeadlineExceeded, PeerUnavailable
from weft.gateway.admission.admission import Admission
from weft.gateway.media import frames

_log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_BUFFER_BYTES = 1 << 20
_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(8 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
"""Has glibc return the memory of large files, and keep that of pictures of usual sizes for the next
ones: asking for it anew takes as long as decoding them.
"""
_KEPT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LANG", "TMPDIR")
"""Names of the environment that a process gets. Others may be secrets, and decoders read bytes of
strangers.
"""

Reply = tuple[dict[str, Any], bytearray]


class _Process:
    def __init__(self) -> None:
        own, other = socket.socketpair()
        with other:
            for end in (own, other):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            self._peer = own
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weft.gateway.media.process", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                env={name: os.environ[name] for name in _KEPT if name in os.environ} | _MEMORY,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run(self, head: Mapping[str, Any], data: memoryview, deadline: float) -> Reply:
        frames.send(self._peer, head, data, deadline)
        return frames.receive(self._peer, deadline)

    def end(self) -> None:
        self._peer.close()
        self._process.kill()
        self._process.wait()


class MediaPool:
    """Runs jobs in at most `num_processes` processes. Belongs to the event loop."""

    def __init__(self, num_processes: int, max_queued: int, timeout_s: float) -> None:
        """`max_queued` bounds the jobs that wait; `timeout_s` is the longest that a job may take
        once it runs, the start of its process included.
        """
        self._admission = Admission(num_processes, max_queued)
        self._timeout_s = timeout_s
        self._num_processes = num_processes
        self._threads: ThreadPoolExecutor | None = None
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._is_closed = False
        self.num_failures: dict[str, int] = {"timeout": 0, "crash": 0}
        """Processes that were replaced, by the reason."""

    @property
    def num_running(self) -> int:
        return self._admission.num_running

    @property
    def num_queued(self) -> int:
        return self._admission.num_queued

    @property
    def pids(self) -> list[int]:
        """Of the processes that live now."""
        return [process.pid for process in list(self._all)]

    async def run(
        self, head: Mapping[str, Any], data: memoryview, *, deadline: float, tenant: str = ""
    ) -> Reply:
        """Runs one job. `deadline`, in the event loop's time, bounds the wait for a process.

        Raises:
            Overloaded: Too many jobs wait.
            DeadlineExceeded: No process became free in time, or the job took too long.
            PeerUnavailable: The job's process died.
        """
        loop = asyncio.get_running_loop()
        admitted = await self._admission.admit(1, deadline, tenant)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_processes, thread_name_prefix="media")
        job = self._threads.submit(self._run, head, data)
        # The place is released when the job has ended, even if the caller has left before.
        job.add_done_callback(_in_loop(loop, admitted.release))
        try:
            return await asyncio.wrap_future(job)
        finally:
            del job

    def close(self) -> None:
        """Ends all processes, and with them their jobs."""
        self._is_closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._all):
            process.end()

    def _run(self, head: Mapping[str, Any], data: memoryview) -> Reply:
        deadline = time.monotonic() + self._timeout_s
        process = self._take()
        try:
            reply = process.run(head, data, deadline)
        except TimeoutError:
            self._drop(process, "timeout")
            raise DeadlineExceeded(
                f"an image took longer than {self._timeout_s:g} s to process", stage="media"
            ) from None
        except frames.PeerGone:
            self._drop(process, "crash")
            raise PeerUnavailable(
                "the process that worked on an image has died; send the request again",
                stage="media",
                retry_after_s=_RETRY_AFTER_S,
            ) from None
        except BaseException:
            self._drop(process, "crash")
            raise
        self._idle.append(process)
        return reply

    def _take(self) -> _Process:
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                process = _Process()
                self._all.add(process)
                return process
            if process.is_alive:
                return process
            self._drop(process, "crash")

    def _drop(self, process: _Process, reason: str) -> None:
        self._all.discard(process)
        process.end()
        if not self._is_closed:
            self.num_failures[reason] += 1
            _log.warning("media process %d was ended: %s", process.pid, reason)


def _in_loop(
    loop: asyncio.AbstractEventLoop, call: Callable[[], None]
) -> Callable[[Future[Reply]], None]:
    def done(_: Future[Reply]) -> None:
        with contextlib.suppress(RuntimeError):  # the gateway has stopped
            loop.call_soon_threadsafe(call)

    return done
