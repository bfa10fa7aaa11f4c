"""An engine in a process of its own, controlled over a pipe."""

from __future__ import annotations

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

IDLE_S = 2e-4


@dataclass
class FromWorker:
    """Results of a turn, or at first the epoch."""

    at: float = 0.0
    """Seconds of the host's monotonic clock."""
    sessions: list[GatewayBatch] = field(default_factory=list)
    fill_commands: list[FillCommand] = field(default_factory=list)
    fill_replies: list[FillReply] = field(default_factory=list)
    lease_replies: list[LeaseReply] = field(default_factory=list)
    epoch: int = 0
    transport: str = ""
    counters: dict[str, int] = field(default_factory=dict)


def run_worker(connection: Connection, config: dict[str, Any]) -> None:
    """The process's main function: loads, sends its epoch, then turns until it receives `close`."""
    resolved = EngineConfig(**config)
    engine = Engine(resolved, load_parts(resolved))
    engine.leave_steps()
    connection.send(
        FromWorker(epoch=engine.info.epoch, transport=engine.parts.transport.describe())
    )
    is_open = True
    while is_open:
        inbox = Inbox()
        rest_s = min(engine.rest_s(), engine.arrival_poll_s() or IDLE_S)
        while connection.poll(min(IDLE_S, rest_s)):
            kind, content = connection.recv()
            if kind == "close":
                is_open = False
            elif kind == "counters":
                connection.send(FromWorker(counters=engine.counters()))
            else:
                getattr(inbox, kind).extend(content)
        outbox = engine.turn(inbox)
        if outbox.gateways or outbox.fill_commands or outbox.fill_replies or outbox.lease_replies:
            connection.send(
                FromWorker(
                    at=time.monotonic(),
                    sessions=outbox.gateways,
                    fill_commands=outbox.fill_commands,
                    fill_replies=outbox.fill_replies,
                    lease_replies=outbox.lease_replies,
                )
            )
    engine.close()
