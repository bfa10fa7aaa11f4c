"""Informs workers that an incarnation of another process is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc
from weft.cli.channel import open_channel, service_of
from weft.common.rpc.tls import Identity
from weft.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 2.0
_ATTEMPTS = 3


async def report_exit(
    workers: Mapping[str, str], worker_id: str, epoch: int, identity: Identity | None = None
) -> dict[str, int]:
    """Ends the quarantine of pages that a gone incarnation was filling. Call it only when the
    worker's server and engine are both certainly gone. Other hosts of the worker need not be: the
    fence of an owner ends their writes.

    `workers` has the host:port, by name, of every worker that it may have filled. Returns the
    number of released pages by name. A worker that cannot be reached is left out; it learns of the
    end when it meets the new incarnation.
    """
    request = worker_pb2.ReportExitRequest(worker_id=worker_id, epoch=epoch)
    answers = await asyncio.gather(
        *(_tell(name, address, request, identity) for name, address in workers.items())
    )
    pairs = zip(workers, answers, strict=True)
    return {name: pages for name, pages in pairs if pages is not None}


async def _tell(
    name: str, address: str, request: worker_pb2.ReportExitRequest, identity: Identity | None
) -> int | None:
    async with open_channel(address, service_of(name), identity) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        for attempt in range(_ATTEMPTS):
            try:
                answer = await stub.ReportExit(request, timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1 * 2**attempt)
            else:
                return int(answer.released_pages)
    return None
