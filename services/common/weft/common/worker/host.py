"""Start, life and end of a worker: engine process, gRPC server, drain, death in common."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any, Protocol

import grpc
from prometheus_client import CollectorRegistry, ProcessCollector
from weft.common.listen import keep_nixl_on_loopback
from weft.common.logging import configure_logging
from weft.common.requestlog import LoggedPrompt
from weft.common.server import QUARANTINE_STATUS, ServiceServer
from weft.common.tasks import has_returned, start_logged
from weft.common.tls import load_identity
from weft.common.tracing import make_tracer
from weft.common.worker.adapters import AdapterFollower, open_registry
from weft.common.worker.admin import WorkerAdmin
from weft.common.worker.context import WorkerContext
from weft.common.worker.engine_client import EngineClient
from weft.common.worker.fill_client import FillClient
from weft.common.worker.kv_feed import KvFeed
from weft.common.worker.metrics import EngineCollector
from weft.common.worker.service import HAND_BACK_S, Queries, WorkerServicer
from weft.common.worker.settings import WorkerSettings
from weft.common.worker.store_client import StoreClient
from weft.common.worker.store_replica import StoreReplica
from weft.common.worker.watchdog import CrashDumps, Watchdog
from weft.engine.config import Role
from weft.engine.errors import ConfigError, WeftError
from weft.engine.messages import EngineInfo, Outbox
from weft.v1 import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

LIVENESS_INTERVAL_S = 1.0
LAST_WORDS_S = 0.5
"""Time for typed errors to reach the peers after the engine died."""
ROLES = {
    "decode": worker_pb2.WORKER_ROLE_DECODE,
    "prefill": worker_pb2.WORKER_ROLE_PREFILL,
}


class RoleService(Protocol):
    """The role's own gRPC service over an engine."""

    name: str
    """Full name of the gRPC service."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the servicer."""
        ...

    def on_outbox(self, outbox: Outbox) -> None:
        """Takes what the engine produced."""
        ...

    def sizes(self) -> dict[str, int]:
        """Lengths of what it keeps for calls, by name."""
        ...

    def open_requests(self) -> list[LoggedPrompt]:
        """Requests under way, for dumps."""
        ...

    def on_engine_gone(self, reason: str) -> None:
        """Fails everything that waits for the engine."""
        ...


async def run_worker(
    settings: WorkerSettings,
    role: Role,
    make_service: Callable[[WorkerContext], RoleService],
) -> int:
    """Runs a worker until a signal, its engine's death or the loss of its pool to quarantine.

    Returns:
        The exit status.
    """
    configure_logging(role, settings.log_level, settings.log_format)
    worker_id = settings.worker_id or f"{role}-{settings.port or os.getpid()}"
    service: RoleService | None = None

    def on_outbox(outbox: Outbox) -> None:
        queries.on_outbox(outbox)
        if adapters is not None:
            adapters.on_outbox(outbox)
        if outbox.kv_changes and kv_feed is not None:
            kv_feed.take(outbox.kv_changes)
        for command in outbox.fill_commands:
            fills.run(command)
        if store is not None:
            for lookup in outbox.store_lookups:
                store.look_up(lookup)
            for put in outbox.store_puts:
                store.put(put)
        if service is not None:
            service.on_outbox(outbox)

    def sizes() -> dict[str, int]:
        return {**fills.sizes(), **(service.sizes() if service is not None else {})}

    try:
        config = settings.engine_config(role, worker_id)
        registry_of_adapters = open_registry(settings.adapter_root)
        identity = load_identity(settings)
    except ConfigError as error:
        logger.error("settings are not valid: %s", error.message)
        return 2
    dumps: CrashDumps | None = None
    try:
        if settings.crash_dir is not None:
            dumps = CrashDumps(settings.crash_dir, settings.max_crash_dumps, worker_id)
    except ConfigError as error:
        logger.error("settings are not valid: %s", error.message)
        return 2
    keep_nixl_on_loopback(settings.host)
    engine = EngineClient(
        config,
        on_outbox,
        _progress_writer(settings),
        dumps.live if dumps else None,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    queries = Queries(engine)
    tracer = make_tracer(settings, worker_id)
    fills = FillClient(engine, identity)
    store: StoreClient | None = None
    kv_feed: KvFeed | None = None
    adapters: AdapterFollower | None = None
    if registry_of_adapters is not None:
        adapters = AdapterFollower(registry_of_adapters, settings.served_name, engine.send)
    try:
        info = await engine.start()
        kv_feed = KvFeed(worker_id, info.epoch)
        # Only now: the engine is spawned before gRPC's threads exist.
        registry = CollectorRegistry()
        server = ServiceServer(
            settings,
            registry,
            admin=WorkerAdmin(engine, queries, sizes),
            identity=identity,
            tracer=tracer,
        )
        for notice in info.notices:
            logger.warning(notice)
        if not settings.page_digests:
            logger.warning("pages are not checked: damage on their way goes unnoticed")
        settings.tell_of_pages("nixl" in info.transports)
        if settings.kvstore:
            replicas = [
                StoreReplica(fills, address, worker_id, info.epoch, info.page_bytes, tracer)
                for address in settings.kvstores
            ]
            store = StoreClient(engine, replicas)
        service = make_service(
            WorkerContext(
                settings=settings,
                engine=engine,
                info=info,
                worker_id=worker_id,
                queries=queries,
                tracer=tracer,
            )
        )
        servicer = WorkerServicer(
            engine,
            queries,
            info,
            kv_feed,
            ROLES[role],
            worker_id,
            settings.served_name,
            os.getpid(),
            settings.kvstores,
            settings.advertise,
            adapters,
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc)
        service.add_to(server.grpc)
        registry.register(
            EngineCollector(
                lambda: engine.load,
                lambda: engine.loop_age_s,
                lambda: () if adapters is None else adapters.states,
            )
        )
        engine_pid = info.engine_pid
        ProcessCollector(namespace="weft_engine", pid=lambda: engine_pid, registry=registry)
        await server.start((service.name, "weft.v1.WorkerService"))
    except WeftError as error:
        logger.error("%s", error.message)
        await engine.stop()
        return 1
    await server.set_serving(True)
    server.write_ready_file(
        engine_pid=info.engine_pid, worker_id=worker_id, epoch=info.epoch, role=role
    )
    logger.info(
        "ready",
        extra={"address": server.address, "worker_id": worker_id, "epoch": f"{info.epoch:016x}"},
    )

    async def drain() -> None:
        await servicer.drain(max(0.0, settings.drain_grace_s - HAND_BACK_S))

    watchdog: Watchdog | None = None
    if dumps is not None:
        about = {"worker_id": worker_id, "role": role, "info": _describe(info)}
        watchdog = Watchdog(settings, engine, dumps, service.open_requests, about)
    serving = asyncio.create_task(server.run_until_signal(drain))
    fencing = start_logged(_end_by_quarantine(server, engine, settings))
    watching = [start_logged(_tell_liveness(server, engine)), fencing]
    if adapters is not None:
        watching.append(start_logged(adapters.run()))
    if watchdog is not None:
        watching.append(start_logged(watchdog.run()))
    ends: set[asyncio.Future[Any]] = {serving, engine.gone}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    status = QUARANTINE_STATUS if has_returned(fencing) else 0
    for task in watching:
        task.cancel()
    if not serving.done():
        # One process of a worker never outlives the other: say so on every stream, then end.
        logger.error("the engine died: %s", engine.gone.result())
        service.on_engine_gone(engine.gone.result())
        if watchdog is not None:
            await watchdog.dump_crash(engine.gone.result())
        await asyncio.sleep(LAST_WORDS_S)
        serving.cancel()
        await server.grpc.stop(0)
        await server.close_export()
        status = 1
    await asyncio.gather(serving, *watching, return_exceptions=True)
    if store is not None:
        await store.close()
    await fills.close()
    await engine.stop()
    if dumps is not None:
        dumps.close()
    if not serving.cancelled():
        serving.result()
    return status


def _describe(info: EngineInfo) -> dict[str, object]:
    return {
        "epoch": f"{info.epoch:016x}",
        "engine_pid": info.engine_pid,
        "model_digest": info.model_digest.hex(),
        "dtype": info.dtype,
        "num_pages": info.num_pages,
        "page_size": info.page_size,
        "transport": info.transport_detail,
        "versions": info.versions,
    }


async def _tell_liveness(server: ServiceServer, engine: EngineClient) -> None:
    """A worker is alive while its engine's loop turns within its own bound."""
    while True:
        load = engine.load
        if load is not None:
            await server.set_alive(engine.loop_age_s <= load.stale_after_s)
        await asyncio.sleep(LIVENESS_INTERVAL_S)


async def _end_by_quarantine(
    server: ServiceServer, engine: EngineClient, settings: WorkerSettings
) -> None:
    """Drains and ends the worker once its pool is lost to quarantine: that is the last fence.

    A lease's life is waited for: the proof of an ordinary death comes sooner.
    """
    while True:
        load = engine.load
        if load is not None and load.quarantine_over_s > settings.lease_s:
            logger.error(
                "%d of %d KV pages are in quarantine, more than %g of the pool for over %g s: this "
                "worker drains and ends, for a new one to take its place",
                load.quarantined_pages,
                load.total_pages,
                settings.max_quarantine_fraction,
                settings.lease_s,
            )
            server.request_stop()
            return
        await asyncio.sleep(LIVENESS_INTERVAL_S)


def _progress_writer(settings: WorkerSettings) -> Callable[[int, int, str], None]:
    """Where a supervisor reads how far loading is: a line `done total what` beside the ready
    file."""
    ready_file = settings.ready_file

    def write(done: int, total: int, what: str) -> None:
        if ready_file is not None:
            ready_file.with_suffix(".progress").write_text(f"{done} {total} {what}\n")

    return write
