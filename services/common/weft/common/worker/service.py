"""WorkerService: the information that every worker provides about itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.common.media_stream import media_of
from weft.common.rpc.errors import Context
from weft.common.worker.adapters import AdapterFollower
from weft.common.worker.engine_client import EngineClient
from weft.common.worker.kernel_files import (
    MAX_FILE_BYTES,
    MAX_FILES,
    PART_BYTES,
    KernelFolders,
    digest_of,
    kernel_version,
    used_kernels,
)
from weft.common.worker.kv_feed import KvFeed
from weft.common.worker.placements import told
from weft.common.worker.role import WorkerRoleState
from weft.contract.codec.pairs import INFO, LOAD, WEIGHT_OFFER, WORKER_ROLES
from weft.contract.codec.walk import duration
from weft.contract.errors import ConfigError, Draining, PeerUnavailable
from weft.contract.experts import ExpertAction, ExpertCommand, ExpertReply, ExpertState
from weft.contract.faults import FaultSpec, FaultState
from weft.contract.fills import LeaseQuery, ProcessExited
from weft.contract.layout import StatePlane
from weft.contract.messages import FaultOrder, Inbox, Outbox
from weft.contract.profiles import ProfileCommand, ProfileOptions
from weft.contract.reports import QUIET_REPORT_S, EngineInfo
from weft.contract.submits import Failure
from weft.contract.weights import (
    MAX_LIMIT_S,
    WeightAction,
    WeightCommand,
    WeightOffer,
    WeightReply,
    WeightStatus,
)
from weft.engine.base.placement import RankPlacement
from weft.v1 import kv_pb2, weights_pb2, worker_pb2, worker_pb2_grpc

MIN_INTERVAL_S = 0.02
DEFAULT_INTERVAL_S = 0.2
QUERY_TIMEOUT_S = 5.0
HAND_BACK_S = 2.0
"""Seconds for the engine to end its step and hand requests back, and for the messages to leave."""
_IDLE_POLL_S = 0.02


class Queries:
    """Queries to the engine, matched to their answers by number."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}
        self.before_exit: Callable[[str], None] = lambda worker_id: None
        """Called with a worker's id before its end is reported."""

    def on_outbox(self, outbox: Outbox) -> None:
        """Resolves the queries that the engine answered."""
        for lease in outbox.lease_replies:
            self._resolve(lease.query, lease.state)
        replies = (outbox.exit_replies, outbox.flush_replies, outbox.state_replies)
        for query, value in itertools.chain(*replies):
            self._resolve(query, value)
        for query, states in outbox.fault_replies:
            self._resolve(query, states)
        for query, failure in outbox.profile_replies:
            self._resolve(query, failure)
        for reply in outbox.weight_replies:
            self._resolve(reply.query, reply)
        for about_experts in outbox.expert_replies:
            self._resolve(about_experts.query, about_experts)

    async def lease_state(self, lease_id: bytes) -> str:
        """State of a lease, which this stops."""
        query = next(self._ids)
        lease = LeaseQuery(query=query, lease_id=lease_id)
        return str(await self._ask(query, Inbox(lease_queries=[lease])))

    async def report_exit(self, worker_id: str, epoch: int) -> int:
        """Reports a dead incarnation; returns the pages that leave quarantine."""
        query = next(self._ids)
        self.before_exit(worker_id)
        exited = ProcessExited(worker_id=worker_id, epoch=epoch, query=query)
        return int(await self._ask(query, Inbox(exits=[exited])))

    async def flush_cache(self) -> int:
        """Drops cached pages that are not in use; returns how many."""
        query = next(self._ids)
        return int(await self._ask(query, Inbox(flush_cache=[query])))

    async def dump_state(self, max_entries: int) -> str:
        """Returns the engine's snapshot, a JSON object."""
        query = next(self._ids)
        return str(await self._ask(query, Inbox(dump_state=[(query, max_entries)])))

    async def order_faults(
        self, *, add: FaultSpec | None = None, clear: str | None = None
    ) -> list[FaultState]:
        """Arms or disarms faults in the engine's process; returns those armed there."""
        query = next(self._ids)
        order = FaultOrder(query=query, add=add, clear=clear)
        inbox = Inbox(fault_orders=[order])
        states: list[FaultState] = await self._ask(query, inbox, self._engine.order)
        return states

    async def command_profile(
        self, profile: str, folder: str = "", options: ProfileOptions | None = None
    ) -> None:
        """Begins a profile, or without `options` ends it. Raises what the engine has against it."""
        query = next(self._ids)
        command = ProfileCommand(query=query, profile=profile, folder=folder, options=options)
        failure: Failure | None = await self._ask(query, Inbox(profile_commands=[command]))
        if failure is not None:
            raise failure.to_error()

    def drop_profile(self, profile: str) -> None:
        """Ends a profile, if the engine still lives, without waiting for its answer."""
        with contextlib.suppress(PeerUnavailable):
            command = ProfileCommand(query=next(self._ids), profile=profile)
            self._engine.send(Inbox(profile_commands=[command]))

    async def command_weights(self, action: WeightAction, **options: Any) -> WeightStatus:
        """Orders what concerns weights and pauses, with the fields of `WeightCommand`. Waits as
        long as that takes. Raises what the engine has against it.
        """
        return (await self._reply_of(action, **options)).status

    async def offer_weights(self) -> WeightOffer:
        """Lets other workers read the packed weights. Raises what the engine has against it."""
        offer = (await self._reply_of("offer")).offer
        assert offer is not None
        return offer

    async def command_experts(self, action: ExpertAction) -> ExpertState:
        """Orders what concerns the experts of the model. Raises what the engine has against it."""
        query = next(self._ids)
        inbox = Inbox(expert_commands=[ExpertCommand(query=query, action=action)])
        reply: ExpertReply = await self._ask(query, inbox, timeout_s=MAX_LIMIT_S)
        if (failure := reply.failure) is not None:
            raise failure.to_error()
        assert reply.state is not None
        return reply.state

    async def _reply_of(self, action: WeightAction, **options: Any) -> WeightReply:
        query = next(self._ids)
        command = WeightCommand(query=query, action=action, **options)
        inbox = Inbox(weight_commands=[command])
        reply: WeightReply = await self._ask(query, inbox, timeout_s=MAX_LIMIT_S)
        if (failure := reply.failure) is not None:
            raise failure.to_error()
        return reply

    async def _ask(
        self,
        query: int,
        inbox: Inbox,
        send: Callable[[Inbox], None] | None = None,
        timeout_s: float = QUERY_TIMEOUT_S,
    ) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[query] = future
        try:
            (send or self._engine.send)(inbox)
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            message = f"the engine did not answer within {timeout_s:.0f} s"
            raise PeerUnavailable(message, stage="engine") from None
        finally:
            del self._open[query]

    def _resolve(self, query: int, value: object) -> None:
        future = self._open.get(query)
        if future is not None and not future.done():
            future.set_result(value)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Implements weft.v1.WorkerService over an engine client.

    Args:
        worker_id: Stable id.
        server_pid: Pid of this process.
        kvstores: host:port of the KV stores in use.
        advertised: host:port at which other workers reach this one; empty: the address that
            gateways use.
        adapters: The worker's adapters; None: it serves the base model alone.
        admin_port: Returns the operators' port; 0: there is none.
        placements: Where its ranks run.
    """

    def __init__(
        self,
        engine: EngineClient,
        queries: Queries,
        info: EngineInfo,
        kv_feed: KvFeed,
        role: WorkerRoleState,
        worker_id: str,
        model_name: str,
        server_pid: int,
        kvstores: Sequence[str] = (),
        advertised: str = "",
        adapters: AdapterFollower | None = None,
        admin_port: Callable[[], int] = lambda: 0,
        placements: Sequence[RankPlacement] = (),
    ) -> None:
        self._engine = engine
        self._queries = queries
        self._info = info
        self._kv_feed = kv_feed
        engine.gone.add_done_callback(lambda _: kv_feed.close())
        self._role = role
        self._worker_id = worker_id
        self._model_name = model_name
        self._server_pid = server_pid
        self._kvstores = tuple(kvstores)
        self._advertised = advertised
        self._adapters = adapters
        self._admin_port = admin_port
        self._ranks = told(placements)
        self._model_digest = b""
        """Of weights that have replaced those of the start; empty: none have."""
        self.start_seconds: Mapping[str, float] = {}
        """Of each phase of the start, once it has ended."""
        self._is_draining = False
        self._is_ending = False

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: Context
    ) -> worker_pb2.GetInfoResponse:
        info = self._info
        first = {"target": (info.layers, info.kv_heads, info.head_dim)}
        planes = [
            kv_pb2.Plane(
                name=name,
                layers=layers,
                heads=heads,
                parts=[
                    kv_pb2.PlanePart(name=part, dim=dim, dtype=info.dtype) for part in info.kv_parts
                ],
            )
            for name, (layers, heads, dim) in {**first, **info.further_planes}.items()
        ]
        planes[0].draft_digest = bytes.fromhex(info.draft)
        if info.states is not None:
            planes += _state_planes(info.states)
        response = INFO.encode(
            info,
            worker_id=self._worker_id,
            role=WORKER_ROLES.numbers[self._role.started_as],
            model=self._model_name,
            planes=planes,
            transport_detail=self._transport_detail(),
            server_pid=self._server_pid,
            kvstores=self._kvstores,
            advertised_address=self._advertised,
            admin_port=self._admin_port(),
            host=socket.gethostname(),
            ranks=self._ranks,
            start_seconds=self.start_seconds,
        )
        if self._adapters is not None and info.max_loras:
            response.adapters.max_rank = info.max_lora_rank
            response.adapters.max_device_adapters = info.max_loras
        return response

    def change_model(self, status: WeightStatus) -> None:
        """The engine serves these weights from now on."""
        if status.model_digest:
            self._info = replace(self._info, model_digest=status.model_digest)
            self._model_digest = status.model_digest

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        interval = DEFAULT_INTERVAL_S
        if request.HasField("interval"):
            interval = max(MIN_INTERVAL_S, request.interval.ToNanoseconds() / 1e9)
        told: int | None = None
        while not self._engine.gone.done():
            load, version = self._engine.load, self._version
            response = self._load()
            if self._adapters is not None:
                news = self._adapters.news(told)
                response.adapters.extend(news.statuses)
                response.gone_adapters.extend(news.gone)
                response.adapters_are_changes = not news.is_all
                response.adapter_generation = self._adapters.generation
                told = news.sequence if request.adapter_changes else None
            yield response
            await asyncio.sleep(interval)
            while load is self._engine.load and version == self._version:
                # The age of its loop shows a watcher that the engine is silent.
                if self._engine.loop_age_s > QUIET_REPORT_S or self._engine.gone.done():
                    break
                await asyncio.sleep(interval)
        raise PeerUnavailable(f"the engine is gone: {self._engine.gone.result()}", stage="engine")

    async def WatchKv(
        self, request: worker_pb2.WatchKvRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchKvResponse]:
        async for response in self._kv_feed.watch(request):
            yield response
        raise PeerUnavailable(f"the engine is gone: {self._engine.gone.result()}", stage="engine")

    async def ListHeldAdapters(
        self, request: worker_pb2.ListHeldAdaptersRequest, context: Context
    ) -> worker_pb2.ListHeldAdaptersResponse:
        response = worker_pb2.ListHeldAdaptersResponse(
            worker_id=self._worker_id, epoch=self._info.epoch
        )
        if self._adapters is not None:
            response.adapters.extend(self._adapters.statuses())
            response.adapter_generation = self._adapters.generation
        return response

    async def PutMedia(
        self, request_iterator: AsyncIterator[worker_pb2.PutMediaRequest], context: Context
    ) -> worker_pb2.PutMediaResponse:
        async for media in media_of(request_iterator):
            self._engine.send(Inbox(media=[media]))
        return worker_pb2.PutMediaResponse()

    async def OfferWeights(
        self, request: weights_pb2.OfferWeightsRequest, context: Context
    ) -> weights_pb2.OfferWeightsResponse:
        if "nixl" not in self._info.transports:
            message = "this worker does not use NIXL, over which weights are read"
            raise ConfigError(message, stage="weights")
        return WEIGHT_OFFER.encode(await self._queries.offer_weights())

    async def GetKernels(
        self, request: worker_pb2.GetKernelsRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GetKernelsResponse]:
        if request.version != kernel_version():
            message = f"kernels are for {kernel_version()} here"
            raise ConfigError(message, stage="weights")
        folders = KernelFolders.of_host()
        process = self._engine.pid
        found = await asyncio.to_thread(
            lambda: list(used_kernels(folders, self._engine.spawned_at, process))
        )
        for name, path in found[:MAX_FILES]:
            content = await asyncio.to_thread(path.read_bytes)
            if len(content) > MAX_FILE_BYTES:
                continue
            for at in range(0, max(1, len(content)), PART_BYTES):
                is_last = at + PART_BYTES >= len(content)
                digest = digest_of(content) if is_last else b""
                part = content[at : at + PART_BYTES]
                yield worker_pb2.GetKernelsResponse(name=name, data=part, digest=digest)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        timeout = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else 60.0
        self._begin_drain()
        await self._reports_drain(True)
        idle = await self._finish_drain(timeout, hands_back=not request.keep_running)
        load, running = self._engine.load, 0
        if not idle and load is not None:
            running = load.running_requests + load.waiting_requests + load.filling_requests
        return worker_pb2.DrainResponse(
            idle=idle, running_requests=running, draining=self._is_draining
        )

    async def Undrain(
        self, request: worker_pb2.UndrainRequest, context: Context
    ) -> worker_pb2.UndrainResponse:
        if self._is_ending:
            raise Draining("this worker is shutting down", stage="undrain")
        self._engine.send(Inbox(drains=[False]))
        was_draining, self._is_draining = self._is_draining, False
        await self._reports_drain(False)
        return worker_pb2.UndrainResponse(was_draining=was_draining)

    async def ReportExit(
        self, request: worker_pb2.ReportExitRequest, context: Context
    ) -> worker_pb2.ReportExitResponse:
        released = await self._queries.report_exit(request.worker_id, request.epoch)
        return worker_pb2.ReportExitResponse(released_pages=released)

    async def drain(self, timeout_s: float) -> bool:
        """Accepts no new work as long as this process lives, and hands waiting requests back.
        Running ones may finish for `timeout_s`; then they are handed back too, and leases are
        stopped. Returns whether no request and no lease is left.
        """
        self._is_ending = True
        if self._engine.gone.done():
            return False
        self._begin_drain()
        return await self._finish_drain(timeout_s, hands_back=True)

    def _begin_drain(self) -> None:
        self._engine.send(Inbox(drains=[True]))
        self._is_draining = True

    async def _finish_drain(self, timeout_s: float, *, hands_back: bool) -> bool:
        if await self._becomes_idle(timeout_s):
            return True
        if not hands_back or not self._is_draining or self._engine.gone.done():
            return False
        self._engine.send(Inbox(hand_back=True))
        return await self._becomes_idle(HAND_BACK_S)

    async def _becomes_idle(self, timeout_s: float) -> bool:
        """False: the drain was ended, the engine is gone, or `timeout_s` has passed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._is_draining and not self._engine.gone.done():
            load = self._engine.load
            if load is not None and load.is_draining and load.is_idle:
                return True
            if loop.time() >= deadline:
                break
            await asyncio.sleep(_IDLE_POLL_S)
        return False

    async def _reports_drain(self, is_draining: bool) -> None:
        """Raises PeerUnavailable if the engine does not obey in time."""
        deadline = time.monotonic() + QUERY_TIMEOUT_S
        while (load := self._engine.load) is None or load.is_draining != is_draining:
            self._engine.require()
            if time.monotonic() >= deadline:
                message = f"the engine did not answer within {QUERY_TIMEOUT_S:.0f} s"
                raise PeerUnavailable(message, stage="engine")
            await asyncio.sleep(_IDLE_POLL_S)

    @property
    def _version(self) -> tuple[int, ...]:
        adapters = (0, 0) if self._adapters is None else self._adapters.version
        return (*adapters, self._role.changes)

    def _transport_detail(self) -> str:
        load = self._engine.load
        return load.transport_detail if load is not None else self._info.transport_detail

    def _load(self) -> worker_pb2.WatchLoadResponse:
        load = self._engine.load
        response = worker_pb2.WatchLoadResponse() if load is None else LOAD.encode(load)
        response.worker_id, response.epoch = self._worker_id, self._info.epoch
        response.loop_age.CopyFrom(duration(self._engine.loop_age_s))
        response.model_digest = self._model_digest
        if (role := self._role.describe()) is not None:
            response.role.CopyFrom(role)
        if load is None:
            return response
        if load.decode_step_s:
            response.decode_step.CopyFrom(duration(load.decode_step_s))
            response.decode_step_requests = load.decode_step_requests
        if (states := load.state_counts) is not None:
            response.state_blocks.total_blocks = states.free + states.cached + states.used
            response.state_blocks.cached_blocks = states.cached
            response.state_blocks.used_blocks = states.used
            response.state_blocks.checkpoint_tokens = states.checkpoint_tokens
            response.state_blocks.prefix_pages = states.prefix_pages
            response.state_blocks.continuable_pages = states.continuable_pages
        return response


def _state_planes(states: StatePlane) -> list[kv_pb2.Plane]:
    """The planes of each layer, then those of all layers together, if any."""
    given = ((states.name, states.layers, states.parts), (f"{states.name}-rows", 1, states.rows))
    return [
        kv_pb2.Plane(
            name=name,
            layers=layers,
            parts=[
                kv_pb2.PlanePart(name=part.name, dim=part.size, dtype=part.dtype) for part in parts
            ],
        )
        for name, layers, parts in given
        if parts
    ]
