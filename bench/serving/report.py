"""Results as one table and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from serving import sections
from serving.series import Ledger, Series, percentile

PLAIN_WIDTH = 110
"""Columns where the output is no terminal."""


@dataclass(frozen=True, slots=True)
class Head:
    """Column heads of a section."""

    title: str
    case: str
    """Meaning of the cases."""
    ratio: str
    """Reference of the ratio."""
    scale: float = 1.0
    """Factor from the unit of the values to the displayed one."""
    digits: int = 1


HEADS = {
    sections.THROUGHPUT: Head("Output tokens/s", "streams", "x transf."),
    sections.PROMPTS: Head("Prompt tokens/s, one prompt at a time", "tokens", "x transf.", 1.0, 0),
    sections.MIXED: Head(
        "Output tokens/s of running streams while long prompts arrive", "streams", "x before"
    ),
    sections.FIRST_TOKEN: Head(
        "Time to the first token of a long prompt, ms", "", "x cold", 1e3, 1
    ),
    sections.SHIPPING: Head("Pages written to another process, GB/s", "page", "x NIXL", 1.0, 2),
}
WIDTHS = (14, 9, 7, 12, 9, 11, 11, 12, 13)


def print_tables(ledger: Ledger) -> None:
    """Prints one table, with a part for each section."""
    console = _console()
    for section, head in HEADS.items():
        rows = list(ledger.of(section))
        if not rows:
            continue
        titles = (
            ("system", "left"),
            (head.case, "right"),
            ("median", "right"),
            ("least..most", "right"),
            (head.ratio, "right"),
            ("first ms", "right"),
            ("between ms", "right"),
            ("tokens", "right"),
            ("goal", "left"),
        )
        table = Table(
            title=head.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
            pad_edge=False, padding=0,
        )  # fmt: skip
        for (title, justify), width in zip(titles, WIDTHS, strict=True):
            table.add_column(title, justify=justify, width=width)  # type: ignore[arg-type]
        for row in _by_case(rows):
            table.add_row(*_cells(row, head))
        console.print(table)
        for row in rows:
            if row.failure is not None:
                console.print(f"{row.system} ({row.case}): {row.failure}", highlight=False)


def print_lines(lines: Sequence[str]) -> None:
    """Notes below the table."""
    console = _console()
    for line in lines:
        console.print(line, highlight=False, soft_wrap=False)


def describe_goals(ledger: Ledger, is_held: bool) -> str:
    """Describes how many goals are met."""
    goals = [goal for row in ledger.rows for goal in row.goals]
    if not is_held:
        return "No goals are set for a CPU without AVX512-BF16 or AMX: figures only."
    missed = [
        f"{row.system} {row.case} {goal.what} {goal.value:.2f} < {goal.least:g}"
        for row in ledger.rows
        for goal in row.goals
        if not goal.is_met
    ]
    text = f"Goals met: {len(goals) - len(missed)} of {len(goals)}"
    return text + (f"; not met: {'; '.join(missed)}." if missed else ".")


def write_json(path: Path, document: dict[str, Any], ledger: Ledger) -> None:
    """Writes all figures of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = document | {"rows": [row.summary() for row in ledger.rows]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def _by_case(rows: Sequence[Series]) -> list[Series]:
    """Rows of one case together, in the order in which cases and rows first came."""
    cases = list(dict.fromkeys(row.case for row in rows))
    return sorted(rows, key=lambda row: cases.index(row.case))


def _cells(row: Series, head: Head) -> list[str]:
    if not row.values:
        return [row.system, row.case, "-", "failed" if row.failure else "-"]
    values = [value * head.scale for value in row.values.values()]
    return [
        row.system,
        row.case,
        f"{row.median * head.scale:.{head.digits}f}",
        f"{_short(min(values))}..{_short(max(values))}",
        f"{row.ratio:.2f}" if row.ratios else "",
        _times(row.first_s),
        _times(row.gaps_s),
        _tokens(row),
        _goals(row),
    ]


def _short(value: float) -> str:
    """Three digits where they are needed."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _times(times_s: Sequence[float]) -> str:
    """Formats p50 / p99 in milliseconds."""
    if not times_s:
        return ""
    found = (percentile(times_s, percent) * 1e3 for percent in (50, 99))
    return "/".join(f"{time_ms:.0f}" if time_ms >= 20 else f"{time_ms:.1f}" for time_ms in found)


def _tokens(row: Series) -> str:
    """Exact, near ties, and what is wrong."""
    verdict = row.verdict
    if not (verdict.exact or verdict.near_ties or verdict.wrong or verdict.missing):
        return ""
    text = f"{verdict.exact}+{verdict.near_ties}"
    if verdict.wrong:
        text += f" {verdict.wrong} WRONG"
    if verdict.missing:
        text += f" {verdict.missing} MISSING"
    return text


def _goals(row: Series) -> str:
    words = []
    for goal in row.goals:
        value = "" if goal.is_shown else f"{goal.value:.2f}/"
        words.append(f"{value}{goal.least:g} {'met' if goal.is_met else 'NOT met'}")
    return ", ".join(words)
