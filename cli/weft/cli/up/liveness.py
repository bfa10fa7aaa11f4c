"""Finds services whose process lives but does no work, such as stalled engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from weft.cli.channel import open_channel, service_of
from weft.common.rpc.server import LIVENESS
from weft.common.rpc.tls import Identity

IsAlive = Callable[[str, str], Awaitable[bool]]
"""Returns whether the service of this name, at this host:port, is alive."""

_LOOKS = 10
"""Checks in the time that a service may be unreachable. Each opens a connection."""
_CALL_TIMEOUT_S = 5.0


async def wait_stalled(
    is_alive: Callable[[], Awaitable[bool]], timeout_s: float, interval_s: float | None = None
) -> None:
    """Returns once a service was not alive at any check during `timeout_s`. Checks are `interval_s`
    apart; None: a tenth of `timeout_s`.

    Only the regular time between checks counts: a pause of this process or of the whole machine
    says nothing about the service.
    """
    interval_s = timeout_s / _LOOKS if interval_s is None else interval_s
    stalled_s = 0.0
    before = time.monotonic()
    while stalled_s < timeout_s:
        await asyncio.sleep(interval_s)
        alive = await is_alive()
        now = time.monotonic()
        stalled_s = 0.0 if alive else stalled_s + min(now - before, interval_s + _CALL_TIMEOUT_S)
        before = now


def health_checker(identity: Identity | None) -> IsAlive:
    """Asks grpc.health.v1 as a kubelet's liveness probe would. No answer counts as not alive."""

    async def is_alive(name: str, address: str) -> bool:
        request = health_pb2.HealthCheckRequest(service=LIVENESS)
        # Each check opens a new connection, since a stuck old one says nothing about the service.
        async with open_channel(address, service_of(name), identity) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(request, timeout=_CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return is_alive
