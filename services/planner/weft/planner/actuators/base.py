"""The port of everything that changes how many workers of each role a model has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from weft.planner.forecast import Counts
from weft.v1 import mesh_pb2

ActuatorName = Literal["roles", "processes", "kubernetes"]


Members = Mapping[str, mesh_pb2.MeshMember]
"""Workers of one model by their ids, as gateways tell them: those that drain are left out."""


class Actuator(Protocol):
    """Changes the numbers of a model's workers.

    Its calls come one after the other, at each decision (every few seconds), and must end within
    `CALL_TIMEOUT_S`. They raise WeftError if they fail, which becomes the alarm `no_effect`; the
    next decision calls them again.
    """

    async def ordered(self, model: str, workers: Members) -> Counts | None:
        """Numbers that are ordered now, whoever has ordered them, such as a Deployment's replicas.
        Workers that have not started yet, or have died, count. None: nobody orders numbers here, or
        this actuator has nothing of the model.

        Every planner asks. One that acts compares them with its own last order: a difference is
        somebody else's change, which alarms (`foreign_edit`), and plans go on from there.
        """
        ...

    async def order(
        self, model: str, wanted: Counts, workers: Members, *, apart: bool = True
    ) -> str:
        """Orders numbers of workers. It is called again and again with the same numbers, and only
        by the planner that may act. Without `apart`, workers that can have both roles keep both.

        Returns what it has changed, in words for operators; empty: nothing.
        """
        ...

    async def close(self) -> None:
        """Ends its connections. What it has ordered stays, unless it has a lease."""
        ...


CALL_TIMEOUT_S = 10.0
