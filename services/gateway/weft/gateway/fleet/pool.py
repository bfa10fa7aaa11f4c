"""The healthy workers of one role, with the view of them that policies take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from weft.gateway.fleet.worker import FleetWorker
from weft.gateway.routing import Choice, Policy, PoolView, RoutingRequest

_REFRESH_S = 0.02
"""Seconds for which a list of healthy workers is reused. The chosen workers are always checked
again.
"""


class WorkerPool:
    """The healthy workers of a pool, without checking every worker at each decision. `workers`
    returns all workers of the role, healthy or not, in a fixed order.
    """

    def __init__(self, workers: Callable[[], Iterable[FleetWorker]]) -> None:
        self._workers = workers
        self._healthy: list[FleetWorker] = []
        self._view = PoolView(())
        self._looked_at = float("-inf")
        self.was_healthy = False
        """Whether any member has ever been healthy."""

    def choose(
        self,
        policy: Policy,
        request: RoutingRequest,
        count: int,
        now: float,
        is_excluded: Callable[[FleetWorker], bool] | None = None,
    ) -> list[tuple[FleetWorker, int]]:
        """Applies a policy to the healthy workers, except those that `is_excluded`. `now` is event
        loop time.

        Returns the workers and the prompt tokens that each is believed to hold, the best first;
        empty when no worker may be chosen.
        """
        if now - self._looked_at < _REFRESH_S:
            chosen = self._choose(policy, request, count, is_excluded)
            if chosen and not any(worker.problem(now) for worker, _ in chosen):
                return chosen
        self._look(now)
        return self._choose(policy, request, count, is_excluded)

    def view(self, now: float) -> PoolView:
        """The healthy workers now, by event loop time."""
        if now - self._looked_at >= _REFRESH_S:
            self._look(now)
        return self._view

    def look_again(self) -> None:
        """Makes the next choice look at all workers again, after one came or left."""
        self._looked_at = float("-inf")

    def _choose(
        self,
        policy: Policy,
        request: RoutingRequest,
        count: int,
        is_excluded: Callable[[FleetWorker], bool] | None,
    ) -> list[tuple[FleetWorker, int]]:
        view, members = self._view, self._healthy
        excluded: Collection[int] = ()
        if is_excluded is not None:
            excluded = {at for at, worker in enumerate(members) if is_excluded(worker)}
        if excluded:
            view, kept = view.without(excluded)
            members = [members[at] for at in kept]
        if not members:
            return []
        choices: list[Choice] = policy.choose(view, request, count)
        return [(members[choice.position], choice.match_tokens) for choice in choices]

    def _look(self, now: float) -> None:
        """Keeps the view if its members are the same, for the state of policies."""
        self._looked_at = now
        found = [
            (worker, worker.member)
            for worker in self._workers()
            if worker.member is not None and not worker.problem(now)
        ]
        members = tuple(member for _, member in found)
        self.was_healthy |= bool(members)
        if len(members) == len(self._view) and all(
            new is old for new, old in zip(members, self._view.workers, strict=True)
        ):
            return
        for worker in self._healthy:
            worker.load.show_in(None)
        self._healthy = [worker for worker, _ in found]
        self._view = PoolView(members)
        for position, worker in enumerate(self._healthy):
            worker.load.show_in(self._view, position)
