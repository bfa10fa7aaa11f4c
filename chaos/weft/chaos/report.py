"""Results of a chaos run: a table for people, JSON for records."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from weft.chaos.run import INVARIANTS, ChaosPlan, ChaosResult

_MAX_SHOWN = 5


def show(console: Console, plan: ChaosPlan, result: ChaosResult) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("", "invariant", "violations"):
        table.add_column(column)
    counts = Counter(violation.invariant for violation in result.violations)
    for number, text in INVARIANTS.items():
        state = "[red]red[/]" if counts[number] else "[green]holds[/]"
        if number == 6 and not plan.checks_hit_rate:
            state = "not looked at"
        table.add_row(str(number), f"{text}: {state}", str(counts[number] or ""))
    console.print(table)
    for number in result.red:
        found = [v.what for v in result.violations if v.invariant == number]
        for what in found[:_MAX_SHOWN]:
            console.print(f"  {number}: {what}", markup=False, highlight=False, soft_wrap=True)
        if len(found) > _MAX_SHOWN:
            console.print(f"  {number}: and {len(found) - _MAX_SHOWN} more", highlight=False)
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(result.by_class().items()))
    outcomes = result.load.outcomes
    requests = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    console.print(
        f"seed {plan.seed}: {result.num_happened} faults ({faults}) in {result.elapsed_s:.0f} s; "
        f"{sum(outcomes.values())} requests: {requests}; {result.load.num_resumed} went on "
        f"elsewhere, the slowest took {result.load.slowest_s:.1f} s",
        highlight=False,
        soft_wrap=True,
    )
    deaths = ", ".join(f"{name} {count}" for name, count in sorted(result.deaths.items()))
    console.print(
        f"processes that died, of faults or by themselves: {deaths or 'none'}", highlight=False
    )
    console.print(
        f"drafts of {result.load.num_drafted} answers were verified: "
        f"{result.load.accepted_tokens} of {result.load.drafted_tokens} accepted; "
        f"{result.speculated_steps} speculated steps since the workers' last start",
        highlight=False,
        soft_wrap=True,
    )


def as_json(plan: ChaosPlan, result: ChaosResult, command: str) -> dict[str, Any]:
    return {
        "command": command,
        "seed": plan.seed,
        "sabotage": plan.sabotage,
        "invariants": {
            str(number): {
                "text": text,
                "holds": number not in result.red,
                "violations": [v.what for v in result.violations if v.invariant == number],
            }
            for number, text in INVARIANTS.items()
            if number != 6 or plan.checks_hit_rate
        },
        "faults": {
            "happened": result.num_happened,
            "by_class": dict(result.by_class()),
            "list": [
                {"fault": i.planned.label, "happened": i.has_happened} for i in result.injections
            ],
        },
        "requests": {
            "outcomes": dict(result.load.outcomes),
            "resumed": result.load.num_resumed,
            "slowest_s": round(result.load.slowest_s, 3),
        },
        "speculation": {
            "requests": result.load.num_drafted,
            "drafted_tokens": result.load.drafted_tokens,
            "accepted_tokens": result.load.accepted_tokens,
            "speculated_steps_since_last_start": result.speculated_steps,
        },
        "deaths": result.deaths,
        "standstills": result.standstills,
        "elapsed_s": round(result.elapsed_s, 1),
    }


def write(path: Path, plan: ChaosPlan, result: ChaosResult, command: str) -> None:
    """Writes the JSON file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(plan, result, command), indent=1) + "\n")
