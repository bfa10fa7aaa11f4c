"""The interface of drafters, which propose the next tokens of requests for the model to verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.engine.scheduler.plan import VerifyItem


class Drafter(Protocol):
    """Proposes draft tokens, which only affect speed, never the text."""

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        """Returns tokens that may follow the last one of each request.

        Args:
            items: Their last tokens are known, to the device at least, and there are pages for
                `max_drafts` more.

        Returns:
            Of each at most `max_drafts`; none where it has no guess.
        """

    def forget(self, slot: int) -> None:
        """Frees the state of a slot whose request is gone."""
