"""KV stores for tests: in this process, or one of their own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from weft.common.rpc.server import ServiceServer
from weft.kvstore.service import KvStoreService
from weft.kvstore.settings import KvStoreSettings
from weft.kvstore.store import KvStore
from weft.testing.services.processes import ServiceProcess
from weft.v1 import kvstore_pb2_grpc


@contextlib.asynccontextmanager
async def store_here(**changes: Any) -> AsyncIterator[tuple[KvStore, str]]:
    """A store in this process, without NIXL, and its address."""
    values = {"transport": "data", "metrics_port": None, "memory_bytes": 1 << 20} | changes
    settings = KvStoreSettings(**values)
    store = KvStore(settings, "store-here")
    server = ServiceServer(settings, CollectorRegistry())
    service = KvStoreService(store)
    kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(service, server.grpc)
    await server.start((service.name,))
    try:
        yield store, server.address
    finally:
        await server.grpc.stop(0)
        await store.close()


@contextlib.contextmanager
def store_process(
    folder: Path, *flags: str, environment: dict[str, str] | None = None, name: str = "kvstore"
) -> Iterator[tuple[ServiceProcess, dict[str, Any]]]:
    """A store in a process of its own, and the content of its ready file."""
    command = [sys.executable, "-m", "weft.cli", "serve", "kvstore", *flags]
    with ServiceProcess(name, command, folder, environment) as process:
        yield process, process.wait_ready()
