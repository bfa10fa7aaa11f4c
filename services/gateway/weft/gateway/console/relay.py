"""Passes operators' calls on to the members of a mesh."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
from weft.common.rpc.channel import open_channel
from weft.common.rpc.errors import from_rpc_error
from weft.common.rpc.tls import Identity
from weft.contract.errors import PeerUnavailable, WeftError
from weft.gateway.console.stores import StoreWatch
from weft.gateway.fleet.fleet import Fleet
from weft.v1 import admin_pb2_grpc

_SHOWN = 50


class MemberNotFound(WeftError):
    """The mesh has no member of this id, or not one that the call is for."""

    reason = "MEMBER_NOT_FOUND"
    grpc_code = "NOT_FOUND"
    http_status = 404


class _OperatorsPort(NamedTuple):
    address: str
    service: str


class OperatorsRelay:
    """Calls the admin ports of workers and stores, on the hosts that serve their gRPC ports."""

    def __init__(self, fleet: Fleet, stores: StoreWatch, identity: Identity | None) -> None:
        self._fleet = fleet
        self._stores = stores
        self._identity = identity

    @asynccontextmanager
    async def reach(self, member_id: str) -> AsyncIterator[Any]:
        """A stub of a member's AdminService, for the duration of the block, whose failed calls are
        raised as typed errors. Calls need the operators' token in their metadata. Raises
        MemberNotFound if there is no such member, PeerUnavailable if it has no operators' port or
        does not answer there.
        """
        if member_id not in self._members():
            await self._stores.ask_once()
        port = self._find(member_id)
        async with open_channel(port.address, port.service, self._identity) as channel:
            try:
                yield admin_pb2_grpc.AdminServiceStub(channel)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

    def _members(self) -> dict[str, tuple[str, str, int]]:
        """Address, service and operators' port of each member, by its id."""
        found: dict[str, tuple[str, str, int]] = {}
        for worker in self._fleet.workers():
            if (info := worker.info) is not None:
                at = (worker.endpoint.address, worker.endpoint.role, info.admin_port)
                found[info.worker_id] = at
        for address, state in self._stores.states.items():
            if state.info is not None:
                found[state.info.store_id] = (address, "kvstore", state.info.admin_port)
        return found

    def _find(self, member_id: str) -> _OperatorsPort:
        members = self._members()
        if member_id not in members:
            raise MemberNotFound(
                f"there is no member {member_id[:_SHOWN]!r}; there are {', '.join(members)}",
                stage="validate",
                param="member_id",
            )
        address, service, port = members[member_id]
        if not port:
            raise PeerUnavailable(
                f"{member_id} has no operators' port that this gateway reaches: start it with "
                "--admin-port, --admin-token-file and, on another machine, --admin-host",
                stage="admin",
                worker_id=member_id,
            )
        return _OperatorsPort(f"{address.rpartition(':')[0]}:{port}", service)
