"""One gateway's Session: receives submits, sends one merged message for one or more steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from weft.common.worker.engine_client import EngineClient
from weft.contract import faults
from weft.contract.codec.pairs import CANCEL, SESSION_END
from weft.contract.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PeerUnavailable,
    WeftError,
)
from weft.contract.messages import Inbox
from weft.contract.submits import MAX_ID_BYTES, Failed, GatewayBatch, Ping, Submit
from weft.decode.assembly import Assembly
from weft.decode.events import batch_to_proto, merge_batches
from weft.engine.loop.outgoing import failure_of
from weft.v1 import decode_pb2

logger = logging.getLogger(__name__)

MAX_PARTIAL_SUBMITS = 256
PARTS_TIMEOUT_S = 30.0
"""Longest time from the first message of a submit to its last; gateways send them one after the
other.
"""
MAX_ASKED = 2000
DRAIN_TIMEOUT_S = 5.0
"""A gateway that takes nothing for this long loses its Session."""
SILENCE_TIMEOUT_S = 5.0
"""A gateway that sends nothing for this long, not even pings, or misses `MISSED_PINGS` of them in a
row, loses its Session.
"""
MISSED_PINGS = 4


class Session:
    """State of one Session stream."""

    def __init__(
        self,
        number: int,
        engine: EngineClient,
        worker_id: str,
        on_submit: Callable[[decode_pb2.Submit, Submit], None],
        ping_interval_s: float,
    ) -> None:
        """Creates the session; nothing is read or written yet. `on_submit` is called with each
        request that goes to the engine, and may change it. `ping_interval_s` is the interval of the
        gateway's pings.
        """
        self._number = number
        self._engine = engine
        self._worker_id = worker_id
        self._on_submit = on_submit
        self._silence_timeout_s = max(SILENCE_TIMEOUT_S, MISSED_PINGS * ping_interval_s)
        self._unsent: list[GatewayBatch] = []
        self._has_unsent = asyncio.Event()
        self._partial: dict[tuple[str, int], tuple[Assembly, float]] = {}
        """Incomplete submits, oldest first, with the loop time at which they are given up."""
        self._end: WeftError | None = None
        self._streams: dict[tuple[str, int], int] = {}
        """Number of the first sample of each open attempt whose tokens may come as columns."""
        self._open: dict[tuple[str, int], set[int]] = {}
        """Samples of these that have not ended."""

    @property
    def num_partial(self) -> int:
        """Number of incomplete submits."""
        return len(self._partial)

    async def _next(
        self, requests: AsyncIterator[decode_pb2.SessionRequest]
    ) -> decode_pb2.SessionRequest | None:
        try:
            return await asyncio.wait_for(anext(requests, None), self._silence_timeout_s)
        except TimeoutError:
            message = f"the gateway was silent for {self._silence_timeout_s:g} s"
            raise PeerUnavailable(message, stage="session") from None

    def push(self, batch: GatewayBatch) -> None:
        """Queues a step's results, to be sent with everything else that is unsent."""
        self._unsent.append(batch)
        self._has_unsent.set()

    def end(self, error: WeftError) -> None:
        """Ends the stream with an error."""
        self._end = error
        self._has_unsent.set()

    async def read(self, requests: AsyncIterator[decode_pb2.SessionRequest]) -> None:
        """Forwards the gateway's requests until its side ends.

        Raises:
            PeerUnavailable: the gateway is silent: its process or host is stopped, or the network
            is cut.
            InvalidRequest: the gateway violates the contract in a way that no single request can be
            failed for.
        """
        while (request := await self._next(requests)) is not None:
            kind = request.WhichOneof("request")
            self._give_up_late()
            if kind == "submit":
                if faults.SESSION_SUBMIT.is_armed:
                    for submit in await faults.SESSION_SUBMIT.repeat_async(request.submit):
                        self._submit(submit)
                    continue
                self._submit(request.submit)
            elif kind == "prompt_part":
                self._part(request.prompt_part)
            elif kind == "generated_part":
                self._part(request.generated_part)
            elif kind == "cancel":
                self._cancel(request.cancel)
            elif kind == "ping":
                self._ping(request.ping)
            elif kind == "end_session":
                self._end_session(request.end_session)

    def _ping(self, message: decode_pb2.SessionRequest.Ping) -> None:
        if len(message.asked) > MAX_ASKED:
            raise InvalidRequest(f"a ping asks for at most {MAX_ASKED} requests", param="asked")
        if any(len(key.request_id.encode()) > MAX_ID_BYTES for key in message.asked):
            raise InvalidRequest(f"request_id: at most {MAX_ID_BYTES} bytes", param="asked")
        asked = [(key.request_id, key.attempt) for key in message.asked]
        ping = Ping(
            gateway=self._number,
            nonce=message.nonce,
            asked=asked,
            expects_constraints=message.constraints,
        )
        self._engine.send(Inbox(pings=[ping]))

    async def write(self, context: grpc.aio.ServicerContext[Any, decode_pb2.SessionEvent]) -> None:
        """Sends batches until the Session ends.

        Raises:
            WeftError: the engine died, or the gateway takes nothing.
        """
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            if self._unsent:
                unsent, self._unsent = self._unsent, []
                batch = unsent[0] if len(unsent) == 1 else merge_batches(unsent)
                for event in batch_to_proto(
                    batch, self._worker_id, self._engine.loop_age_s, self._streams
                ):
                    await self._send(context, event)
                self._forget_ended(batch)
            if self._end is not None:
                raise self._end

    def _forget_ended(self, batch: GatewayBatch) -> None:
        for finished in batch.finished:
            key = (finished.request_id, finished.attempt)
            if (left := self._open.get(key)) is not None:
                left.discard(finished.sample)
                if not left:
                    del self._open[key], self._streams[key]
        for failed in batch.failed:
            key = (failed.request_id, failed.attempt)
            if self._open.pop(key, None) is not None:
                del self._streams[key]

    async def _send(
        self,
        context: grpc.aio.ServicerContext[Any, decode_pb2.SessionEvent],
        event: decode_pb2.SessionEvent,
    ) -> None:
        if faults.SESSION_EVENT.is_armed:
            kind = await faults.SESSION_EVENT.fire_async()
            if kind == "drop":
                return
            if kind == "duplicate":
                await context.write(event)
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):  # Without a task of its own.
                await context.write(event)
        except TimeoutError:
            message = f"the gateway took nothing for {DRAIN_TIMEOUT_S:.0f} s"
            raise PeerUnavailable(message, stage="session") from None

    def _submit(self, message: decode_pb2.Submit) -> None:
        try:
            assembly = Assembly(message)
        except InvalidRequest as error:
            self._refuse(message, error)
            return
        if not assembly.is_complete and len(self._partial) >= MAX_PARTIAL_SUBMITS:
            full = Overloaded("too many incomplete requests", stage="queue")
            self._refuse(message, full)
            return
        key = (message.request_id, message.attempt)
        self._partial.pop(key, None)  # The submit is a duplicate, so the earlier parts are dropped.
        if assembly.is_complete:
            self._start(assembly)
        else:
            deadline = asyncio.get_running_loop().time() + PARTS_TIMEOUT_S
            self._partial[key] = (assembly, deadline)

    def _part(self, part: decode_pb2.PromptPart | decode_pb2.GeneratedPart) -> None:
        key = (part.request_id, part.attempt)
        if key not in self._partial:
            return
        assembly, _ = self._partial[key]
        try:
            if isinstance(part, decode_pb2.PromptPart):
                assembly.add_prompt(part.tokens.ids)
            else:
                assembly.add_generated(part.sample, part.tokens.ids)
        except InvalidRequest as error:
            del self._partial[key]
            self._refuse(assembly.message, error)
            return
        if assembly.is_complete:
            del self._partial[key]
            self._start(assembly)

    def _give_up_late(self) -> None:
        """Called at every message, pings included."""
        now = asyncio.get_running_loop().time()
        while self._partial:
            key, (assembly, deadline) = next(iter(self._partial.items()))
            if now < deadline:
                return
            del self._partial[key]
            why = f"the parts of the request did not come within {PARTS_TIMEOUT_S:g} s"
            self._refuse(assembly.message, DeadlineExceeded(why, stage="session"))

    def _start(self, assembly: Assembly) -> None:
        message = assembly.message
        try:
            submit = assembly.submit(self._number)
        except InvalidRequest as error:
            self._refuse(message, error)
        else:
            self._on_submit(message, submit)
            key = (message.request_id, message.attempt)
            if message.stream and key not in self._streams:
                self._streams[key] = message.stream
                self._open[key] = set(range(submit.sampling.n)).difference(
                    one.sample for one in submit.progress if one.is_finished
                )
            self._engine.send(Inbox(submits=[submit]))

    def _refuse(self, message: decode_pb2.Submit, error: WeftError) -> None:
        """Fails the whole Session if an event cannot repeat the request's id."""
        if len(message.request_id.encode()) > MAX_ID_BYTES:
            raise error
        failed = Failed(
            request_id=message.request_id, attempt=message.attempt, failure=failure_of(error)
        )
        self.push(GatewayBatch(gateway=self._number, failed=[failed]))

    def _end_session(self, message: decode_pb2.EndSession) -> None:
        self._engine.send(Inbox(session_ends=[SESSION_END.decode(message)]))

    def _cancel(self, message: decode_pb2.Cancel) -> None:
        self._partial.pop((message.request_id, message.attempt), None)
        self._engine.send(Inbox(cancels=[CANCEL.decode(message, gateway=self._number)]))
