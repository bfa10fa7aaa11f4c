"""Where an engine's time goes, by kind of step: prompts, drafts, and number of requests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from weft.engine.features.speculative.step_times import size_class
from weft.engine.loop.draws import SampledTokens
from weft.engine.loop.engine import Engine
from weft.engine.scheduler.plan import Plan


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
