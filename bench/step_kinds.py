"""Where an engine's time goes, by kind of step: prompts, drafts, and number of requests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.table import Table
from weft.engine.features.speculative.step_times import size_class
from weft.engine.loop.engine import Engine
from weft.engine.sampling.draws import SampledTokens
from weft.engine.scheduler.plan import Plan

MOST_KINDS = 12
"""Rows of a table: the kinds that took most of the time."""


class StepKind(NamedTuple):
    """Kind of a step."""

    size: int
    """Size class of the number of decoding requests; 0: none."""
    num_drafts: int
    """Most drafts of a request; 0: there are no drafts."""
    beside: str
    """`prompts` of others in the same step, or `late`: begun before the drafts of the step before
    were known to be right; empty: neither."""


@dataclass(slots=True)
class StepCount:
    """Steps of one kind."""

    steps: int = 0
    seconds: float = 0.0
    """Sum of the times from the end of the previous step to the end of each."""
    tokens: int = 0
    """Tokens that requests received."""


StepCounts = dict[StepKind, StepCount]


class StepKinds:
    """Counts the steps of an engine from now on.

    Args:
        engine: An engine that runs in this process.
    """

    def __init__(self, engine: Engine) -> None:
        self._counts: dict[StepKind, StepCount] = defaultdict(StepCount)
        self._observe = engine.step_done
        engine.step_done = self._count  # type: ignore[method-assign]

    def _count(self, plan: Plan, drawn: SampledTokens | None, duration_s: float) -> None:
        self._observe(plan, drawn, duration_s)
        runs = () if drawn is None else drawn.runs
        number, verifies = len(plan.decodes) + len(plan.verifies), plan.verifies
        beside = "prompts" if plan.chunks else "late" if plan.is_late is not None else ""
        num_drafts = max((item.max_drafts for item in verifies), default=0)
        count = self._counts[StepKind(size_class(number) if number else 0, num_drafts, beside)]
        count.steps += 1
        count.seconds += duration_s
        verified = sum(len(run.tokens) for run in runs[: len(verifies)])
        count.tokens += len(plan.decodes) + verified

    def take(self) -> StepCounts:
        """Returns the counts since the last call, kinds that took most of the time first."""
        counts = sorted(self._counts.items(), key=lambda entry: -entry[1].seconds)
        self._counts.clear()
        return dict(counts)


def table_of_steps(title: str, counts: StepCounts) -> Table:
    """Formats the kinds of steps that took most of the time."""
    table = Table(title=title)
    columns = ("requests", "drafts", "beside", "steps", "of the time", "ms a step", "us a token")
    for column in columns:
        table.add_column(column, justify="right")
    total = sum(count.seconds for count in counts.values())
    for kind, count in list(counts.items())[:MOST_KINDS]:
        table.add_row(
            *(str(kind.size), str(kind.num_drafts), kind.beside, str(count.steps)),
            f"{count.seconds / total:.0%}",
            f"{1e3 * count.seconds / count.steps:.3f}",
            f"{1e6 * count.seconds / count.tokens:.0f}" if count.tokens else "-",
        )
    return table


def described_steps(counts: StepCounts) -> list[dict[str, Any]]:
    """Returns the counts of all kinds as values for JSON."""
    return [kind._asdict() | asdict(count) for kind, count in counts.items()]
