"""Summary of a run's requests, as one row of a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness import percentile

from open_loop.clients import Outcome


@dataclass(slots=True)
class Goal:
    """Latency targets of a request. It meets its goal if it meets both."""

    ttft_s: float
    itl_s: float
    """Target for the 99th percentile of the times between a request's events."""

    def is_met(self, outcome: Outcome) -> bool:
        """Whether a request meets both targets."""
        is_early = not outcome.error and outcome.ttft_s <= self.ttft_s
        return is_early and percentile(outcome.gaps_s, 0.99, 0.0) <= self.itl_s


@dataclass(slots=True)
class Row:
    """One run, or one turn of its sessions. Times are milliseconds."""

    name: str
    requests: int
    failed: int
    seconds: float
    """Time from when the first request was due to the last answer, seconds."""
    requests_per_s: float
    tokens_per_s: float
    """Generated tokens per second."""
    prompt_tokens_per_s: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    itl_p50: float
    """Median of the requests' mean times between tokens."""
    itl_p99: float
    gap_p50: float
    """Median of all times between events."""
    gap_p99: float
    goodput_per_s: float
    """Requests per second that met their targets."""
    cached_share: float
    """Share of the prompt tokens that the server reports as cached."""
    late_p99: float
    """99th percentile of how late this tool sent requests."""
    errors: list[str]


def summarize(name: str, outcomes: Sequence[Outcome], goal: Goal) -> Row:
    """One row of these outcomes."""
    good = [outcome for outcome in outcomes if not outcome.error]
    begin_s = min((outcome.due_s for outcome in outcomes), default=0.0)
    seconds = max((outcome.events_s[-1] for outcome in good), default=math.nan) - begin_s
    ttft = [1e3 * outcome.ttft_s for outcome in good]
    itl = [1e3 * outcome.mean_itl_s for outcome in good if outcome.output_tokens > 1]
    gaps = [1e3 * gap for outcome in good for gap in outcome.gaps_s]
    late = [1e3 * (outcome.sent_s - outcome.due_s) for outcome in good]
    num_prompt = sum(outcome.prompt_tokens for outcome in good)
    return Row(
        name=name,
        requests=len(outcomes),
        failed=len(outcomes) - len(good),
        seconds=seconds,
        requests_per_s=len(good) / seconds,
        tokens_per_s=sum(outcome.output_tokens for outcome in good) / seconds,
        prompt_tokens_per_s=num_prompt / seconds,
        ttft_p50=percentile(ttft, 0.5),
        ttft_p90=percentile(ttft, 0.9),
        ttft_p99=percentile(ttft, 0.99),
        itl_p50=percentile(itl, 0.5),
        itl_p99=percentile(itl, 0.99),
        gap_p50=percentile(gaps, 0.5),
        gap_p99=percentile(gaps, 0.99),
        goodput_per_s=sum(map(goal.is_met, outcomes)) / seconds,
        cached_share=sum(outcome.cached_tokens for outcome in good) / max(1, num_prompt),
        late_p99=percentile(late, 0.99),
        errors=sorted({outcome.error for outcome in outcomes if outcome.error})[:5],
    )
