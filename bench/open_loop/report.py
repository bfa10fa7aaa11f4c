"""Summary of a run's requests, as one row of a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from open_loop.clients import Outcome

WIDTH = 150
"""Columns of the table, where the output is no terminal too."""


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


def percentile(values: Sequence[float], share: float, nothing: float = math.nan) -> float:
    """The value at a share of the sorted values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else nothing


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


def show(rows: Sequence[Row], goal: Goal) -> None:
    """Prints a table, and failures below it."""
    table = Table(
        title=f"goodput: TTFT <= {1e3 * goal.ttft_s:g} ms, gaps p99 <= {1e3 * goal.itl_s:g}"
    )
    columns = (
        "load", "requests", "req/s", "tok/s", "TTFT p50, p90, p99", "ITL p50, p99",
        "gap p50, p99", "goodput/s", "cached", "late p99",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "load" else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.requests}" + (f" ({row.failed} failed)" if row.failed else ""),
            f"{row.requests_per_s:,.1f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.ttft_p50:,.0f}, {row.ttft_p90:,.0f}, {row.ttft_p99:,.0f}",
            f"{row.itl_p50:,.1f}, {row.itl_p99:,.1f}",
            f"{row.gap_p50:,.1f}, {row.gap_p99:,.1f}",
            f"{row.goodput_per_s:,.2f}",
            f"{row.cached_share:.0%}",
            f"{row.late_p99:,.1f}",
        )
    console = Console(width=WIDTH)
    console.print(table)
    for row in rows:
        for error in row.errors:
            console.print(f"{row.name}: {error}", highlight=False, soft_wrap=True)
