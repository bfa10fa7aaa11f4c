"""The prompts and answers of the measured systems; imports no model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class Answer:
    """Answer to one prompt. Times are seconds of `time.perf_counter`."""

    token_ids: list[int] | None
    """Token ids; None if the system answers with text."""
    text: str | None = None
    sent_s: float = 0.0
    event_times_s: list[float] = field(default_factory=list)
    """Times of arrival: one event may bring several tokens."""
    timeline: Any = None
    """`weft.v1.Timeline`, where the system gives one."""

    @property
    def first_s(self) -> float:
        """Time from sending the prompt to its first token."""
        return self.event_times_s[0] - self.sent_s

    def gaps_s(self, since_s: float = float("-inf"), until_s: float = float("inf")) -> list[float]:
        """Times between events that both lie in a span of time."""
        times = [time_s for time_s in self.event_times_s if since_s <= time_s <= until_s]
        return [after - before for before, after in itertools.pairwise(times)]


@dataclass(slots=True)
class Outcome:
    """One timed run."""

    wall_s: float
    answers: list[Answer]


class System(Protocol):
    """A system that generates greedily."""

    name: str

    def run(self, prompts: Sequence[list[int]], num_tokens: int) -> Outcome:
        """Generates exactly `num_tokens` for each prompt, all prompts at once."""
        ...

    def close(self) -> None:
        """Releases its resources."""
        ...


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Prompts that arrive while others run. No system decides their times, so all get the same
    work.
    """

    prompts: Sequence[list[int]]
    """Each wants one token."""
    num_events_before: int
    """Events of every running stream before the first of these is sent."""
    interval_s: float
    """Seconds from one to the next."""


class Streaming(System, Protocol):
    """A system that can take prompts while others run."""

    def run_with_arrivals(
        self, prompts: Sequence[list[int]], num_tokens: int, arrivals: Arrivals
    ) -> tuple[Outcome, list[Answer]]:
        """Generates for `prompts`; meanwhile other prompts arrive.

        Args:
            prompts: All at once, `num_tokens` each.
            num_tokens: As in `run`.
            arrivals: Arriving prompts; none is sent once one of `prompts` has ended.

        Returns:
            The outcome of `prompts`, and the answers to those that arrived.
        """
        ...
