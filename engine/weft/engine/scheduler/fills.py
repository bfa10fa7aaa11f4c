"""The scheduler's interface to remote fills."""

from __future__ import annotations

from typing import Protocol

from weft.engine.scheduler.state import Request, State


class Fills(Protocol):
    """Other sources of a request's pages (`weft.engine.sources.owner`, `weft.engine.sources.tiers`)."""

    def next_state(self, request: Request) -> State:
        """Next state of an admitted request: LOADING, FILLING or PREFILLING."""
        ...

    def start(self, request: Request) -> bool:
        """Opens the next lease for a LOADING or FILLING request, or lets it wait for one; False:
        nobody can fill it at present, and `next_state` is to be asked again.
        """
        ...

    def abandon(self, request: Request) -> None:
        """Stops the lease of a request that has ended; its reservation outlives it."""
        ...
