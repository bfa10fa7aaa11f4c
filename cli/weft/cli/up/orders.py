"""Serves orders for the workers of `weft up`, on a port of its own with the operators' token."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc
from weft.cli.up.elastic import ElasticWorkers, Ordered
from weft.cli.up.plan import WORKER_HOST
from weft.common.admin import TokenInterceptor
from weft.common.rpc.authorize import OPERATORS, AuthorizeInterceptor
from weft.common.rpc.errors import Context
from weft.common.rpc.interceptors import ErrorInterceptor
from weft.common.rpc.listen import add_port
from weft.common.rpc.tls import Identity
from weft.contract.errors import InvalidRequest
from weft.v1 import supervisor_pb2, supervisor_pb2_grpc

_MAX_CALLER_CHARS, _MAX_NAMES = 64, 1024


class SupervisorServicer(supervisor_pb2_grpc.SupervisorServiceServicer):
    """Checks and converts."""

    def __init__(self, workers: ElasticWorkers) -> None:
        self._workers = workers

    async def ShowWorkers(
        self, request: supervisor_pb2.ShowWorkersRequest, context: Context
    ) -> supervisor_pb2.ShowWorkersResponse:
        return supervisor_pb2.ShowWorkersResponse(models=self._workers.show())

    async def SetWorkers(
        self, request: supervisor_pb2.SetWorkersRequest, context: Context
    ) -> supervisor_pb2.SetWorkersResponse:
        if not 1 <= len(request.caller) <= _MAX_CALLER_CHARS:
            raise InvalidRequest(
                f"caller must have 1 to {_MAX_CALLER_CHARS} characters",
                stage="validate",
                param="caller",
            )
        if len(request.end_first) > _MAX_NAMES:
            raise InvalidRequest(f"at most {_MAX_NAMES} names", stage="validate", param="end_first")
        counts = request.counts
        before = self._workers.order(
            request.model,
            Ordered(counts.prefill, counts.decode, counts.both),
            request.caller,
            request.end_first,
        )
        previous = supervisor_pb2.WorkerCounts(**before._asdict())
        return supervisor_pb2.SetWorkersResponse(previous=previous)


@contextlib.asynccontextmanager
async def serving(
    workers: ElasticWorkers, token: str, identity: Identity | None
) -> AsyncIterator[str]:
    """Serves inside the block, at the address that it gives."""
    authorize = () if identity is None else (AuthorizeInterceptor(OPERATORS),)
    server = grpc.aio.server(
        interceptors=(*authorize, TokenInterceptor(token), ErrorInterceptor()),
        options=(("grpc.so_reuseport", 0),),
    )
    supervisor_pb2_grpc.add_SupervisorServiceServicer_to_server(SupervisorServicer(workers), server)
    credentials = None if identity is None else identity.server_credentials(True)
    address = add_port(server, WORKER_HOST, 0, ("--port", "--host"), credentials)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)
        await workers.close()
