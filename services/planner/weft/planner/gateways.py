"""The gateways that a planner watches and tells."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Set

import grpc
from google.protobuf.duration_pb2 import Duration
from weft.common.admin import read_token
from weft.common.rpc.channel import ServiceChannel, open_channel
from weft.common.rpc.errors import from_rpc_error
from weft.common.rpc.listen import bracket, split_address
from weft.common.rpc.tls import Identity
from weft.contract.codec.walk import duration
from weft.contract.errors import PeerUnavailable, WeftError
from weft.planner.actuators.base import CALL_TIMEOUT_S
from weft.planner.settings import DNS, PlannerSettings
from weft.v1 import mesh_pb2, mesh_pb2_grpc

_log = logging.getLogger(__name__)

_ORDER_TIMEOUT_S = 3.0
_RESOLVE_TIMEOUT_S = 5.0


class GatewayCalls:
    """The operators' ports of gateways, of which some may have been found by names.

    Raises:
        ConfigError: The token cannot be read.
    """

    def __init__(self, settings: PlannerSettings, identity: Identity | None) -> None:
        assert settings.admin_token_file is not None, "checked with the settings"
        self._metadata = (("authorization", f"Bearer {read_token(settings.admin_token_file)}"),)
        self._identity = identity
        names = [one.removeprefix(DNS) for one in settings.gateway if one.startswith(DNS)]
        self._names = [split_address(name) for name in names]
        self._resolved: dict[tuple[str, int], set[str]] = {}
        self._fixed = {one for one in settings.gateway if not one.startswith(DNS)}
        self._channels: dict[str, ServiceChannel] = {}

    @property
    def addresses(self) -> Set[str]:
        """Of all gateways that were found."""
        return self._channels.keys()

    async def find(self) -> None:
        """Looks up which gateways there are. A name that is not resolved keeps its addresses."""
        await asyncio.gather(*(self._resolve(*name) for name in self._names))
        found = self._fixed.union(*self._resolved.values())
        for address in found - self._channels.keys():
            self._channels[address] = open_channel(address, "gateway", self._identity)
        for address in self._channels.keys() - found:
            await self._channels.pop(address).close()

    async def _resolve(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            _log.warning("%s cannot be resolved: %s", host, error or "no answer")
            return
        self._resolved[host, port] = {f"{bracket(str(one[4][0]))}:{port}" for one in found}

    def _stub(self, address: str) -> mesh_pb2_grpc.MeshServiceAsyncStub:
        stub: mesh_pb2_grpc.MeshServiceAsyncStub = mesh_pb2_grpc.MeshServiceStub(
            self._channels[address]
        )
        return stub

    async def watch(self, address: str) -> AsyncIterator[mesh_pb2.WatchMeshResponse]:
        """Yields what a gateway tells of its mesh, until the gateway ends the stream. Raises
        WeftError.
        """
        request = mesh_pb2.WatchMeshRequest(interval=Duration(seconds=1))
        call = self._stub(address).WatchMesh(request, metadata=self._metadata)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def tell(
        self, address: str, request: mesh_pb2.TellPlanRequest
    ) -> mesh_pb2.TellPlanResponse:
        """Raises WeftError."""
        try:
            return await self._stub(address).TellPlan(
                request, timeout=CALL_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def set_role(self, member_id: str, role: str, lease_s: float) -> str:
        """Asks one gateway after the other until one answers."""
        request = mesh_pb2.SetMemberRoleRequest(member_id=member_id, role=role)
        request.lease.CopyFrom(duration(lease_s))
        failure: WeftError | None = None
        for address in list(self._channels):
            try:
                answer = await self._stub(address).SetMemberRole(
                    request, timeout=_ORDER_TIMEOUT_S, metadata=self._metadata
                )
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                if not isinstance(failure, PeerUnavailable):
                    break
                continue
            return answer.previous_role
        raise failure or PeerUnavailable("no gateway was found", stage="role")

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
