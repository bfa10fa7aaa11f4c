"""All workers that discovery names, and those of each model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from weft.common.tasks import log_failure
from weft.gateway.fleet.discovery import Discovery, Endpoint, Role
from weft.gateway.fleet.pool import WorkerPool
from weft.gateway.fleet.versions import ServedVersions
from weft.gateway.fleet.worker import FleetWorker
from weft.gateway.fleet.worker_ids import WorkerIds

_log = logging.getLogger(__name__)

_MEET_S = 10.0
_WATCH_AGAIN_S = 1.0
"""Seconds until a failed source of addresses is asked again."""
_ROLES: tuple[Role, ...] = ("prefill", "decode")


class ModelFleet:
    """The workers of one model. `may_come` says whether discovered workers of a role have not
    reported their model yet.
    """

    def __init__(
        self,
        workers: Callable[[Role | None], Iterator[FleetWorker]],
        may_come: Callable[[Role], bool],
    ) -> None:
        self.workers = workers
        """All workers of this model, or those of one role, healthy or not."""
        self._may_come = may_come
        self._pools: dict[Role, WorkerPool] = {
            role: WorkerPool(partial(workers, role)) for role in _ROLES
        }
        self._was_healthy: set[Role] = set()

    def pool(self, role: Role) -> WorkerPool:
        """The workers of a role that may get requests."""
        return self._pools[role]

    def look_again(self, role: Role) -> None:
        """Rebuilds a role's pool after a worker came or left."""
        self._pools[role].look_again()

    def missing_roles(self) -> list[Role]:
        """Roles without which requests cannot be served.

        A decode worker is always needed. Prefill workers are waited for at the start; when they
        are lost later, decode workers prefill locally and service goes on.
        """
        now = asyncio.get_running_loop().time()
        missing: list[Role] = []
        roles: tuple[Role, ...] = ("decode", "prefill")
        for role in roles:
            workers = list(self.workers(role))
            if any(not (worker.health_problem(now) or worker.other_role) for worker in workers):
                self._was_healthy.add(role)
            elif role == "decode":
                missing.append(role)
            elif workers or self._may_come(role):
                was_there = role in self._was_healthy or self._pools[role].was_healthy
                missing += [] if was_there else [role]
        return missing

    def max_context_tokens(self, bound: int) -> int:
        """Smallest context length of all known decode workers, at most `bound`."""
        known = (worker.info for worker in self.workers("decode"))
        limits = [info.max_context_tokens for info in known if info is not None]
        return min([bound, *(limit for limit in limits if limit)])

    def task(self) -> str:
        """What the decode workers serve; empty while none is known."""
        known = (worker.info for worker in self.workers("decode"))
        return next((info.task for info in known if info is not None and info.task), "")


class Fleet:
    """All workers that discovery names."""

    def __init__(
        self,
        discovery: Discovery,
        make_worker: Callable[[Endpoint], FleetWorker],
        models: Iterable[str],
    ) -> None:
        self._discovery = discovery
        self._make_worker = make_worker
        self._workers: dict[Endpoint, tuple[FleetWorker, asyncio.Task[None]]] = {}
        self._by_model = {
            name: ModelFleet(partial(self.workers, model=name), self._may_come) for name in models
        }
        self.worker_ids = WorkerIds()
        """Which endpoint each worker id belongs to."""
        self.versions = ServedVersions(lambda: asyncio.get_running_loop().time())
        """Which workers have the weights of a trainer's last update."""
        self._known_roles: set[Role] = set()
        self._guesses_until: float | None = None
        """Time until which a worker that has not reported its model may serve any of several
        models.
        """

    async def run(self) -> None:
        """Follows discovery until cancelled, then releases all workers."""
        try:
            while True:
                await self._follow()
                await asyncio.sleep(_WATCH_AGAIN_S)
        finally:
            await self._update(())

    async def _follow(self) -> None:
        """Known workers stay in use when it fails."""
        try:
            async for endpoints in self._discovery.watch():
                await self._update(endpoints)
        except Exception:
            _log.exception("discovery failed, known workers are kept; it begins anew")

    async def _update(self, endpoints: tuple[Endpoint, ...]) -> None:
        self._known_roles = {endpoint.role for endpoint in endpoints} or self._known_roles
        if self._guesses_until is None:
            self._guesses_until = asyncio.get_running_loop().time() + _MEET_S
        for endpoint in [known for known in self._workers if known not in endpoints]:
            _, task = self._workers.pop(endpoint)
            for fleet in self._by_model.values():
                fleet.look_again(endpoint.role)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for endpoint in endpoints:
            if endpoint not in self._workers:
                worker = self._make_worker(endpoint)
                task = asyncio.create_task(worker.run())
                task.add_done_callback(log_failure)
                self._workers[endpoint] = (worker, task)

    def workers(self, role: Role | None = None, model: str | None = None) -> Iterator[FleetWorker]:
        """All workers, healthy or not, or those of one role and of one model. One that is listed
        with both roles is one worker of either, and one of all.
        """
        for endpoint, (worker, _) in tuple(self._workers.items()):
            is_listed_twice = endpoint.role == "prefill" and (
                replace(endpoint, role="decode") in self._workers
            )
            if role != endpoint.role and (role is not None or is_listed_twice):
                continue
            if model in (None, worker.model):
                yield worker

    @property
    def models(self) -> Sequence[str]:
        """Names of the models that are served."""
        return tuple(self._by_model)

    def of(self, model: str) -> ModelFleet:
        """The workers of one of the models."""
        return self._by_model[model]

    def has_constraints(self) -> bool:
        """Notes that constrained requests have come, since any decode worker may get the
        next one.
        """
        sessions = [worker.session for worker in self.workers("decode")]
        return any(session is not None and session.has_constraints for session in sessions)

    def _may_come(self, role: Role) -> bool:
        """With several models it is true only for a while, so that one model's missing workers do
        not keep the others from serving.
        """
        if len(self._by_model) == 1:
            return role in self._known_roles
        if asyncio.get_running_loop().time() >= (self._guesses_until or float("inf")):
            return False
        return not self._known_roles or any(not worker.model for worker in self.workers(role))
