"""DecodeService: gateways' Sessions with the engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from weft.common.rpc.streams import first_message
from weft.common.telemetry.request_log import LoggedPrompt
from weft.common.worker.context import WorkerContext
from weft.contract.errors import InvalidRequest, PeerUnavailable
from weft.contract.messages import Inbox, Outbox
from weft.contract.submits import Submit
from weft.decode.ledger import Ledger
from weft.decode.session import Session
from weft.decode.spans import RequestSpans
from weft.v1 import decode_pb2, decode_pb2_grpc

logger = logging.getLogger(__name__)


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Implements weft.v1.DecodeService."""

    name = "weft.v1.DecodeService"

    def __init__(self, context: WorkerContext) -> None:
        settings = context.settings
        self._engine = context.engine
        self._info = context.info
        self._worker_id = context.worker_id
        self._spans = RequestSpans(context.tracer)
        self._ledger: Ledger | None = None
        if settings.crash_dir is not None:
            self._ledger = Ledger(settings.crash_dump_tokens)
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count(1)

    def add_to(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def Session(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[decode_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[Any, decode_pb2.SessionEvent],
    ) -> None:
        first = await first_message(request_iterator)
        if first is None or first.WhichOneof("request") != "hello":
            raise InvalidRequest("the first message of a Session is `hello`", param="request")
        self._engine.require()
        number = next(self._numbers)
        ping_interval_s = first.hello.ping_interval.ToNanoseconds() / 1e9
        session = self._sessions[number] = Session(
            number, self._engine, self._worker_id, self._on_submit, ping_interval_s
        )
        welcome = decode_pb2.SessionEvent.Welcome(
            worker_id=self._worker_id, worker_epoch=self._info.epoch
        )
        logger.info("session opened", extra={"gateway": first.hello.gateway_id, "session": number})
        reading = asyncio.create_task(session.read(request_iterator))
        writing: asyncio.Task[None] | None = None
        try:
            await context.write(decode_pb2.SessionEvent(welcome=welcome))
            writing = asyncio.create_task(session.write(context))
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                await writing
            await reading
        finally:
            for task in (reading, writing):
                if task is not None:
                    task.cancel()
            await asyncio.gather(*(t for t in (reading, writing) if t), return_exceptions=True)
            del self._sessions[number]
            self._spans.on_session_closed(number)
            if self._ledger is not None:
                self._ledger.on_session_closed(number)
            with contextlib.suppress(PeerUnavailable):
                self._engine.send(Inbox(closed_gateways=[number]))
            logger.info("session closed", extra={"session": number})

    def _on_submit(self, message: decode_pb2.Submit, submit: Submit) -> None:
        if self._ledger is not None:
            self._ledger.on_submit(message, submit.gateway, submit.prompt)
        self._spans.on_submit(submit)

    def on_outbox(self, outbox: Outbox) -> None:
        for batch in outbox.gateways:
            self._spans.on_batch(batch)
            if self._ledger is not None:
                self._ledger.on_batch(batch)
            session = self._sessions.get(batch.gateway)
            if session is not None:
                session.push(batch)

    def sizes(self) -> dict[str, int]:
        """Numbers of sessions, and of incomplete submits."""
        partial = sum(session.num_partial for session in self._sessions.values())
        return {
            "sessions": len(self._sessions),
            "partial_submits": partial,
            "traced": self._spans.num_open,
        }

    def open_requests(self) -> list[LoggedPrompt]:
        return [] if self._ledger is None else self._ledger.prompts()

    def on_engine_gone(self, reason: str) -> None:
        for session in self._sessions.values():
            session.end(PeerUnavailable(f"the engine died: {reason}", stage="decode"))
