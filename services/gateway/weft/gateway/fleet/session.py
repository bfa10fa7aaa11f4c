"""One multiplexed Session with one decode worker."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol

import grpc
from weft.common.rpc.errors import from_error_detail, from_rpc_error
from weft.common.rpc.streams import WRITE_AFTER_END
from weft.common.tasks import is_ending, run_together
from weft.contract.codec.walk import duration
from weft.contract.errors import PeerUnavailable, Starting, WeftError
from weft.v1 import decode_pb2, decode_pb2_grpc

_log = logging.getLogger(__name__)

_WELCOME_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_STARTING_BACKOFF_S = 0.2
"""Longest delay while the peer answers that it is starting."""
_RETRY_AFTER_S = 1.0
_MAX_ARRIVED = 64
"""Messages read ahead of those that are dispatched. With more, the worker merges its messages."""
_BUSY_S = 0.002
"""A message that keeps the event loop busy for at least this time is followed by a pause."""
_MAX_PAUSE_S = 0.05
_PAUSE_SHARE, _ADMITTING_SHARE = 0.25, 1.0
"""Length of the pause as a multiple of the message's time; the second while requests are submitted.
"""
_ADMITTING_S = 0.05
"""Time after a submit in which others are likely to follow."""
_MAX_ASKED = 2000
"""Most attempts in one ping, which keeps it far below the message limit."""


class SessionHandler(Protocol):
    """Receives the events of one request. Called on the event loop; must not block or raise."""

    attempt: int
    """Attempt whose events are accepted; others are dropped."""

    def on_accepted(self) -> None:
        """Called when the worker has queued the request."""

    def on_computed_here(self) -> None:
        """Called when the decode worker computes the prompt itself, not a prefill worker."""

    def on_prompt_logprobs(self, event: decode_pb2.SessionEvent.PromptLogprobs) -> None:
        """Called with log-probabilities of prompt tokens, before the tokens of the same message."""

    def on_vectors(self, event: decode_pb2.SessionEvent.Vectors, now: float) -> None:
        """Called with vectors of a prompt; `now` is the event loop's time."""

    def on_routes(self, event: decode_pb2.SessionEvent.Routes) -> None:
        """Called with experts of a sample's tokens, before its end in the same message."""

    def on_tokens(self, event: decode_pb2.SessionEvent.Tokens, now: float) -> None:
        """Called with new tokens of one sample; `now` is the event loop's time."""

    def on_token(self, number: int, index: int, token_id: int, now: float) -> None:
        """Called with one new token of a sample, without log-probabilities: `on_tokens` of it."""

    def on_finished(self, event: decode_pb2.SessionEvent.Finished) -> None:
        """Called when a sample has ended."""

    def on_failed(self, error: WeftError) -> None:
        """Called when the whole request has failed; no call follows."""


class ReconnectBackoff:
    """Exponential delays with jitter."""

    def __init__(self, first_s: float = _FIRST_BACKOFF_S, max_s: float = _MAX_BACKOFF_S) -> None:
        self._first_s, self._max_s = first_s, max_s
        self._next_s = first_s

    def reset(self) -> None:
        """Returns to the first delay after a success."""
        self._next_s = self._first_s

    def failed(self, error: grpc.aio.AioRpcError) -> None:
        """Keeps the delay short if the peer answers that it is starting, since requests wait."""
        if isinstance(from_rpc_error(error), Starting):
            self._next_s = min(self._next_s, _STARTING_BACKOFF_S)

    async def sleep(self) -> None:
        """Waits for half to all of the current delay and doubles it."""
        delay_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._max_s, 2 * self._next_s)
        await asyncio.sleep(delay_s)


class DecodeSession:
    """Keeps a Session open, reconnects when it breaks, and dispatches events to their requests.

    A break fails every request on the Session (`PeerUnavailable`, retryable); the worker cancels
    its side. The queue of messages to send is bounded by the number of admitted requests.

    Tokens of many requests can keep the event loop busy all the time, and new requests would have
    to wait for them. So a message that took long to dispatch is followed by a pause in proportion.
    Events that arrive meanwhile are dispatched at once after the pause, as fewer and larger deltas,
    which cost less.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        gateway_id: str,
        gateway_epoch: int,
        *,
        ping_interval_s: float,
        dead_after_s: float,
        on_lost: Callable[[], None],
        expects_constraints: Callable[[], bool],
        on_silence: Callable[[], None] = lambda: None,
    ) -> None:
        """Creates the session; `run` opens it.

        Args:
            gateway_id: Stable id of this gateway.
            gateway_epoch: Epoch of this gateway's incarnation.
            dead_after_s: A ping unanswered for longer than this and `stale_after_s` ends the
                Session.
            on_lost: Called after an open Session broke.
            expects_constraints: Returns whether the worker should prepare for constrained requests.
            on_silence: Called when the peer does not answer on the channel.
        """
        self._on_silence = on_silence
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._hello = decode_pb2.SessionRequest.Hello(
            gateway_id=gateway_id, gateway_epoch=gateway_epoch
        )
        self._hello.ping_interval.CopyFrom(duration(ping_interval_s))
        self._ping_interval_s = ping_interval_s
        self._dead_after_s = dead_after_s
        self._on_lost = on_lost
        self._expects_constraints = expects_constraints
        self.has_constraints = False
        """Whether the Session has carried a constrained request."""
        self._handlers: dict[str, SessionHandler] = {}
        self._streams: dict[int, tuple[SessionHandler, int, str]] = {}
        """Handler, sample and request id by the numbers in columns."""
        self._numbers: dict[str, range] = {}
        """Those numbers, by request id."""
        self._next_stream = 1
        self._silent: set[str] = set()
        """Requests without events since the last ping."""
        self._outgoing: deque[decode_pb2.SessionRequest] = deque()
        self._outgoing_ready = asyncio.Event()
        self._arrived: asyncio.Queue[decode_pb2.SessionEvent] = asyncio.Queue(_MAX_ARRIVED)
        self._submitted_at = -math.inf
        """Loop time of the last submit."""
        self._oldest_ping: float | None = None
        self.stale_after_s = 0.0
        """The worker's own staleness limit; a ping waits at least this long. 0: even the worker's
        server is silent, which a long step of its engine does not explain.
        """
        self.worker_id = ""
        self.worker_epoch = 0
        self.is_open = False
        self.problem = "not connected yet"
        """Why the Session is not open."""

    def sizes(self) -> dict[str, int]:
        """Numbers of requests that wait for events, and of messages to be sent."""
        return {"handlers": len(self._handlers), "unsent_messages": len(self._outgoing)}

    async def run(self) -> None:
        """Keeps the Session open until cancelled."""
        backoff = ReconnectBackoff()
        while True:
            try:
                await self._serve(backoff)
            except grpc.aio.AioRpcError as error:
                self.problem = f"session broke: {from_rpc_error(error)}"
                backoff.failed(error)
            except WRITE_AFTER_END:
                self.problem = "the worker ended the session"
            except (PeerUnavailable, TimeoutError) as error:
                self.problem = str(error) or "the worker did not answer hello"
            except ConnectionError as error:
                self.problem = str(error)
            except asyncio.CancelledError:
                if is_ending():
                    self._close(is_loss=False)
                    raise
                self.problem = "its connection was closed"
            except Exception:
                # The fault is this gateway's, so the worker stays in use.
                _log.exception("a session failed", extra={"worker_id": self.worker_id})
                self.problem = "session failed in the gateway"
            self._close(is_loss=self.is_open)
            await backoff.sleep()

    async def _serve(self, backoff: ReconnectBackoff) -> None:
        call: Any = self._stub.Session()
        try:
            try:
                async with asyncio.timeout(_WELCOME_TIMEOUT_S):
                    await call.write(decode_pb2.SessionRequest(hello=self._hello))
                    first = await call.read()
            except TimeoutError:
                self._on_silence()
                raise
            if first is grpc.aio.EOF or not first.HasField("welcome"):
                raise PeerUnavailable("the worker did not answer hello by welcome")
            self.worker_id = first.welcome.worker_id
            self.worker_epoch = first.welcome.worker_epoch
            self.is_open, self.problem = True, ""
            self._dispatch(first)
            await run_together(
                self._read(call, backoff), self._hand_out(), self._write(call), self._ping()
            )
        finally:
            call.cancel()
            self._hand_out_arrived()

    async def _read(self, call: Any, backoff: ReconnectBackoff) -> None:
        while True:
            event = await call.read()
            if event is grpc.aio.EOF:
                raise PeerUnavailable("the worker ended the session")
            # The delay is reset only now, since a worker may welcome and end at once, again and
            # again.
            backoff.reset()
            await self._arrived.put(event)

    async def _hand_out(self) -> None:
        """Leaves the event loop to others between two messages."""
        loop = asyncio.get_running_loop()
        while True:
            event = await self._arrived.get()
            began_at = loop.time()
            self._dispatch(event)
            self._hand_out_arrived()
            await asyncio.sleep(0)  # The tasks that the message woke run first.
            now = loop.time()
            if now - began_at < _BUSY_S:
                continue
            is_admitting = now - self._submitted_at < _ADMITTING_S
            share = _ADMITTING_SHARE if is_admitting else _PAUSE_SHARE
            await asyncio.sleep(min(_MAX_PAUSE_S, share * (now - began_at)))

    def _hand_out_arrived(self) -> None:
        while not self._arrived.empty():
            self._dispatch(self._arrived.get_nowait())

    def _dispatch(self, event: decode_pb2.SessionEvent) -> None:
        handlers = self._handlers
        for accepted in event.accepted:
            handler = handlers.get(accepted.request_id)
            if handler is not None and handler.attempt == accepted.attempt:
                self._silent.discard(accepted.request_id)
                handler.on_accepted()
        for here in event.computed_here:
            handler = handlers.get(here.request_id)
            if handler is not None and handler.attempt == here.attempt:
                handler.on_computed_here()
        for scores in event.prompt_logprobs:
            handler = handlers.get(scores.request_id)
            if handler is not None and handler.attempt == scores.attempt:
                self._silent.discard(scores.request_id)
                handler.on_prompt_logprobs(scores)
        if event.vectors:
            now = asyncio.get_running_loop().time()
            for vectors in event.vectors:
                handler = handlers.get(vectors.request_id)
                if handler is not None and handler.attempt == vectors.attempt:
                    self._silent.discard(vectors.request_id)
                    handler.on_vectors(vectors, now)
        if event.tokens:
            now = asyncio.get_running_loop().time()
            silent = self._silent
            for tokens in event.tokens:
                request_id = tokens.request_id
                handler = handlers.get(request_id)
                if handler is not None and handler.attempt == tokens.attempt:
                    if silent:
                        silent.discard(request_id)
                    handler.on_tokens(tokens, now)
        if event.HasField("columns"):
            self._dispatch_columns(event.columns)
        for routes in event.routes:
            handler = handlers.get(routes.request_id)
            if handler is not None and handler.attempt == routes.attempt:
                self._silent.discard(routes.request_id)
                handler.on_routes(routes)
        for finished in event.finished:
            handler = handlers.get(finished.request_id)
            if handler is not None and handler.attempt == finished.attempt:
                handler.on_finished(finished)
        for failed in event.failed:
            handler = handlers.get(failed.request_id)
            if handler is not None and handler.attempt == failed.attempt:
                self.release(failed.request_id)
                handler.on_failed(self._typed(failed))
        if event.HasField("pong"):
            self._oldest_ping = None
            for key in event.pong.unknown:
                self._on_unknown(key)

    def _dispatch_columns(self, columns: decode_pb2.SessionEvent.TokenColumns) -> None:
        if not len(columns.streams) == len(columns.indices) == len(columns.ids):
            raise PeerUnavailable(f"worker {self.worker_id} sent columns of different lengths")
        now = asyncio.get_running_loop().time()
        streams, silent = self._streams, self._silent
        rows = zip(columns.streams[:], columns.indices[:], columns.ids[:], strict=True)
        for number, index, token_id in rows:
            known = streams.get(number)
            if known is not None:
                handler, sample, request_id = known
                if silent:
                    silent.discard(request_id)
                handler.on_token(sample, index, token_id, now)

    def _on_unknown(self, key: decode_pb2.Attempt) -> None:
        """The worker does not have these requests, and their ends were not received."""
        handler = self._handlers.get(key.request_id)
        if handler is None or handler.attempt != key.attempt:
            return
        self.release(key.request_id)
        _log.warning(
            "a message of a session was lost",
            extra={"worker_id": self.worker_id, "request_id": key.request_id},
        )
        handler.on_failed(
            self._loss(f"a message to or from decode worker {self.worker_id} was lost", key.attempt)
        )

    def _loss(self, message: str, attempt: int) -> PeerUnavailable:
        return PeerUnavailable(
            message,
            stage="session",
            worker_id=self.worker_id,
            attempt=attempt,
            retry_after_s=_RETRY_AFTER_S,
        )

    def _typed(self, failed: decode_pb2.SessionEvent.Failed) -> WeftError:
        has_delay = failed.HasField("retry_after")
        delay_s = failed.retry_after.ToNanoseconds() / 1e9 if has_delay else None
        error = from_error_detail(failed.error, delay_s)
        error.worker_id = error.worker_id or self.worker_id
        error.attempt = failed.attempt
        return error

    async def _write(self, call: Any) -> None:
        while True:
            while self._outgoing:
                await call.write(self._outgoing.popleft())
            self._outgoing_ready.clear()
            await self._outgoing_ready.wait()

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        nonce = 0
        next_ping = due = loop.time()
        while True:
            now = loop.time()
            if self._oldest_ping is not None:
                # A pause of this process is not the worker's silence.
                self._oldest_ping += max(0.0, now - due)
            limit_s = max(self._dead_after_s, self.stale_after_s)
            if self._oldest_ping is not None and now - self._oldest_ping > limit_s:
                raise PeerUnavailable(f"no answer to a ping for {limit_s:g} s")
            if now >= next_ping:
                next_ping = now + self._ping_interval_s
                nonce += 1
                if self._oldest_ping is None:
                    self._oldest_ping = now
                self._send(decode_pb2.SessionRequest(ping=self._next_ping(nonce)))
            due = now + self._ping_interval_s / 4
            await asyncio.sleep(self._ping_interval_s / 4)

    def _next_ping(self, nonce: int) -> decode_pb2.SessionRequest.Ping:
        """Asks about requests without events: they may be waiting, or a message was lost."""
        constraints = self._expects_constraints()
        ping = decode_pb2.SessionRequest.Ping(nonce=nonce, constraints=constraints)
        for request_id in islice(self._silent, _MAX_ASKED):
            ping.asked.add(request_id=request_id, attempt=self._handlers[request_id].attempt)
        self._silent = set(self._handlers)
        return ping

    def _send(self, message: decode_pb2.SessionRequest) -> None:
        self._outgoing.append(message)
        self._outgoing_ready.set()

    def _close(self, is_loss: bool) -> None:
        """A loss is logged and counted."""
        self.is_open = False
        self._outgoing.clear()
        self._oldest_ping = None
        handlers, self._handlers = self._handlers, {}
        self._streams.clear()
        self._numbers.clear()
        self._silent.clear()
        if is_loss:
            _log.warning(
                "session lost",
                extra={
                    "worker_id": self.worker_id,
                    "problem": self.problem,
                    "requests": len(handlers),
                },
            )
            self._on_lost()
        for handler in handlers.values():
            message = f"decode worker {self.worker_id} was lost; send the request again"
            handler.on_failed(self._loss(message, handler.attempt))

    def submit(
        self, request_id: str, handler: SessionHandler, messages: list[decode_pb2.SessionRequest]
    ) -> None:
        """Sends a request; its events go to `handler` until `release` or a failure.

        Raises:
            PeerUnavailable: The Session is not open.
        """
        if not self.is_open:
            raise PeerUnavailable(
                f"decode worker {self.worker_id} is not reachable: {self.problem}",
                stage="session",
                worker_id=self.worker_id,
                retry_after_s=_RETRY_AFTER_S,
            )
        self.release(request_id)
        self._handlers[request_id] = handler
        self._number(request_id, handler, messages[0].submit)
        self._submitted_at = asyncio.get_running_loop().time()
        for message in messages:
            self._send(message)
            self.has_constraints |= message.submit.sampling.HasField("constraint")

    def _number(self, request_id: str, handler: SessionHandler, submit: decode_pb2.Submit) -> None:
        first = submit.stream = self._next_stream
        self._next_stream += max(1, submit.sampling.n)
        self._numbers[request_id] = range(first, self._next_stream)
        for sample, number in enumerate(self._numbers[request_id]):
            self._streams[number] = (handler, sample, request_id)

    def cancel(self, request_id: str, attempt: int, sample: int | None = None) -> None:
        """Asks the worker to end a request, or one of its samples."""
        if self.is_open:
            cancel = decode_pb2.Cancel(request_id=request_id, attempt=attempt, sample=sample)
            self._send(decode_pb2.SessionRequest(cancel=cancel))

    def end_session(self, cache_salt: str, session_id: str) -> bool:
        """Tells the worker that a session has ended; False: it cannot be told now."""
        if self.is_open:
            end = decode_pb2.EndSession(cache_salt=cache_salt, session_id=session_id)
            self._send(decode_pb2.SessionRequest(end_session=end))
        return self.is_open

    def release(self, request_id: str) -> None:
        """Drops the request's handler."""
        self._handlers.pop(request_id, None)
        for number in self._numbers.pop(request_id, ()):
            del self._streams[number]
        self._silent.discard(request_id)
