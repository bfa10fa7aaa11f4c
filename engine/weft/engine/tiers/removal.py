"""Removal of pages that a tier has dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.tiers.keyed import PagePlace
from weft.engine.tiers.tier import Medium


@dataclass(eq=False, slots=True)
class Removal:
    """A `BackgroundJob` that deletes a page."""

    medium: Medium
    places: Sequence[PagePlace]

    def run(self) -> None:
        """See `BackgroundJob.run`."""
        for place in self.places:
            self.medium.remove(place)

    def end(self) -> None:
        """See `BackgroundJob.end`: they were forgotten before."""
