"""The healthy workers of one role, with the view of them that policies take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Generic, Protocol, TypeVar

from weft.gateway.routing import Choice, LoadEstimate, Policy, PoolView, RoutingRequest, WorkerView

_REFRESH_S = 0.02
"""Age up to which a list of the healthy is used. Who was chosen is looked at again in any case."""


class Member(Protocol):
    """A worker, as far as a pool needs it."""

    member: WorkerView | None
    load: LoadEstimate

    def problem(self, now: float) -> str:
        """Why it gets no requests; empty when it may."""
        ...


M = TypeVar("M", bound=Member)


class Pool(Generic[M]):
    """Knows who is healthy without asking everybody at each decision.

    Args:
        workers: Gives all workers of the role, healthy or not, in a fixed order.
    """

    def __init__(self, workers: Callable[[], Iterable[M]]) -> None:
        self._workers = workers
        self._healthy: list[M] = []
        self._view = PoolView(())
        self._looked_at = float("-inf")
        self.was_healthy = False
        """Somebody was, once."""

    def choose(
        self,
        policy: Policy,
        request: RoutingRequest,
        count: int,
        now: float,
        is_excluded: Callable[[M], bool] | None = None,
    ) -> list[tuple[M, int]]:
        """Applies a policy to the healthy workers.

        Args:
            policy: The pool's.
            request: What is to be placed.
            count: Workers wanted.
            now: Event loop time.
            is_excluded: Workers that must not be chosen; absent = any may.

        Returns:
            Workers and the prompt tokens that each is believed to hold, the best first; empty when
            nobody may be chosen.
        """
        if now - self._looked_at < _REFRESH_S:
            chosen = self._choose(policy, request, count, is_excluded)
            if chosen and not any(worker.problem(now) for worker, _ in chosen):
                return chosen
        self._look(now)
        return self._choose(policy, request, count, is_excluded)

    def view(self, now: float) -> PoolView:
        """The healthy workers as they are now; event loop time."""
        if now - self._looked_at >= _REFRESH_S:
            self._look(now)
        return self._view

    def look_again(self) -> None:
        """Somebody came or left: the next choice looks at all workers."""
        self._looked_at = float("-inf")

    def _choose(
        self,
        policy: Policy,
        request: RoutingRequest,
        count: int,
        is_excluded: Callable[[M], bool] | None,
    ) -> list[tuple[M, int]]:
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
        """Looks at all workers; a view of the same members stays, for what policies know of it."""
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
