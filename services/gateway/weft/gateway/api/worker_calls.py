"""The calls that drain workers, put them back and set their roles."""

from __future__ import annotations

import asyncio

import grpc
from weft.common.rpc.authorize import OPERATORS
from weft.common.rpc.errors import Context, from_rpc_error
from weft.common.rpc.tls import services_of
from weft.contract.codec.walk import duration
from weft.contract.errors import PermissionDenied, RoleFixed, WorkerNotFound
from weft.gateway.fleet.fleet import Fleet
from weft.gateway.fleet.worker import FleetWorker
from weft.v1 import gateway_pb2, worker_pb2

_DEFAULT_TIMEOUT_S = 60.0
_MAX_TIMEOUT_S = 3600.0
_GRACE_S = 10.0
"""Seconds by which a call to a worker outlasts the worker's own time-out."""


class WorkerCalls:
    """Passes operators' calls on to one worker. With `asks_for_keys` callers need API keys; no
    tenant's key may drain workers.
    """

    def __init__(self, fleet: Fleet, asks_for_keys: bool) -> None:
        self._fleet = fleet
        self._asks_for_keys = asks_for_keys

    def check_caller(self, context: Context) -> None:
        """Raises PermissionDenied unless the caller of the face may drain workers.

        A gateway without API keys leaves that to its certificates; the operators' port needs its
        token.
        """
        names = [name.decode() for name in context.auth_context().get("peer_dns", ())]
        if self._asks_for_keys and OPERATORS.isdisjoint(services_of(names)):
            raise PermissionDenied(
                "no API key may drain workers; an operator's certificate may, and the operators' "
                "port",
                stage="authorize",
            )

    async def drain(
        self, request: gateway_pb2.DrainWorkerRequest, context: Context
    ) -> gateway_pb2.DrainWorkerResponse:
        worker = self._find(request.worker_id)
        timeout_s = _DEFAULT_TIMEOUT_S
        if request.HasField("timeout"):
            timeout_s = request.timeout.ToNanoseconds() / 1e9
        timeout_s = min(max(0.0, timeout_s), _MAX_TIMEOUT_S)
        order = worker_pb2.DrainRequest(keep_running=not request.hand_back)
        order.timeout.CopyFrom(duration(timeout_s))
        try:
            answer = await worker.stub.Drain(order, timeout=timeout_s + _GRACE_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return gateway_pb2.DrainWorkerResponse(
            idle=answer.idle,
            running_requests=answer.running_requests,
            draining=answer.draining,
        )

    async def undrain(
        self, request: gateway_pb2.UndrainWorkerRequest, context: Context
    ) -> gateway_pb2.UndrainWorkerResponse:
        worker = self._find(request.worker_id)
        try:
            answer = await worker.stub.Undrain(worker_pb2.UndrainRequest(), timeout=_GRACE_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return gateway_pb2.UndrainWorkerResponse(was_draining=answer.was_draining)

    def check_decodes_without(self, worker_id: str) -> None:
        """Raises RoleFixed if a worker is the last one of its model that decodes, WorkerNotFound if
        there is no such worker.
        """
        model = self._find(worker_id).model
        now = asyncio.get_running_loop().time()
        others = [
            worker
            for worker in self._fleet.workers("decode", model)
            if worker.info is not None and worker.info.worker_id != worker_id
        ]
        if all(worker.problem(now) for worker in others):
            raise RoleFixed(
                f"{worker_id} is the last worker that decodes for {model}: no request of it could "
                "be answered; set another one to decode first, or force it",
                stage="role",
                param="role",
            )

    def take_role(self, worker_id: str, state: worker_pb2.RoleState) -> None:
        """Requests and the next order go by a role that has just been set."""
        for worker in self._fleet.workers():
            if worker.info is not None and worker.info.worker_id == worker_id:
                worker.take_role(state)

    def _find(self, worker_id: str) -> FleetWorker:
        """Raises WorkerNotFound, whose message names the workers that there are."""
        known: dict[str, FleetWorker] = {}
        for worker in self._fleet.workers():
            if worker.info is not None:
                known[worker.info.worker_id] = worker
        if worker_id not in known:
            names = ", ".join(sorted(known)) or "none"
            raise WorkerNotFound(f"no worker {worker_id!r}; there are: {names}", param="worker_id")
        return known[worker_id]
