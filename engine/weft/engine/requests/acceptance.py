"""Acceptance statistics of drafts."""

from __future__ import annotations

from typing import Self


class Acceptance:
    """Probability that the next draft is accepted, by the number of accepted drafts before it.

    Args:
        max_drafts: Number of places in a chain that have statistics.
        decay: Factor on earlier observations with each new one: about the last 1 / (1 - decay)
            count.
        prior: Probability assumed at each place before any observation.
        weight: Number of observations that the prior counts for.
    """

    def __init__(
        self, max_drafts: int, decay: float, prior: float = 0.6, weight: float = 2.0
    ) -> None:
        self._decay = decay
        self._reached = [weight] * max_drafts
        self._accepted = [weight * prior] * max_drafts
        self._room = self._made = weight
        self._expected: list[float] | None = None

    def of_one(self, decay: float, weight: float) -> Self:
        """A copy to start one request from, which counts for at most `weight` observations."""
        made = type(self)(len(self._reached), decay)
        for index, (reached, accepted) in enumerate(
            zip(self._reached, self._accepted, strict=True)
        ):
            made._reached[index] = min(reached, weight)
            made._accepted[index] = accepted / reached * made._reached[index]
        made._room = min(self._room, weight)
        made._made = self.share * made._room
        return made

    @property
    def share(self) -> float:
        """Drafts made, as a share of the drafts for which there was room."""
        return self._made / self._room

    def observe(self, num_accepted: int, max_drafts: int, num_drafts: int) -> None:
        """Records a step with room for `max_drafts` drafts, of which `num_drafts` were made and the
        first `num_accepted` accepted.
        """
        self._expected = None
        if max_drafts:
            self._room = self._decay * self._room + 1
            self._made = self._decay * self._made + num_drafts / max_drafts
        for index in range(min(num_accepted + 1, max_drafts)):
            self._reached[index] = self._decay * self._reached[index] + 1
            self._accepted[index] = self._decay * self._accepted[index] + (index < num_accepted)

    def expected_tokens(self) -> list[float]:
        """Expected tokens per step by number of drafts, from 0; read-only."""
        if self._expected is None:
            chance, expected = 1.0, [1.0]
            for accepted, reached in zip(self._accepted, self._reached, strict=True):
                chance *= accepted / reached
                expected.append(expected[-1] + chance)
            self._expected = expected
        return self._expected
