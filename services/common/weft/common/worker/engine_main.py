"""The engine process of a worker.

`python -m weft.common.worker.engine_process FD ORDERS_FD PARENT_PID NAME LEVEL FORMAT [DIR]`

It is spawned by the server process with one end of a socket pair, and of a second one for fault
orders. It ends when the first one closes, and the kernel ends it when the server process dies in
any other way. In DIR it leaves files that explain a stall or death (`black_box.py`).
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import cast

from weft.common.faults import allow_sabotage
from weft.common.settings import LogFormat, LogLevel
from weft.common.telemetry.logging import configure_logging
from weft.common.worker.black_box import BlackBox
from weft.common.worker.fault_orders import obey_orders
from weft.common.worker.frames import (
    HEADER,
    MAX_FRAME_BYTES,
    READ_BYTES,
    EngineMessages,
    frame,
    merge,
    parse_config,
    parse_inbox,
)
from weft.contract import faults
from weft.contract.errors import ConfigError, Internal, RanksLost, WeftError
from weft.contract.messages import Inbox, Outbox
from weft.contract.start_work import COMPILING, START_WORK
from weft.engine.base.processes import die_with_parent, give_way_at_once
from weft.engine.loop.build import load_parts
from weft.engine.loop.engine import Engine
from weft.engine.loop.outgoing import failure_of

logger = logging.getLogger(__name__)

_EMPTY = Outbox()


class ServerGone(Exception):
    """The server process has closed its end."""


class ServerLink:
    """The engine's end of the socket; reads do not block, writes are buffered."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        """Ends a `wait` from another thread."""
        os.eventfd_write(self._wake, 1)

    def wait(self, timeout_s: float) -> bool:
        """Waits for a message, a wake-up or the time-out; False: it was the time-out."""
        # `poll` counts in milliseconds, too coarse for a step.
        number = self._sock.fileno()
        sending = [number] if self._unsent else []
        readable, writable, _ = select.select([self._wake, number], sending, [], timeout_s)
        if self._wake in readable:
            os.eventfd_read(self._wake)
        return bool(readable or writable)

    def read(self) -> list[bytes]:
        """Returns the bodies of the frames that have arrived.

        Raises:
            ServerGone: The other end is closed.
        """
        while True:
            try:
                data = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError as error:
                raise ServerGone from error
            if not data:
                raise ServerGone
            self._received += data
            if len(data) < READ_BYTES:
                break
        return self._split()

    def write(self, message: EngineMessages) -> None:
        """Queues a frame and sends what the socket takes."""
        self._unsent.append(memoryview(frame(message)))
        self.flush()

    def flush(self) -> None:
        """Sends as much as the socket accepts now."""
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent[0])
                if sent == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent:]
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise ServerGone from error

    def _split(self) -> list[bytes]:
        bodies, start = [], 0
        while len(self._received) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._received, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = start + HEADER.size + length
            if len(self._received) < end:
                break
            with memoryview(self._received) as received:
                bodies.append(bytes(received[start + HEADER.size : end]))
            start = end
        del self._received[:start]
        return bodies


def load(link: ServerLink) -> Engine:
    """Reads the config frame and loads the engine, reporting progress."""
    bodies: list[bytes] = []
    while not bodies:
        link.wait(1.0)
        bodies = link.read()
    config = parse_config(bodies[0])
    if config.enable_faults:
        faults.BOARD.enable()
        allow_sabotage("worker")
    if config.device.startswith("cpu"):
        give_way_at_once()
    last, phase = 0.0, (0, 0, "")

    def progress(done: int, total: int, what: str) -> None:
        nonlocal last, phase
        now, phase = time.monotonic(), (done, total, what)
        if done in (0, total) or now - last > 0.1:
            last = now
            link.write(EngineMessages(progress=phase))

    def observe(work: str, begins: bool) -> None:
        # Half a minute of a first start, which would otherwise count as the phase around it.
        if work == COMPILING and threading.current_thread() is threading.main_thread():
            link.write(EngineMessages(progress=(0, 0, work) if begins else phase))

    START_WORK.observe = observe
    engine = Engine(config, load_parts(config, wake=link.wake, progress=progress))
    # Loaded objects live as long as the process, so the garbage collector need not visit them.
    gc.collect()
    gc.freeze()
    link.write(EngineMessages(info=engine.info))
    return engine


def run(engine: Engine, link: ServerLink) -> None:
    """Runs the engine's loop until the server is gone."""
    engine.leave_steps()
    while True:
        inbox: Inbox | None = None
        for body in link.read():
            received = parse_inbox(body)
            inbox = received if inbox is None else merge(inbox, received)
        if inbox is not None and inbox.log_level:
            logging.getLogger().setLevel(inbox.log_level.upper())
        outbox = engine.turn(inbox)
        if outbox != _EMPTY:
            link.write(EngineMessages(outbox=outbox))
        else:
            link.flush()
        if (rest_s := engine.rest_s()) > 0.0:
            rest(engine, link, rest_s)


def rest(engine: Engine, link: ServerLink, most_s: float) -> None:
    """Waits for a message, a wake-up, arrived pages or the time-out."""
    poll_s = engine.arrival_poll_s()
    if poll_s is None:
        link.wait(most_s)
        return
    until = time.monotonic() + most_s
    while (left_s := until - time.monotonic()) > 0.0:
        if link.wait(min(left_s, poll_s)) or engine.has_arrived():
            return


def main(argv: list[str]) -> int:
    """Entry point of the engine process."""
    descriptor, orders_descriptor, parent_pid = (int(number) for number in argv[:3])
    die_with_parent(parent_pid)
    # Ctrl-C reaches the whole process group; the server decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    level, fmt = cast("LogLevel", argv[4]), cast("LogFormat", argv[5])
    configure_logging(argv[3], level, fmt)
    black_box = BlackBox(Path(argv[6])) if len(argv) > 6 else None
    link = ServerLink(socket.socket(fileno=descriptor))
    try:
        engine = load(link)
    except ServerGone:
        return 1
    except (WeftError, MemoryError, RuntimeError, RanksLost) as error:
        known = error if isinstance(error, WeftError) else ConfigError(str(error))
        link.write(EngineMessages(failure=failure_of(known)))
        return 1
    if black_box is not None:
        black_box.watch(engine)
    if faults.BOARD.is_enabled:
        obey_orders(socket.socket(fileno=orders_descriptor))
    logger.info("the engine is loaded", extra={"pid": os.getpid(), "pages": engine.info.num_pages})
    try:
        run(engine, link)
    except ServerGone:
        engine.close()
        return 0
    except RanksLost as lost:
        logger.critical("the engine ends: %s", lost)
        link.write(EngineMessages(failure=failure_of(Internal(str(lost), stage="decode"))))
        if black_box is not None:
            black_box.failed()
        return 1
    except Exception:
        logger.exception("the engine ends")
        if black_box is not None:
            black_box.failed()
        return 1
    return 0
