"""Worker processes of `weft up`: its supervisor starts and ends them, on the slots that it has."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
from weft.common.rpc.channel import open_channel
from weft.common.rpc.errors import from_rpc_error
from weft.common.rpc.tls import Identity
from weft.contract.errors import ConfigError, PeerUnavailable
from weft.planner.actuators.base import Members
from weft.planner.forecast import Counts
from weft.planner.observe import PREFILLS
from weft.v1 import mesh_pb2, supervisor_pb2, supervisor_pb2_grpc

_TIMEOUT_S = 5.0


class ProcessActuator:
    """Orders processes. In a mesh with workers of both roles (`weft up --both`) their number is
    that of both roles, and who does what is left to the roles.

    Args:
        file: Where `weft up` says at which address it takes orders. It is read anew for each call.
        token: The operators' token.
        caller: Name of this planner.
    """

    def __init__(self, file: Path, token: str, identity: Identity | None, caller: str) -> None:
        self._file = file
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._identity = identity
        self._caller = caller
        self._last: dict[str, tuple[Counts, supervisor_pb2.WorkerCounts]] = {}
        """What was wanted last, and the order that this became."""
        self._deaths: dict[str, int] = {}

    async def ordered(self, model: str, workers: Members) -> Counts | None:
        known = await self._show(model)
        if known is None:
            return None
        ordered = known.ordered
        if (last := self._last.get(model)) is not None and last[1] == ordered:
            return last[0]
        if not ordered.both:
            return Counts(ordered.prefill, ordered.decode)
        total = ordered.prefill + ordered.decode + ordered.both
        prefill = min(sum(one.role in PREFILLS for one in workers.values()), total - 1)
        return Counts(prefill, total - prefill)

    async def order(
        self, model: str, wanted: Counts, workers: Members, *, apart: bool = True
    ) -> str:
        known = await self._show(model)
        if known is None:
            raise ConfigError(
                f"`weft up` of {self._file} has no model {model!r}; it serves another mesh",
                stage="plan",
            )
        allowed = wanted.within(known.most)
        before, counts = known.ordered, supervisor_pb2.WorkerCounts()
        counts.CopyFrom(before)
        if before.both:
            counts.both = max(1, allowed.total - before.prefill - before.decode)
        else:
            counts.prefill, counts.decode = allowed
        died = self._died(known)
        if counts != before:
            await self._set(model, counts, _ends_first(workers, wanted))
        self._last[model] = (wanted, counts)
        if allowed != wanted:
            raise ConfigError(
                f"{wanted} are wanted, and `weft up` has room for {known.most} workers; start it "
                "with more --max-workers, or give --budget",
                stage="plan",
            )
        changed = "" if counts == before else f"ordered {_told(counts)} (before {_told(before)})"
        return "; ".join(filter(None, (changed, died)))

    async def close(self) -> None:
        pass

    def _died(self, known: supervisor_pb2.SupervisedModel) -> str:
        """Who has died since the last look: the supervisor starts them again."""
        found: list[str] = []
        for worker in known.workers:
            if worker.deaths > self._deaths.get(worker.worker_id, 0):
                found.append(f"{worker.worker_id} died, and is started again")
            self._deaths[worker.worker_id] = worker.deaths
        return "; ".join(found)

    async def _show(self, model: str) -> supervisor_pb2.SupervisedModel | None:
        request = supervisor_pb2.ShowWorkersRequest()
        async with self._channel() as channel:
            stub: supervisor_pb2_grpc.SupervisorServiceAsyncStub = (
                supervisor_pb2_grpc.SupervisorServiceStub(channel)
            )
            try:
                answer = await stub.ShowWorkers(
                    request, timeout=_TIMEOUT_S, metadata=self._metadata
                )
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
        return next((one for one in answer.models if one.model == model), None)

    async def _set(
        self, model: str, counts: supervisor_pb2.WorkerCounts, end_first: list[str]
    ) -> None:
        request = supervisor_pb2.SetWorkersRequest(
            model=model, counts=counts, caller=self._caller, end_first=end_first
        )
        async with self._channel() as channel:
            stub: supervisor_pb2_grpc.SupervisorServiceAsyncStub = (
                supervisor_pb2_grpc.SupervisorServiceStub(channel)
            )
            try:
                await stub.SetWorkers(request, timeout=_TIMEOUT_S, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

    def _channel(self) -> grpc.aio.Channel:
        try:
            address = str(json.loads(self._file.read_text(encoding="utf-8"))["address"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PeerUnavailable(
                f"{self._file} names no `weft up` that takes orders; is it up with --max-workers?",
                stage="plan",
            ) from error
        return open_channel(address, "cli", self._identity)


def _ends_first(workers: Members, wanted: Counts) -> list[str]:
    """Of the role that has too many, the idlest first."""
    num_prefill = sum(one.role in PREFILLS for one in workers.values())
    surplus_prefill = num_prefill - wanted.prefill
    surplus_decode = len(workers) - num_prefill - wanted.decode

    def rank(one: mesh_pb2.MeshMember) -> tuple[bool, int]:
        surplus = surplus_prefill if one.role in PREFILLS else surplus_decode
        return surplus <= 0, one.running_requests

    return [one.member_id for one in sorted(workers.values(), key=rank)]


def _told(counts: supervisor_pb2.WorkerCounts) -> str:
    numbers = {"prefill": counts.prefill, "decode": counts.decode, "both roles": counts.both}
    return ", ".join(f"{count} {name}" for name, count in numbers.items() if count)
