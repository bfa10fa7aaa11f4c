"""What planners have told this gateway, and which of them may act."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.contract.clock import Clock, monotonic
from weft.v1 import mesh_pb2

MAX_PLANNERS, MAX_PLANS = 8, 64


@dataclass(slots=True)
class _Told:
    plans: list[mesh_pb2.MeshPlan]
    ends_at: float
    wants_to_act: bool


class PlanBoard:
    """Keeps what each planner told until its lease ends. Of those that want to act, the one that
    may keeps that until it is silent for its lease or wants it no more.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._told: dict[str, _Told] = {}
        self._holder = ""

    def tell(
        self,
        planner_id: str,
        plans: Sequence[mesh_pb2.MeshPlan],
        lease_s: float,
        *,
        wants_to_act: bool,
    ) -> str:
        """Returns the id of the planner that may act; empty: none."""
        self._forget()
        if planner_id in self._told or len(self._told) < MAX_PLANNERS:
            ends_at = self._clock() + lease_s
            self._told[planner_id] = _Told(list(plans[:MAX_PLANS]), ends_at, wants_to_act)
        self._forget()
        return self._holder

    def plans(self) -> Iterator[mesh_pb2.MeshPlan]:
        """Those of the planner that acts first."""
        self._forget()
        for planner_id in sorted(self._told, key=lambda one: (one != self._holder, one)):
            for plan in self._told[planner_id].plans:
                shown = mesh_pb2.MeshPlan()
                shown.CopyFrom(plan)
                shown.planner_id, shown.acts = planner_id, planner_id == self._holder
                yield shown

    def _forget(self) -> None:
        now = self._clock()
        self._told = {name: told for name, told in self._told.items() if told.ends_at > now}
        holder = self._told.get(self._holder)
        if holder is None or not holder.wants_to_act:
            waiting = (name for name, told in self._told.items() if told.wants_to_act)
            self._holder = next(waiting, "")
