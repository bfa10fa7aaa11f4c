"""Removal of pages that a tier has dropped."""

from __future__ import annotations

from collections.abc import Iterable

from weft.pages.tiers.keyed import PagePlace
from weft.pages.tiers.tier import Tier


class Removal:
    """Implements `BackgroundJob`: deletes pages."""

    def __init__(self, tier: Tier, places: Iterable[PagePlace]) -> None:
        self._tier = tier
        self._places = list(places)

    def run(self) -> None:
        while self._places:
            self._tier.medium.remove(self._places.pop())

    def end(self) -> None:
        self._tier.remove_with_next_save(self._places)
