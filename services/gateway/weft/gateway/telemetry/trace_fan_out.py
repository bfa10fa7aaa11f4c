"""Collects the spans of one request from a gateway's workers and their KV stores."""

from __future__ import annotations

import asyncio

import grpc
from weft.common.rpc.channel import open_channel
from weft.common.rpc.tls import Identity
from weft.gateway.fleet.fleet import Fleet
from weft.v1 import trace_pb2, trace_pb2_grpc

_TIMEOUT_S = 2.0


class TraceFanOut:
    """Implements `weft.common.telemetry.tracing.FanOut`. The answer names the services that do not
    answer within a time limit.
    """

    def __init__(self, fleet: Fleet, identity: Identity | None) -> None:
        self._fleet = fleet
        self._identity = identity

    async def __call__(self, request: trace_pb2.ListSpansRequest) -> trace_pb2.ListSpansResponse:
        services: dict[str, str] = {}
        for worker in self._fleet.workers():
            services[worker.endpoint.address] = worker.endpoint.role
            if worker.info is not None:
                services |= dict.fromkeys(worker.info.kvstores, "kvstore")
        answers = await asyncio.gather(
            *(self._ask(address, role, request) for address, role in services.items())
        )
        response = trace_pb2.ListSpansResponse()
        for answer in answers:
            response.spans.extend(answer.spans)
            response.silent.extend(answer.silent)
        return response

    async def _ask(
        self, address: str, role: str, request: trace_pb2.ListSpansRequest
    ) -> trace_pb2.ListSpansResponse:
        # A channel for this question only, since operators ask rarely.
        async with open_channel(address, role, self._identity) as channel:
            stub = trace_pb2_grpc.TraceServiceStub(channel)
            try:
                answer: trace_pb2.ListSpansResponse = await stub.ListSpans(
                    request, timeout=_TIMEOUT_S
                )
            except grpc.aio.AioRpcError as error:
                silent = trace_pb2.SilentService(address=address, problem=error.code().name)
                return trace_pb2.ListSpansResponse(silent=[silent])
        return answer
