"""Whether the mesh as a whole answers."""

from __future__ import annotations

import asyncio
import http.client
import json

import grpc
from google.protobuf.empty_pb2 import Empty
from weft.cli.channel import open_channel
from weft.common.tls import Identity
from weft.v1 import gateway_pb2, gateway_pb2_grpc, openai_pb2_grpc

_INTERVAL_S = 0.1
_CALL_TIMEOUT_S = 5.0
_FLEET_GRACE_S = 10.0


async def wait_for_mesh(
    grpc_address: str,
    rest_address: str | None,
    timeout_s: float,
    identity: Identity | None = None,
) -> None:
    """Returns once `/readyz` says 200, or without REST once the gateway itself says so.

    That takes one worker of each kind; the others get some seconds more to be seen.

    Raises:
        TimeoutError: It did not in time; the message has the last answer.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    async with open_channel(grpc_address, "gateway", identity) as channel:
        while (problem := await _problem(channel, rest_address, identity)) is not None:
            if loop.time() > deadline:
                told = problem.rstrip(".")
                raise TimeoutError(f"the mesh was not ready after {timeout_s:g} s: {told}")
            await asyncio.sleep(_INTERVAL_S)
        deadline = min(deadline, loop.time() + _FLEET_GRACE_S)
        while loop.time() < deadline and not await _sees_everyone(channel):
            await asyncio.sleep(_INTERVAL_S)


async def _problem(
    channel: grpc.aio.Channel, rest_address: str | None, identity: Identity | None
) -> str | None:
    if rest_address is not None:
        return await asyncio.to_thread(_get_readyz, rest_address, identity)
    stub = openai_pb2_grpc.OpenAIServiceStub(channel)
    try:
        await stub.Ready(Empty(), timeout=_CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return error.details() or error.code().name
    return None


async def _sees_everyone(channel: grpc.aio.Channel) -> bool:
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    try:
        fleet = await stub.GetFleet(gateway_pb2.GetFleetRequest(), timeout=_CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError:  # it has died meanwhile; the supervisor's affair
        return False
    return all(worker.healthy for worker in fleet.workers)


def _get_readyz(address: str, identity: Identity | None) -> str | None:
    if identity is None:
        connection = http.client.HTTPConnection(address, timeout=_CALL_TIMEOUT_S)
    else:
        context = identity.client_context()
        connection = http.client.HTTPSConnection(address, timeout=_CALL_TIMEOUT_S, context=context)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return f"{address}: {error}"
    finally:
        connection.close()
    return None if answer.status == http.HTTPStatus.OK else _message(body)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
