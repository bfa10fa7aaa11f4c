"""What guesses the next tokens of requests; the model verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.engine.scheduler.plan import VerifyItem


class Drafter(Protocol):
    """Guesses; no guess changes what is generated, only how fast."""

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        """Tokens that may follow the last one of each request.

        Args:
            items: Their last tokens are known, to the device at least, and there are pages for
                `max_drafts` more.

        Returns:
            Of each at most `max_drafts`; none where it has no guess.
        """

    def forget(self, slot: int) -> None:
        """The slot's request is gone."""
