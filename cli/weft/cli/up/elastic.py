"""Worker processes that come and go while a mesh runs, by order.

spare slot -> starting -> serving -> draining -> spare slot
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import grpc
from weft.cli.channel import open_channel, service_of
from weft.cli.up.plan import ModelWorkers, PlannedWorker, Slot, worker_name
from weft.cli.up.supervisor import Supervisor
from weft.common.rpc.tls import Identity
from weft.contract.codec.walk import duration
from weft.contract.errors import InvalidRequest, ModelNotFound, Starting
from weft.v1 import supervisor_pb2, worker_pb2, worker_pb2_grpc

_DRAIN_MARGIN_S = 15.0

Drain = Callable[[str, str], Awaitable[None]]
"""Takes a worker's name and address; returns once it has handed over what ran there."""


class Ordered(NamedTuple):
    """Workers of one model, by their roles."""

    prefill: int
    decode: int
    both: int


@dataclass(slots=True)
class _Model:
    plan: ModelWorkers
    workers: dict[str, PlannedWorker]
    spare: list[Slot]
    ordered: Ordered
    ordered_by: str = ""
    ending: set[str] = field(default_factory=set)
    """Workers that drain."""

    @property
    def most(self) -> int:
        return len(self.workers) + len(self.spare)

    def of_role(self, role: str) -> list[str]:
        """Names of the workers that stay."""
        return [
            name
            for name, worker in self.workers.items()
            if worker.role == role and name not in self.ending
        ]


class ElasticWorkers:
    """Keeps as many workers as are ordered, on the slots that there are.

    Args:
        file: In which gateways find the workers.
        addresses: Of all workers, by name; kept up to date.
        grace_s: Time that a drained worker has to end.
    """

    def __init__(
        self,
        plans: Sequence[ModelWorkers],
        file: Path,
        addresses: dict[str, str],
        drain: Drain,
        grace_s: float,
    ) -> None:
        self._file = file
        self._addresses = addresses
        self._drain = drain
        self._grace_s = grace_s
        self._supervisor: Supervisor | None = None
        self._models = {plan.model: _of(plan) for plan in plans}
        self._tasks: set[asyncio.Task[None]] = set()
        self._write()

    def begin(self, supervisor: Supervisor) -> None:
        """Orders are taken from now on: the mesh is up, and `supervisor` watches it."""
        self._supervisor = supervisor

    async def close(self) -> None:
        """Drains are given up; processes are the supervisor's to stop."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def show(self) -> list[supervisor_pb2.SupervisedModel]:
        return [self._describe(name, model) for name, model in self._models.items()]

    def order(self, name: str, counts: Ordered, caller: str, end_first: Sequence[str]) -> Ordered:
        """Orders numbers of workers; returns those before.

        Raises:
            ModelNotFound: There is no such model.
            InvalidRequest: They are too many, or none of them owns requests.
        """
        model = self._find(name)
        if self._supervisor is None or not self._supervisor.is_watching:
            raise Starting(
                "the mesh is starting or ending; order again once it is up", stage="scale"
            )
        if not counts.decode + counts.both:
            raise InvalidRequest(
                "no worker would own requests; order a decode worker, or one of both roles",
                stage="scale",
                param="counts",
            )
        if sum(counts) > model.most:
            raise InvalidRequest(
                f"{sum(counts)} workers are ordered, and there is room for {model.most}; start the "
                "mesh with more --max-workers",
                stage="scale",
                param="counts",
            )
        before, model.ordered, model.ordered_by = model.ordered, counts, caller
        self._follow(model, end_first)
        return before

    def _follow(self, model: _Model, end_first: Sequence[str] = ()) -> None:
        """Ends what is too many; starts what lacks, as far as slots are free."""
        for role, count in model.ordered._asdict().items():
            for name in self._surplus(model, role, count, end_first):
                model.ending.add(name)
                task = asyncio.create_task(self._end(model, name))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        for role, count in model.ordered._asdict().items():
            while len(model.of_role(role)) < count and model.spare:
                self._start(model, role)
        self._write()

    def _surplus(self, model: _Model, role: str, count: int, end_first: Sequence[str]) -> list[str]:
        """Those that have not started yet go first, then those that the caller names, then the
        newest.
        """
        assert self._supervisor is not None
        names = model.of_role(role)
        wanted = {name: place for place, name in enumerate(end_first)}

        def rank(at: int) -> tuple[bool, int, int]:
            return self._is_serving(names[at]), wanted.get(names[at], len(wanted)), -at

        too_many = max(0, len(names) - count)
        return [names[at] for at in sorted(range(len(names)), key=rank)][:too_many]

    def _start(self, model: _Model, role: str) -> None:
        assert self._supervisor is not None
        taken = {name for other in self._models.values() for name in other.workers}
        index = 0
        while (name := worker_name(role, index)) in taken:
            index += 1
        slot = model.spare.pop(0)
        model.workers[name] = PlannedWorker(role, slot)
        self._addresses[name] = slot.address
        self._supervisor.add(model.plan.make_spec(role, name, slot))

    async def _end(self, model: _Model, name: str) -> None:
        supervisor = self._supervisor
        assert supervisor is not None
        slot = model.workers[name].slot
        if self._is_serving(name):
            await self._drain(name, slot.address)
        await supervisor.remove(name, self._grace_s)
        del model.workers[name]
        self._addresses.pop(name, None)
        model.ending.discard(name)
        model.spare.append(slot)
        if supervisor.is_watching:
            # The slot may be wanted for another role.
            self._follow(model)

    def _is_serving(self, name: str) -> bool:
        process = None if self._supervisor is None else self._supervisor.process(name)
        return process is not None and process.ready is not None and not process.is_gone

    def _find(self, name: str) -> _Model:
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        if name not in self._models:
            names = ", ".join(self._models)
            raise ModelNotFound(f"no model {name!r}; there are: {names}", param="model")
        return self._models[name]

    def _write(self) -> None:
        """Gateways read the file at any time, so it is replaced in one step."""
        found: dict[str, list[str]] = {"decode": [], "prefill": []}
        for model in self._models.values():
            for name, (role, slot) in model.workers.items():
                for key in found if role == "both" else (role,):
                    found[key].append(model.plan.dial(name, slot.address))
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps(found), encoding="utf-8")
        temporary.replace(self._file)

    def _describe(self, name: str, model: _Model) -> supervisor_pb2.SupervisedModel:
        deaths: Mapping[str, int] = {} if self._supervisor is None else self._supervisor.deaths
        described = supervisor_pb2.SupervisedModel(
            model=name,
            ordered=supervisor_pb2.WorkerCounts(**model.ordered._asdict()),
            most=model.most,
            ordered_by=model.ordered_by,
        )
        for worker, (role, _) in model.workers.items():
            serving = "serving" if self._is_serving(worker) else "starting"
            state = "draining" if worker in model.ending else serving
            described.workers.add(
                worker_id=worker, role=role, state=state, deaths=deaths.get(worker, 0)
            )
        return described


def _of(plan: ModelWorkers) -> _Model:
    roles = [worker.role for worker in plan.started.values()]
    ordered = Ordered(*(roles.count(role) for role in Ordered._fields))
    return _Model(plan, dict(plan.started), list(plan.spare), ordered)


def drainer(hand_over_s: float, identity: Identity | None) -> Drain:
    """Drains workers: after `hand_over_s` others resume what still runs there."""

    async def drain(name: str, address: str) -> None:
        order = worker_pb2.DrainRequest(timeout=duration(hand_over_s))
        # A worker that does not answer has nothing to hand over: gateways resume it elsewhere.
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with open_channel(address, service_of(name), identity) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                await stub.Drain(order, timeout=hand_over_s + _DRAIN_MARGIN_S)

    return drain
