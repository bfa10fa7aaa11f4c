"""The KV store: `weft serve kvstore`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from prometheus_client import CollectorRegistry
from weft.common.default_id import default_id
from weft.common.rpc.listen import keep_nixl_on_loopback
from weft.common.rpc.server import QUARANTINE_STATUS, ServiceServer, run
from weft.common.settings import load_settings
from weft.common.tasks import has_returned, start_logged
from weft.common.telemetry.logging import configure_logging
from weft.common.worker.fill_data import keep_message_memory
from weft.contract.errors import WeftError
from weft.kvstore.admin import StoreAdmin
from weft.kvstore.metrics import StoreCollector
from weft.kvstore.service import KvStoreService
from weft.kvstore.settings import KvStoreSettings
from weft.kvstore.store import KvStore
from weft.v1 import kvstore_pb2_grpc

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns the exit status."""
    settings = load_settings(KvStoreSettings, sys.argv[1:] if argv is None else argv)
    return run(run_store(settings))


async def run_store(settings: KvStoreSettings) -> int:
    """Runs the store until a signal, or until quarantine has taken its arena; returns the exit
    status.
    """
    configure_logging("kvstore", settings.log_level, settings.log_format)
    store_id = settings.store_id or default_id("kvstore", settings.port)
    keep_nixl_on_loopback(settings.host)
    keep_message_memory()
    try:
        store = KvStore(settings, store_id)
    except WeftError as error:
        logger.error("%s", error.message)
        return 1
    try:
        return await _serve(settings, store)
    finally:
        await store.close()


async def _serve(settings: KvStoreSettings, store: KvStore) -> int:
    try:
        if why := await store.warm_up():
            logger.warning("digests are computed without native code, some 5x slower: %s", why)
        registry = CollectorRegistry()
        registry.register(StoreCollector(store))
        server = ServiceServer(settings, registry, admin=StoreAdmin(store), tracer=store.tracer)
        service = KvStoreService(store, lambda: server.admin_port)
        kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(service, server.grpc)
        await server.start((service.name,))
        settings.tell_of_pages("nixl" in store.transport.names)
    except WeftError as error:
        logger.error("%s", error.message)
        return 1
    await server.set_serving(True)
    server.write_ready_file(worker_id=store.store_id, epoch=store.epoch, role="kvstore")
    logger.info(
        "ready",
        extra={
            "address": server.address,
            "store_id": store.store_id,
            "epoch": f"{store.epoch:016x}",
        },
    )
    fencing = start_logged(_end_by_quarantine(server, store, settings))
    try:
        await server.run_until_signal(store.drain)
        return QUARANTINE_STATUS if has_returned(fencing) else 0
    finally:
        fencing.cancel()


async def _end_by_quarantine(
    server: ServiceServer, store: KvStore, settings: KvStoreSettings
) -> None:
    """Only the end of the process frees an arena that quarantine has taken."""
    await store.pool_lost.wait()
    counts = store.counts()
    logger.error(
        "%d of %d pages are in quarantine, more than %g of the arena for over %g s: this store "
        "drains and exits, to be restarted",
        counts.quarantined,
        counts.total,
        settings.max_quarantine_fraction,
        settings.put_timeout_s,
    )
    server.request_stop()
