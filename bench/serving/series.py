"""Figures of one system in one case, over all turns, and the goals they are held to."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness import percentiles, spread

from serving.answers import Answer
from serving.checking import Checker, Verdict


@dataclass(slots=True)
class Series:
    """One row of the table."""

    section: str
    system: str
    case: str
    values: dict[int, float] = field(default_factory=dict)
    """Values by repeat, in the section's unit."""
    ratios: dict[int, float] = field(default_factory=dict)
    """Ratios by repeat: the value relative to the baseline's in the same repeat, in the section's
    direction.
    """
    first_s: list[float] = field(default_factory=list)
    """Times to the first token."""
    gaps_s: list[float] = field(default_factory=list)
    """Times between tokens of a stream."""
    verdict: Verdict = field(default_factory=Verdict)
    failure: str | None = None
    """Why values are missing, if any are."""
    goals: list[Goal] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the values."""
        return statistics.median(self.values.values())

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios.values())

    def note(self, repeat: int, value: float, answers: Sequence[Answer] = ()) -> None:
        """Adds one repeat."""
        self.values[repeat] = value
        for answer in answers:
            if answer.event_times_s:
                self.first_s.append(answer.first_s)
                self.gaps_s += answer.gaps_s()

    def compare(self, baseline: Series, *, is_time: bool = False) -> None:
        """Sets the ratios; of times the inverse ones, so that more is always better."""
        for repeat, value in self.values.items():
            other = baseline.values.get(repeat)
            if other is not None and value > 0 and other > 0:
                self.ratios[repeat] = other / value if is_time else value / other

    def summary(self) -> dict[str, Any]:
        """The row for table and JSON."""
        goals = (
            f"{goal.what} {goal.value:.2f}/{goal.least:g} {'met' if goal.is_met else 'NOT met'}"
            for goal in self.goals
        )
        return {
            "section": self.section,
            "system": self.system,
            "case": self.case,
            "value": spread(list(self.values.values())) if self.values else None,
            "ratio": spread(list(self.ratios.values())) if self.ratios else None,
            "first ms": _milliseconds(self.first_s),
            "between ms": _milliseconds(self.gaps_s),
            "judged": f"{self.verdict.exact}+{self.verdict.near_ties}",
            "goals": "; ".join(goals),
            "values": list(self.values.values()),
            "first_s": percentiles(self.first_s),
            "gaps_s": {**percentiles(self.gaps_s), "count": len(self.gaps_s)},
            "tokens": asdict(self.verdict),
            "failure": self.failure,
        }


def _milliseconds(times_s: Sequence[float]) -> str:
    """Formats p50 / p99 in milliseconds."""
    found = percentiles(times_s, 1e3)
    return f"{found['p50']:.3g}/{found['p99']:.3g}" if found else ""


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that this project wants to reach."""

    what: str
    least: float
    value: float

    @property
    def is_met(self) -> bool:
        """Whether the goal is reached."""
        return self.value >= self.least


class Ledger:
    """All rows of a run, and the answers still to be checked."""

    def __init__(self) -> None:
        self.rows: list[Series] = []
        self._answers: list[tuple[Series, list[int], Answer, int]] = []

    def row(self, section: str, system: str, case: str) -> Series:
        """The row of that name, made when there is none."""
        row = self.find(section, system, case)
        if row is None:
            row = Series(section, system, case)
            self.rows.append(row)
        return row

    def find(self, section: str, system: str, case: str) -> Series | None:
        """The row of that name."""
        name = (section, system, case)
        for row in self.rows:
            if (row.section, row.system, row.case) == name:
                return row
        return None

    def of(self, section: str) -> Iterator[Series]:
        """The rows of a section, in order."""
        return (row for row in self.rows if row.section == section)

    def judge_later(
        self, row: Series, prompts: Sequence[list[int]], answers: Sequence[Answer], num_tokens: int
    ) -> None:
        """Keeps answers until the timing is over."""
        self._answers += [(row, p, a, num_tokens) for p, a in zip(prompts, answers, strict=True)]

    @property
    def num_unjudged(self) -> int:
        """Number of answers still to be checked."""
        return len(self._answers)

    def judge(self, checker: Checker) -> None:
        """Checks every timed answer."""
        known: dict[tuple[int, ...], list[list[int]]] = {}
        for _, prompt, answer, _ in self._answers:
            if answer.token_ids is not None:
                known.setdefault(tuple(prompt), []).append(answer.token_ids)
        for row, prompt, answer, num_tokens in self._answers:
            others = known.get(tuple(prompt), [])
            row.verdict.add(checker.check(prompt, answer, num_tokens, others))
        self._answers.clear()
