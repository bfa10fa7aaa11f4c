"""Carries out the engine's fill commands, and passes fillers' events back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray
from weft.common.rpc.channel import ServiceChannel, open_channel
from weft.common.rpc.errors import from_rpc_error
from weft.common.rpc.streams import WRITE_AFTER_END
from weft.common.rpc.tls import Identity
from weft.common.tasks import start_logged
from weft.common.telemetry.spans import lease_traceparent
from weft.common.worker.engine_client import EngineClient
from weft.common.worker.fill_data import IncomingData, event_from_wire
from weft.contract import faults
from weft.contract.codec.pairs import FILL_START, LEASE_STATES
from weft.contract.errors import InjectedFault, PeerUnavailable
from weft.contract.fills import FillCommand, FillerEvent, FillStart, LeaseAnswer
from weft.contract.handle import LAST_EVENTS, FillEvent
from weft.contract.messages import Inbox
from weft.v1 import kv_pb2, kvstore_pb2, kvstore_pb2_grpc, prefill_pb2, prefill_pb2_grpc

logger = logging.getLogger(__name__)

QUERY_TIMEOUT_S = 2.0
STOP_TIMEOUT_S = 20.0
"""Seconds for a filler to answer a stop, enough for posted writes to end or its agent to be
destroyed. After that it is only queried.
"""
RENEWED_AFTER_S = 10.0
"""Least time between two new connections to one service."""
MAX_CHANNELS = 256
"""Number of channels to prefill workers beyond which unused ones are closed, the longest unused
first. Workers come and go, and each has its own address.
"""
T = TypeVar("T")


@dataclass(slots=True)
class _OpenFill:
    """Messages still to be sent to a filler, and the deadline for its answer."""

    worker_id: str
    controls: asyncio.Queue[kv_pb2.FillControl] = field(default_factory=asyncio.Queue)
    deadline: asyncio.Timeout | None = None
    """Deadline of the stream, once it is open."""
    incoming: IncomingData | None = None
    """Takes the data that come; None: the engine does."""
    stop_by: float | None = None
    """Deadline for the answer to a stop, on the loop's clock; None: not stopped."""

    def stop(self) -> None:
        """Notes that the filler was told to stop, which limits the time for its answer."""
        if self.incoming is not None:
            self.incoming.is_stopped = True
        if self.stop_by is None:
            self.stop_by = asyncio.get_running_loop().time() + STOP_TIMEOUT_S
            if self.deadline is not None:
                self.deadline.reschedule(self.stop_by)


class FillClient:
    """Streams to fillers, one per lease, over one channel per address. `engine` receives the
    fillers' events.
    """

    def __init__(self, engine: EngineClient, identity: Identity | None = None) -> None:
        self._engine = engine
        self.memory: NDArray[np.uint8] | None = None
        """Memory in which fills land, uint8 `[pages, page_bytes]`; None: the engine puts data
        there.
        """
        self._identity = identity
        self._channels: dict[tuple[str, str], ServiceChannel] = {}
        """Channels by service and address, in the order of last use."""
        self._renewed: dict[tuple[str, str], float] = {}
        """When each connection was last renewed, on the loop's clock."""
        self._open: dict[bytes, _OpenFill] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, command: FillCommand) -> None:
        """Carries out one command without waiting."""
        if command.action == "start":
            self._open[command.lease_id] = _OpenFill(command.worker_id)
            self._spawn(self._fill(command, self._open[command.lease_id]))
        elif command.action == "query":
            self._spawn(self._query(command))
        elif command.action == "report":
            self._spawn(self._report(command))
        elif (open_fill := self._open.get(command.lease_id)) is not None:
            control = kv_pb2.FillControl()
            getattr(control, command.action).SetInParent()
            open_fill.controls.put_nowait(control)
            if command.action == "stop":
                open_fill.stop()

    def exited(self, worker_id: str) -> None:
        """Puts no more data of a worker's fills anywhere, since the engine takes its end for proof
        that none come.
        """
        for open_fill in self._open.values():
            if open_fill.worker_id == worker_id and open_fill.incoming is not None:
                open_fill.incoming.is_stopped = True

    def sizes(self) -> dict[str, int]:
        """Numbers of streams to fillers, of tasks, and of channels."""
        return {
            "fill_calls": len(self._open),
            "fill_tasks": len(self._tasks),
            "channels": len(self._channels),
        }

    async def close(self) -> None:
        """Cancels streams and closes channels."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = start_logged(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stub(
        self, command: FillCommand
    ) -> kvstore_pb2_grpc.KvStoreServiceAsyncStub | prefill_pb2_grpc.PrefillServiceAsyncStub:
        channel = self.channel(command.address, command.kind)
        if command.kind == "kvstore":
            return kvstore_pb2_grpc.KvStoreServiceStub(channel)
        return prefill_pb2_grpc.PrefillServiceStub(channel)

    def channel(self, address: str, service: str) -> ServiceChannel:
        """The channel to a service, shared by all calls of this worker to it."""
        channel = self._channels.pop((address, service), None)
        if channel is None:
            self._close_unused()
            channel = open_channel(address, service, self._identity)
        self._channels[address, service] = channel
        return channel

    def _close_unused(self) -> None:
        # Channels to stores stay open: their clients hold them, and their number is configured.
        idle = [
            name for name, one in self._channels.items() if name[1] == "prefill" and one.is_idle
        ]
        for name in idle[: max(0, len(self._channels) - MAX_CHANNELS + 1)]:
            self._renewed.pop(name, None)
            self._spawn(self._channels.pop(name).close())

    def unanswered(self, address: str, service: str) -> None:
        """Notes that calls to a service get no answers. The next calls use a new connection, since
        the old one may be broken. Open calls go on, since the service may just be slow.
        """
        name, now = (address, service), asyncio.get_running_loop().time()
        if now - self._renewed.get(name, -RENEWED_AFTER_S) < RENEWED_AFTER_S:
            return
        if (channel := self._channels.get(name)) is None:
            return
        self._renewed[name] = now
        logger.info("%s at %s does not answer: next calls use a new connection", service, address)
        channel.renew(keeps_calls=True)

    async def _fill(self, command: FillCommand, open_fill: _OpenFill) -> None:
        assert command.handle is not None
        told = FillStart(
            stream=0,
            handle=command.handle,
            request_id=command.request_id,
            traceparent=lease_traceparent(command.traceparent, command.lease_id),
        )
        start = kv_pb2.FillControl(start=FILL_START.plain(told))

        last = FillEvent(kind="broken", message="the filler ended the stream")
        if self.memory is not None:
            open_fill.incoming = IncomingData(self.memory, command.handle)
        call = self._call(command)
        writing: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout_at(open_fill.stop_by) as open_fill.deadline:
                for message in await _passed(faults.FILL_START, start):
                    await call.write(message)
                writing = start_logged(_forward(open_fill.controls, call))
                while isinstance(received := await call.read(), tuple):
                    event, data = received
                    if event.kind in LAST_EVENTS or event.kind == "broken":
                        last = event
                        break
                    for passed in await _passed(faults.FILL_EVENT_IN, event):
                        for each in _take(open_fill.incoming, passed, data):
                            self._tell(command.lease_id, each)
                    if event.kind == "data":
                        await self._engine.room()
        except TimeoutError:
            why = f"the filler did not answer a stop within {STOP_TIMEOUT_S:g} s"
            last = FillEvent(kind="broken", message=why)
            self.unanswered(command.address, command.kind)
        except grpc.aio.AioRpcError as error:
            last = FillEvent(kind="broken", message=from_rpc_error(error).message)
        except WRITE_AFTER_END as error:
            last = FillEvent(kind="broken", message=str(error))
        except InjectedFault as error:
            last = FillEvent(kind="broken", message=error.message)
        finally:
            if writing is not None:
                writing.cancel()
            call.cancel()
            del self._open[command.lease_id]
            self._tell(command.lease_id, last)

    def _call(self, command: FillCommand) -> Any:
        """A Fill call whose events are not parsed by protobuf, which would copy their data."""
        service = kvstore_pb2 if command.kind == "kvstore" else prefill_pb2
        name = "KvStoreService" if command.kind == "kvstore" else "PrefillService"
        full_name = service.DESCRIPTOR.services_by_name[name].full_name
        method = self.channel(command.address, command.kind).stream_stream(
            f"/{full_name}/Fill",
            request_serializer=kv_pb2.FillControl.SerializeToString,
            response_deserializer=event_from_wire,
        )
        return method()

    async def _query(self, command: FillCommand) -> None:
        """Without an answer the engine asks again."""
        request = kv_pb2.FillStatusRequest(lease_id=command.lease_id)
        try:
            status = await self._stub(command).FillStatus(request, timeout=QUERY_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            logger.debug("no answer about a lease: %s", error.code().name)
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.unanswered(command.address, command.kind)
            return
        answer = LeaseAnswer(
            lease_id=command.lease_id,
            worker_id=command.worker_id,
            filler_epoch=status.filler_epoch,
            state=LEASE_STATES[status.state] or "active",
        )
        with contextlib.suppress(PeerUnavailable):
            self._engine.send(Inbox(lease_answers=[answer]))

    async def _report(self, command: FillCommand) -> None:
        """A lost report is not repeated, since the store will find the corrupt page by itself."""
        assert command.corrupt is not None
        key, digest = command.corrupt
        request = kvstore_pb2.ReportCorruptRequest(key=key, digest=digest)
        stub = kvstore_pb2_grpc.KvStoreServiceStub(self.channel(command.address, "kvstore"))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.ReportCorrupt(request, timeout=QUERY_TIMEOUT_S)

    def _tell(self, lease_id: bytes, event: FillEvent) -> None:
        with contextlib.suppress(PeerUnavailable):
            self._engine.send(Inbox(filler_events=[FillerEvent(lease_id=lease_id, event=event)]))


def _take(incoming: IncomingData | None, event: FillEvent, data: memoryview) -> Sequence[FillEvent]:
    """Puts data in their place; what to tell the engine."""
    if incoming is None:
        event.data = bytes(data)
        return [event]
    if event.kind == "data":
        return incoming.put(event, data)
    if event.kind == "written":
        incoming.written(event.end_token)
    elif event.kind == "accepted":
        incoming.accepted(event.end_token)
    return [*incoming.untold(), event]


async def _forward(
    controls: asyncio.Queue[kv_pb2.FillControl],
    call: grpc.aio.StreamStreamCall[kv_pb2.FillControl, kv_pb2.FillEvent],
) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, *WRITE_AFTER_END, InjectedFault):
        while True:
            control = await controls.get()
            is_stop = control.WhichOneof("control") == "stop"
            for message in await _passed(
                faults.FILL_STOP if is_stop else faults.FILL_RENEW, control
            ):
                await call.write(message)


async def _passed(point: faults.FaultPoint, message: T) -> Sequence[T]:
    return await point.repeat_async(message) if point.is_armed else (message,)
