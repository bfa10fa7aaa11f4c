"""Life cycle of a worker: engine process, gRPC server, drain, and joint exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from weft.common.default_id import default_id
from weft.common.faults import allow_sabotage
from weft.common.rpc.server import QUARANTINE_STATUS, ServiceServer
from weft.common.rpc.tls import load_identity
from weft.common.tasks import has_returned, start_logged
from weft.common.telemetry.logging import configure_logging
from weft.common.telemetry.profile_folder import ProfileFolder
from weft.common.telemetry.tracing import make_tracer
from weft.common.worker.adapter_needs import with_adapter_needs
from weft.common.worker.adapters import AdapterFollower, open_registry
from weft.common.worker.admin import WorkerAdmin
from weft.common.worker.context import WorkerContext
from weft.common.worker.engine_client import EngineClient
from weft.common.worker.fill_client import FillClient
from weft.common.worker.fill_data import keep_message_memory, map_memory
from weft.common.worker.kernel_files import KernelFolders
from weft.common.worker.kv_feed import KvFeed
from weft.common.worker.metrics import EngineCollector
from weft.common.worker.placements import notes_of, place_worker
from weft.common.worker.profiles import WorkerProfiles
from weft.common.worker.role import RoleService, RoleServices, WorkerRoleState
from weft.common.worker.service import HAND_BACK_S, Queries, WorkerServicer
from weft.common.worker.settings import FROM_DISK, WorkerSettings
from weft.common.worker.start_server import StartServer
from weft.common.worker.store_client import StoreClient
from weft.common.worker.store_replica import StoreReplica
from weft.common.worker.watchdog import CrashDumps, Watchdog
from weft.common.worker.weight_peers import fetch_kernels, find_weights
from weft.contract.errors import ConfigError, WeftError
from weft.contract.messages import Outbox
from weft.contract.reports import EngineInfo
from weft.contract.weights import WeightStatus
from weft.engine.base.config import EngineConfig, Role
from weft.engine.base.placement import bindings_of
from weft.v1 import worker_pb2_grpc

logger = logging.getLogger(__name__)

LIVENESS_INTERVAL_S = 1.0
LAST_WORDS_S = 0.5
"""Seconds for typed errors to reach the peers after the engine died."""


class WorkerServer(NamedTuple):
    """The part of a worker that exists only while the engine runs: the server and its services."""

    server: ServiceServer
    service: RoleServices
    servicer: WorkerServicer
    info: EngineInfo


class WorkerHost:
    """The server process of a worker, and its engine process.

    Use: `front = await start()`, then `await serve(front)`; `await close()` in any case.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        role: Role,
        make_services: Sequence[Callable[[WorkerContext], RoleService]],
    ) -> None:
        """Creates the parts that need no engine; nothing runs yet. `make_services` make the
        services of the worker's roles, once the engine runs.

        Raises:
            ConfigError: The settings are not valid.
        """
        self._settings = settings
        self._role: Role = role
        self._role_state = WorkerRoleState(role)
        self._make_services = tuple(make_services)
        self._worker_id = settings.worker_id or default_id(role, settings.port)
        config = with_adapter_needs(settings, settings.engine_config(role, self._worker_id))
        self._placements = place_worker(config, settings.host)
        config = replace(config, bindings=bindings_of(self._placements))
        self._config = config
        registry = open_registry(settings.adapter_root)
        self._identity = load_identity(settings)
        if settings.kernels_from_peers and self._identity is None:
            raise ConfigError(
                "kernels are code and come only from workers with a certificate; set tls_cert, or "
                "leave kernels_from_peers off",
                param="kernels_from_peers",
            )
        if settings.kernels_from_peers and settings.weights_from == FROM_DISK:
            raise ConfigError(
                "kernels come from the workers that weights_from names, and it names none",
                param="kernels_from_peers",
            )
        self._dumps: CrashDumps | None = None
        if settings.crash_dir is not None:
            self._dumps = CrashDumps(settings.crash_dir, settings.max_crash_dumps, self._worker_id)
        self._engine = EngineClient(
            config,
            self._on_outbox,
            self._on_progress,
            self._dumps.live if self._dumps else None,
            log_level=settings.log_level,
            log_format=settings.log_format,
        )
        self._starting = StartServer(settings, self._identity, self._worker_id)
        self._queries = Queries(self._engine)
        self._profiles = WorkerProfiles(
            ProfileFolder(settings.profile_dir, settings.max_profiles),
            self._engine,
            self._queries,
            self._worker_id,
        )
        self._tracer = make_tracer(settings, self._worker_id)
        self._fills = FillClient(self._engine, self._identity)
        self._queries.before_exit = self._fills.exited
        self._adapters: AdapterFollower | None = None
        if registry is not None:
            send = self._engine.send
            self._adapters = AdapterFollower(registry, settings.served_name, send)
        self._store: StoreClient | None = None
        self._kv_feed: KvFeed | None = None
        self._service: RoleServices | None = None
        self._servicer: WorkerServicer | None = None
        self._closing = contextlib.AsyncExitStack()

    async def start(self) -> WorkerServer:
        """Starts the engine, then the server, whose health is not SERVING yet.

        Raises:
            WeftError: The worker cannot start.
        """
        if self._dumps is not None:
            self._closing.callback(self._dumps.close)
        self._closing.push_async_callback(self._engine.stop)
        self._closing.push_async_callback(self._fills.close)
        await self._engine.spawn()
        # gRPC's threads may exist once the engine was spawned.
        async with self._starting:
            await self._take_kernels()
            config = await self._with_weights(self._config)
            self._starting.take(0, 0, "starting the engine")
            self._engine.configure(config)
            info = await self._engine.wait_ready()
        self._starting.take(0, 0, "opening the ports")
        info = replace(info, notices=[*info.notices, *notes_of(self._placements)])
        self._kv_feed = KvFeed(self._worker_id, info.epoch)
        for notice in info.notices:
            logger.info(notice)
        if not self._config.page_digests:
            logger.warning("pages are not checked: corruption in transit goes unnoticed")
        keep_message_memory()
        self._fills.memory = map_memory(info.incoming)
        self._settings.tell_of_pages("nixl" in info.transports)
        if self._settings.kvstore:
            self._store = self._store_client(info)
            self._closing.push_async_callback(self._store.close)
        registry = self._metrics(info)
        server = ServiceServer(
            self._settings,
            registry,
            admin=WorkerAdmin(
                self._engine,
                self._queries,
                self._profiles,
                self._sizes,
                self._on_weights,
                self._role_state,
                self._identity,
            ),
            identity=self._identity,
            tracer=self._tracer,
        )
        front = self._front(server, info, self._kv_feed)
        self._service, self._servicer = front.service, front.servicer
        await server.start((*front.service.names, "weft.v1.WorkerService"))
        self._closing.push_async_callback(server.close_export)
        self._closing.push_async_callback(server.close_ports)
        return front

    async def _take_kernels(self) -> None:
        """Takes compiled kernels from a worker that has them, where the settings allow it."""
        settings = self._settings
        if not settings.kernels_from_peers:
            return
        assert self._identity is not None, "checked when the settings were read"
        self._starting.take(0, 0, "taking kernels from a worker")
        address = settings.advertise or f"{settings.host}:{settings.port}"
        names = settings.weights_from, settings.served_name
        await fetch_kernels(*names, address, self._identity, KernelFolders.of_host())

    async def _with_weights(self, config: EngineConfig) -> EngineConfig:
        """The settings with the weights of another worker, if one is to be asked and offers them.
        Meanwhile the engine's process imports its modules.
        """
        settings = self._settings
        if settings.page_transport not in ("auto", "nixl"):
            if settings.weights_from != FROM_DISK:
                logger.warning("weights are read from files: without NIXL they do not travel")
            return config
        if settings.weights_from == FROM_DISK:
            return config
        self._starting.take(0, 0, "asking a worker for its weights")
        address = settings.advertise or f"{settings.host}:{settings.port}"
        names = settings.weights_from, settings.served_name
        offer = await find_weights(*names, address, self._identity)
        return config if offer is None else replace(config, weights_offer=offer.to_json())

    async def serve(self, front: WorkerServer) -> int:
        """Serves until a signal, the death of the engine, or until quarantine has taken the pool;
        returns the exit status.

        Raises:
            Exception: What the drain raised.
        """
        server = front.server

        async def drain() -> None:
            await front.servicer.drain(max(0.0, self._settings.drain_grace_s - HAND_BACK_S))

        watchdog = self._watchdog(front)
        serving = asyncio.create_task(server.run_until_signal(drain))
        fencing = start_logged(_end_by_quarantine(server, self._engine, self._config))
        watching = [start_logged(_tell_liveness(server, self._engine)), fencing]
        if self._adapters is not None:
            watching.append(start_logged(self._adapters.run()))
        if watchdog is not None:
            watching.append(start_logged(watchdog.run()))
        ends: set[asyncio.Future[Any]] = {serving, self._engine.gone}
        try:
            # Lets the wait for signals begin, since a supervisor may send one as soon as the worker
            # is ready.
            await asyncio.sleep(0)
            await self._tell_ready(front)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in watching:
                task.cancel()
            if not serving.done():
                await self._say_last_words(front, watchdog)
                return 1
            serving.result()
            return QUARANTINE_STATUS if has_returned(fencing) else 0
        finally:
            for task in (serving, *watching):
                task.cancel()
            await asyncio.gather(serving, *watching, return_exceptions=True)

    async def close(self) -> None:
        """Closes everything that `start` began, however far it came."""
        await self._closing.aclose()

    def _on_progress(self, done: int, total: int, what: str) -> None:
        """Tells callers and a supervisor how far the start is. The supervisor reads a line `done
        total what` in a file next to the ready file.
        """
        self._starting.take(done, total, what)
        if (ready_file := self._settings.ready_file) is not None:
            with contextlib.suppress(OSError):  # A full disk is no reason not to start.
                ready_file.with_suffix(".progress").write_text(f"{done} {total} {what}\n")

    def _on_outbox(self, outbox: Outbox) -> None:
        self._queries.on_outbox(outbox)
        self._profiles.on_outbox(outbox)
        if self._adapters is not None:
            self._adapters.on_outbox(outbox)
        if outbox.kv_changes and self._kv_feed is not None:
            self._kv_feed.take(outbox.kv_changes)
        for command in outbox.fill_commands:
            self._fills.run(command)
        if self._store is not None:
            self._store.on_outbox(outbox)
        self._role_state.on_outbox(outbox)
        if self._service is not None:
            self._service.on_outbox(outbox)

    def _on_weights(self, status: WeightStatus) -> None:
        assert self._servicer is not None, "the operators' port opens after the service"
        self._servicer.change_model(status)

    def _sizes(self) -> dict[str, int]:
        service = {} if self._service is None else self._service.sizes()
        return {**self._fills.sizes(), **service}

    def _store_client(self, info: EngineInfo) -> StoreClient:
        replicas = [
            StoreReplica(
                self._fills, address, self._worker_id, info.epoch, info.page_bytes, self._tracer
            )
            for address in self._settings.kvstores
        ]
        return StoreClient(self._engine, replicas)

    def _metrics(self, info: EngineInfo) -> CollectorRegistry:
        registry = CollectorRegistry()
        registry.register(
            EngineCollector(
                lambda: self._engine.load,
                lambda: self._engine.loop_age_s,
                lambda: () if self._adapters is None else self._adapters.states,
            )
        )
        ProcessCollector(namespace="weft_engine", pid=lambda: info.engine_pid, registry=registry)
        return registry

    def _front(self, server: ServiceServer, info: EngineInfo, kv_feed: KvFeed) -> WorkerServer:
        settings = self._settings
        context = WorkerContext(
            settings=settings,
            engine=self._engine,
            info=info,
            worker_id=self._worker_id,
            queries=self._queries,
            tracer=self._tracer,
        )
        service = RoleServices([make(context) for make in self._make_services])
        servicer = WorkerServicer(
            self._engine,
            self._queries,
            info,
            kv_feed,
            self._role_state,
            self._worker_id,
            settings.served_name,
            os.getpid(),
            settings.kvstores,
            settings.advertise,
            self._adapters,
            lambda: server.admin_port,
            self._placements,
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc)
        service.add_to(server.grpc)
        return WorkerServer(server, service, servicer, info)

    async def _tell_ready(self, front: WorkerServer) -> None:
        server, info = front.server, front.info
        seconds = {what: round(spent, 2) for what, spent in self._starting.phases().items()}
        front.servicer.start_seconds = seconds
        work = {what: round(spent, 2) for what, spent in info.start_work_seconds.items()}
        await server.set_serving(True)
        server.write_ready_file(
            engine_pid=info.engine_pid,
            worker_id=self._worker_id,
            epoch=info.epoch,
            role=self._role,
        )
        logger.info(
            "ready",
            extra={
                "address": server.address,
                "worker_id": self._worker_id,
                "epoch": f"{info.epoch:016x}",
                "start_seconds": seconds,
                "start_work_seconds": work,
            },
        )

    def _watchdog(self, front: WorkerServer) -> Watchdog | None:
        if self._dumps is None:
            return None
        about = {"worker_id": self._worker_id, "role": self._role, "info": _describe(front.info)}
        requests = front.service.open_requests
        return Watchdog(self._settings, self._engine, self._dumps, requests, about)

    async def _say_last_words(self, front: WorkerServer, watchdog: Watchdog | None) -> None:
        """Called before this process ends too."""
        why = self._engine.gone.result()
        logger.error("the engine died: %s", why)
        front.service.on_engine_gone(why)
        if watchdog is not None:
            await watchdog.dump_crash(why)
        await asyncio.sleep(LAST_WORDS_S)


async def run_worker(
    settings: WorkerSettings,
    role: Role,
    make_services: Sequence[Callable[[WorkerContext], RoleService]],
) -> int:
    """Runs a worker until a signal, the death of its engine, or until quarantine has taken its
    pool; returns the exit status.

    Raises:
        Exception: An unexpected error, once everything has ended.
    """
    configure_logging(role, settings.log_level, settings.log_format)
    if settings.enable_faults:
        allow_sabotage("worker")
    try:
        worker = WorkerHost(settings, role, make_services)
    except ConfigError as error:
        logger.error("settings are not valid: %s", error.message)
        return 2
    try:
        try:
            front = await worker.start()
        except WeftError as error:
            logger.error("%s", error.message)
            return 1
        return await worker.serve(front)
    finally:
        await worker.close()


def _describe(info: EngineInfo) -> dict[str, object]:
    return {
        "epoch": f"{info.epoch:016x}",
        "engine_pid": info.engine_pid,
        "model_digest": info.model_digest.hex(),
        "dtype": info.dtype,
        "weight_format": info.weight_format,
        "num_pages": info.num_pages,
        "page_size": info.page_size,
        "transport": info.transport_detail,
        "versions": info.versions,
    }


async def _tell_liveness(server: ServiceServer, engine: EngineClient) -> None:
    while True:
        load = engine.load
        if load is not None:
            await server.set_alive(engine.loop_age_s <= load.stale_after_s)
        await asyncio.sleep(LIVENESS_INTERVAL_S)


async def _end_by_quarantine(
    server: ServiceServer, engine: EngineClient, config: EngineConfig
) -> None:
    """Drains and ends the worker if quarantine has taken its pool, which only the end of the
    process frees.

    It first waits for the life of a lease, in which the proof of an ordinary death comes.
    """
    while True:
        load = engine.load
        if load is not None and load.quarantine_over_s > config.lease_s:
            logger.error(
                "%d of %d KV pages are in quarantine, more than %g of the pool for over %g s: this "
                "worker drains and exits, to be restarted",
                load.quarantined_pages,
                load.total_pages,
                config.max_quarantine_fraction,
                config.lease_s,
            )
            server.request_stop()
            return
        await asyncio.sleep(LIVENESS_INTERVAL_S)
