"""Pages of workers and stores, as the services report them."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from weft.v1 import kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc

_CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePages:
    free: int
    cached: int
    used: int
    quarantined: int
    total: int
    in_work: int
    """Requests, fills or puts in progress."""

    @property
    def is_whole(self) -> bool:
        """Whether every page is in exactly one state."""
        return self.free + self.cached + self.used + self.quarantined == self.total

    @property
    def is_idle(self) -> bool:
        """Whether no work is in progress and no page is held."""
        return not self.in_work and self.free + self.cached == self.total

    def __str__(self) -> str:
        return (
            f"{self.free} free, {self.cached} cached, {self.used} used, {self.quarantined} "
            f"quarantined of {self.total}; {self.in_work} in work"
        )


async def read_pages(channel: grpc.aio.Channel, *, is_store: bool) -> ServicePages:
    """Asks a worker or a store for its pages. Raises grpc.aio.AioRpcError."""
    return await (_store_pages(channel) if is_store else _worker_pages(channel))


async def _worker_pages(channel: grpc.aio.Channel) -> ServicePages:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    call = stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=_CALL_TIMEOUT_S)
    async for load in call:
        call.cancel()
        return ServicePages(
            free=load.free_pages,
            cached=load.cached_pages,
            used=load.used_pages,
            quarantined=load.quarantined_pages,
            total=load.total_pages,
            in_work=load.running_requests + load.waiting_requests + load.filling_requests,
        )
    raise AssertionError("a call without an error and without a report")


async def _store_pages(channel: grpc.aio.Channel) -> ServicePages:
    stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
    stats = await stub.Stats(kvstore_pb2.StatsRequest(), timeout=_CALL_TIMEOUT_S)
    return ServicePages(
        free=stats.free_pages,
        cached=stats.cached_pages,
        used=stats.pinned_pages,
        quarantined=stats.quarantined_pages,
        total=stats.total_pages,
        in_work=stats.counters["open_fills"] + stats.counters["open_puts"],
    )
