"""An engine in a process of its own, controlled over a pipe."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from weft.contract.fills import FillCommand, FillReply, LeaseReply
from weft.contract.messages import Inbox
from weft.contract.submits import GatewayBatch
from weft.engine.base.config import EngineConfig
from weft.engine.loop.build import load_parts
from weft.engine.loop.engine import Engine
from weft.engine.transfer import build as staging_parts

from gpu_mesh.shared import VERSION, CopyReceiver, CopySenders, SharedPages

IDLE_S = 2e-4


@dataclass
class FromWorker:
    """Results of a turn, or a notification for another worker, or at first the epoch."""

    at: float = 0.0
    """Seconds of the host's monotonic clock."""
    sessions: list[GatewayBatch] = field(default_factory=list)
    fill_commands: list[FillCommand] = field(default_factory=list)
    fill_replies: list[FillReply] = field(default_factory=list)
    lease_replies: list[LeaseReply] = field(default_factory=list)
    notification: bytes = b""
    epoch: int = 0
    transport: str = ""
    counters: dict[str, int] = field(default_factory=dict)


def run_worker(connection: Connection, config: dict[str, Any], copy_threads: int) -> None:
    """The process's main function: loads, sends its epoch, then turns until it receives `close`."""
    resolved = EngineConfig(**config)
    if resolved.transport == "data":
        staging_parts.PinnedStagingPages = SharedPages  # type: ignore[assignment,misc]
    engine = Engine(resolved, load_parts(resolved))
    engine.leave_steps()
    lock = threading.Lock()

    def send(message: FromWorker) -> None:
        with lock:
            connection.send(message)

    receiver: CopyReceiver | None = None
    if resolved.transport == "data":
        receiver = _join(engine, SharedPages.path, copy_threads, send)
    send(FromWorker(epoch=engine.info.epoch, transport=engine.parts.transport.describe()))
    is_open = True
    while is_open:
        inbox = Inbox()
        rest_s = min(engine.rest_s(), engine.arrival_poll_s() or IDLE_S)
        while connection.poll(min(IDLE_S, rest_s)):
            kind, content = connection.recv()
            if kind == "close":
                is_open = False
            elif kind == "notification":
                assert receiver is not None
                receiver.arrived(content)
            elif kind == "counters":
                send(FromWorker(counters=engine.counters()))
            else:
                getattr(inbox, kind).extend(content)
        outbox = engine.turn(inbox)
        if outbox.gateways or outbox.fill_commands or outbox.fill_replies or outbox.lease_replies:
            send(
                FromWorker(
                    at=time.monotonic(),
                    sessions=outbox.gateways,
                    fill_commands=outbox.fill_commands,
                    fill_replies=outbox.fill_replies,
                    lease_replies=outbox.lease_replies,
                )
            )
    engine.close()


def _join(engine: Engine, path: str, copy_threads: int, send: Any) -> CopyReceiver | None:
    """Replaces NIXL by plain copies, if this engine exchanges pages."""
    plane = engine.parts.transport
    if plane.staging is None:
        return None
    if engine.config.role == "decode":
        receiver = CopyReceiver(plane.staging.pages, path)
        plane._receiver = receiver  # type: ignore[assignment]
        return receiver

    def notify(payload: bytes) -> None:
        send(FromWorker(notification=payload))

    senders = CopySenders(plane.staging.pages, copy_threads, notify)
    plane._senders = plane.shipper._agents = senders  # type: ignore[assignment]
    engine.filler._nixl_version = VERSION
    return None
