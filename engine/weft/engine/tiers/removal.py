"""Removal of what a tier has forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.tiers.keyed import Place
from weft.engine.tiers.tier import Medium


@dataclass(eq=False, slots=True)
class Removal:
    """Implements `Move`."""

    medium: Medium
    places: Sequence[Place]

    def run(self) -> None:
        """See `Move.run`."""
        for place in self.places:
            self.medium.remove(place)

    def end(self) -> None:
        """See `Move.end`: they were forgotten before."""
