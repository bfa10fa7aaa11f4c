"""Remote fills as the scheduler sees them."""

from __future__ import annotations

from typing import Protocol

from weft.engine.scheduler.state import Request, State


class Fills(Protocol):
    """Who else may fill a request's pages (`weft.engine.transfer.owner`, `weft.engine.tiers`)."""

    def next_state(self, request: Request) -> State:
        """How an admitted request goes on: LOADING, FILLING or PREFILLING."""
        ...

    def start(self, request: Request) -> bool:
        """Opens the next lease for a LOADING or FILLING request, or lets it wait for one; False
        when nobody may fill it as things are now, so that `next_state` is to be asked again."""
        ...

    def abandon(self, request: Request) -> None:
        """The request ended: its lease is stopped, its reservation outlives it."""
        ...
