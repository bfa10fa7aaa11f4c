"""The server process's side: spawns the engine, sends inboxes, dispatches outboxes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from weft.common.settings import LogFormat, LogLevel
from weft.common.worker.frames import (
    HEADER,
    MAX_FRAME_BYTES,
    READ_BYTES,
    EngineMessages,
    frame,
    merge,
    parse_from_engine,
)
from weft.contract.binding import Binding
from weft.contract.cores import num_cores, parse_cores
from weft.contract.errors import ConfigError, Internal, PeerUnavailable, error_class
from weft.contract.messages import Inbox, Outbox
from weft.contract.reports import EngineInfo, LoadReport
from weft.engine.base.config import EngineConfig
from weft.engine.base.placement import NET_VARIABLE, bound_command

logger = logging.getLogger(__name__)

SPIN_COUNT = "1000"
"""GOMP_SPINCOUNT: engines that share cores must not spin (docs/decisions)."""
KERNEL_CACHE = "weft.kernels.shared.kernel_cache:UsedKernels"
"""TRITON_CACHE_MANAGER: the class that tells which compiled kernels an engine uses."""
EXIT_GRACE_S = 3.0
MAX_UNREAD_BYTES = 16 << 20
"""`room` waits while the engine has more unread bytes than this."""


class EngineClient:
    """One engine process, and the socket to it.

    Args:
        on_outbox: Called on the loop for every outbox.
        on_progress: Called with (done, total, what in words) while the engine loads; a total of 0
            is unknown.
        black_box: Folder for the process's traces after a stall or crash; None: it leaves none.
        log_level: Least level that it logs.
        log_format: Format of its logs.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outbox: Callable[[Outbox], None],
        on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
        black_box: Path | None = None,
        *,
        log_level: LogLevel = "info",
        log_format: LogFormat = "auto",
    ) -> None:
        self._config = config
        self._on_outbox = on_outbox
        self._on_progress = on_progress
        self._black_box = black_box
        self._logging = (log_level, log_format)
        self._process: asyncio.subprocess.Process | None = None
        self.spawned_at = 0.0
        """Seconds since the epoch."""
        self._writer: asyncio.StreamWriter | None = None
        self._orders: asyncio.StreamWriter | None = None
        self._pending: Inbox | None = None
        self._reading: asyncio.Task[None] | None = None
        self._reading_orders: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        # An engine that nobody waits for any more may fail.
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self.info: EngineInfo | None = None
        self.load: LoadReport | None = None
        self.last_turn_at = 0.0
        """Monotonic time of the engine's last message."""
        self.gone: asyncio.Future[str] = self._loop.create_future()
        """Resolves with the reason once the engine process has died."""

    @property
    def pid(self) -> int:
        """Of the engine's process, once it was spawned."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> EngineInfo:
        """Spawns the engine and waits until it is ready.

        Raises:
            WeftError: It could not start; the message says why.
        """
        await self.spawn()
        self.configure(self._config)
        return await self.wait_ready()

    async def spawn(self) -> None:
        """Spawns the engine, which waits for `configure`."""
        ours, theirs = socket.socketpair()
        our_orders, their_orders = socket.socketpair()
        environment = dict(os.environ)
        if self._config.num_threads:
            environment["OMP_NUM_THREADS"] = str(self._config.num_threads)
        binding = self._config.bindings[0] if self._config.bindings else Binding()
        cores = parse_cores(binding.cores) or None
        environment.setdefault("OMP_NUM_THREADS", str(num_cores(cores)))
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        environment.setdefault("TRITON_CACHE_MANAGER", KERNEL_CACHE)
        if binding.net_devices:
            environment[NET_VARIABLE] = binding.net_devices
        command = [
            *(sys.executable, "-m", "weft.common.worker.engine_process"),
            *(str(theirs.fileno()), str(their_orders.fileno()), str(os.getpid())),
            *(f"{self._config.role}-engine", *self._logging),
            *([] if self._black_box is None else [str(self._black_box)]),
        ]
        self.spawned_at = time.time()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *bound_command(command, binding),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), their_orders.fileno()),
                env=environment,
            )
        finally:
            theirs.close()
            their_orders.close()
        replies, self._orders = await asyncio.open_connection(sock=our_orders)
        self._reading_orders = asyncio.create_task(self._read_orders(replies))
        reader = await self.connect(ours)
        self._reading = asyncio.create_task(self._read(reader, self._ready))

    def configure(self, config: EngineConfig) -> None:
        """Lets the spawned engine load, with these settings."""
        assert self._writer is not None
        self._writer.write(frame(config))

    async def wait_ready(self) -> EngineInfo:
        """Waits until the spawned engine is ready.

        Raises:
            WeftError: It could not start; the message says why.
        """
        return await self._ready

    async def connect(self, end: socket.socket) -> asyncio.StreamReader:
        """Uses a connection for sending from now on; returns the reader of the other direction."""
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, READ_BYTES)
        reader, self._writer = await asyncio.open_connection(sock=end, limit=1 << 20)
        self._writer.transport.set_write_buffer_limits(MAX_UNREAD_BYTES)
        return reader

    @property
    def loop_age_s(self) -> float:
        """Seconds since the engine's last message."""
        return time.monotonic() - self.last_turn_at

    def require(self) -> None:
        """Raises PeerUnavailable if the engine is gone."""
        if self.gone.done():
            raise PeerUnavailable(f"the engine is gone: {self.gone.result()}", stage="decode")

    def send(self, inbox: Inbox) -> None:
        """Sends an inbox together with everything else of this iteration of the event loop.

        Raises:
            PeerUnavailable: The engine is gone.
        """
        self.require()
        if self._pending is None:
            self._pending = inbox
            self._loop.call_soon(self._flush)
        else:
            merge(self._pending, inbox)

    async def room(self) -> None:
        """Waits while the engine has too many unread bytes, as when it stalls. Callers use it for
        messages of which a peer could send any number, such as pages.
        """
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):  # `gone` reports the engine's end.
                await self._writer.drain()

    def order(self, inbox: Inbox) -> None:
        """Sends fault orders, which are executed even while the engine's loop is stalled.

        Raises:
            PeerUnavailable: The engine is gone.
        """
        if self.gone.done() or self._orders is None:
            raise PeerUnavailable("the engine is gone", stage="faults")
        self._orders.write(frame(inbox))

    async def stop(self) -> None:
        """Closes the socket, on which the engine exits; kills it if it does not."""
        if self._process is None:
            return
        if self._writer is not None:
            self._writer.close()
        if self._orders is not None:
            self._orders.close()
        try:
            await asyncio.wait_for(self._process.wait(), EXIT_GRACE_S)
        except TimeoutError:
            self._kill()
            await self._process.wait()
        reading = (self._reading, self._reading_orders)
        await asyncio.gather(*(task for task in reading if task), return_exceptions=True)

    def _flush(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(pending))

    async def _read(self, reader: asyncio.StreamReader, ready: asyncio.Future[EngineInfo]) -> None:
        reason = "its socket closed"
        try:
            while True:
                message = await _message(reader)
                self.last_turn_at = time.monotonic()
                if message.outbox is not None:
                    self.load = message.outbox.load or self.load
                    self._on_outbox(message.outbox)
                elif message.info is not None:
                    self.info = message.info
                    ready.set_result(message.info)
                elif message.progress is not None:
                    self._on_progress(*message.progress)
                elif message.failure is not None and ready.done():
                    reason = message.failure.message
                elif message.failure is not None:
                    error = error_class(message.failure.reason)(message.failure.message)
                    ready.set_exception(error)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:
            logger.exception("reading from the engine failed")
            reason = f"{type(error).__name__}: {error}"
        finally:
            status = await self._exit_status()
            if not ready.done():
                ready.set_exception(ConfigError(f"the engine exited during its start ({status})"))
            if not self.gone.done():
                self.gone.set_result(f"{reason}, {status}")

    async def _read_orders(self, reader: asyncio.StreamReader) -> None:
        """Replies to fault orders do not show that the engine's loop turns."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while (message := await _message(reader)).outbox is not None:
                self._on_outbox(message.outbox)

    async def _exit_status(self) -> str:
        assert self._process is not None
        try:
            code = await asyncio.wait_for(self._process.wait(), EXIT_GRACE_S)
        except TimeoutError:
            self._kill()
            code = await self._process.wait()
        return f"exit status {code}" if code >= 0 else f"signal {-code}"

    def _kill(self) -> None:
        assert self._process is not None
        # The process has ended, and its end was not noticed yet.
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


async def _message(reader: asyncio.StreamReader) -> EngineMessages:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    if length > MAX_FRAME_BYTES:
        raise Internal(f"the engine sent a frame of {length} bytes")
    return parse_from_engine(await reader.readexactly(length))
