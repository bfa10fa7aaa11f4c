"""Waits until the mesh as a whole answers."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
from collections.abc import Callable

import grpc
from google.protobuf.empty_pb2 import Empty
from weft.cli.channel import open_channel
from weft.common.rpc.tls import Identity
from weft.v1 import gateway_pb2, gateway_pb2_grpc, openai_pb2_grpc

_INTERVAL_S = 0.1
_CALL_TIMEOUT_S = 5.0
_FLEET_GRACE_S = 10.0
_NOTICE_EVERY_S = 15.0


async def wait_for_mesh(
    grpc_address: str,
    rest_url: str | None,
    timeout_s: float,
    identity: Identity | None = None,
    notice: Callable[[str], None] = lambda text: None,
) -> None:
    """Returns once `/readyz` says 200, or without REST once the gateway itself is ready. The mesh
    answers with one worker of each kind; the other workers get some seconds more.

    `notice` is called from time to time with the parts that are still missing. Raises TimeoutError,
    with the last answer, if the mesh was not ready in time.
    """
    loop = asyncio.get_running_loop()
    deadline, next_notice = loop.time() + timeout_s, loop.time() + _NOTICE_EVERY_S
    async with open_channel(grpc_address, "gateway", identity) as channel:
        while (problem := await _problem(channel, rest_url, identity)) is not None:
            told = problem.rstrip(".")
            if loop.time() > deadline:
                raise TimeoutError(f"the mesh was not ready after {timeout_s:g} s: {told}")
            if loop.time() > next_notice:
                next_notice += _NOTICE_EVERY_S
                notice(f"the mesh is not ready yet: {told}")
            await asyncio.sleep(_INTERVAL_S)
    await wait_for_workers(grpc_address, min(deadline - loop.time(), _FLEET_GRACE_S), identity)


async def wait_for_workers(
    grpc_address: str, timeout_s: float, identity: Identity | None = None
) -> None:
    """Returns once a gateway sees all workers healthy, or after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    async with open_channel(grpc_address, "gateway", identity) as channel:
        while loop.time() < deadline and not await _sees_everyone(channel):
            await asyncio.sleep(_INTERVAL_S)


async def _problem(
    channel: grpc.aio.Channel, rest_url: str | None, identity: Identity | None
) -> str | None:
    if rest_url is not None:
        return await asyncio.to_thread(_get_readyz, rest_url, identity)
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
    except grpc.aio.AioRpcError:  # The gateway has died meanwhile, which the supervisor handles.
        return False
    return all(worker.healthy for worker in fleet.workers)


def _get_readyz(url: str, identity: Identity | None) -> str | None:
    scheme, _, address = url.partition("://")
    connection = http.client.HTTPConnection(address, timeout=_CALL_TIMEOUT_S)
    if scheme == "https":
        context = ssl.create_default_context() if identity is None else identity.client_context()
        # This only asks whether the edge is ready, at an address that its certificate need not
        # name. Clients check its identity.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
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
