"""`weft plan`: how many workers a day would need, by the planner itself in virtual time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from weft.cli.numbers import number, whole_number
from weft.planner.forecast import Speed, Targets
from weft.planner.policy import Rules
from weft.planner.replay.replay import Outcome, oracle, replay
from weft.planner.replay.traces import DAYS, Arrival, made_day, read_trace

_SHOWN_CHANGES = 40


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    day = _day(arguments)
    speed = Speed(
        prefill_tokens_per_s=arguments.prefill_rate,
        step_base_s=arguments.step_ms / 1000,
        step_request_s=arguments.step_request_ms / 1000,
    )
    targets = Targets(
        first_token_s=arguments.first_token,
        inter_token_s=arguments.inter_token,
        is_enforced=not arguments.late,
    )
    planned = replay(
        day,
        speed,
        targets,
        Rules(budget=arguments.budget),
        first=(arguments.prefill, arguments.decode),
        start_s=arguments.start,
    )
    best = oracle(day, speed, targets) if arguments.oracle else None
    if arguments.json:
        sys.stdout.write(json.dumps(_described(planned, best)) + "\n")
        return 0
    for change in planned.changes[:_SHOWN_CHANGES]:
        hours, minutes = divmod(int(change.time_s) // 60, 60)
        sys.stdout.write(
            f"{hours:3}:{minutes:02}  {change.prefill} prefill, {change.decode} decode: "
            f"{change.why}\n"
        )
    if (left := len(planned.changes) - _SHOWN_CHANGES) > 0:
        sys.stdout.write(f"... and {left} more; --json shows all\n")
    for name, outcome in (("planner", planned), ("oracle", best)):
        if outcome is not None:
            sys.stdout.write(
                f"{name:8} goodput {outcome.tally.goodput:.1%}, {outcome.worker_hours:,.1f} "
                f"worker hours, {len(outcome.changes)} changes\n"
            )
    for alarm in sorted(planned.alarms):
        sys.stdout.write(f"alarm: {alarm}\n")
    return 0


def _day(arguments: argparse.Namespace) -> list[Arrival]:
    if arguments.replay in DAYS:
        return made_day(
            arguments.replay, requests_per_s=arguments.rate, hours=arguments.hours, seed=0
        )
    return read_trace(Path(arguments.replay))


def _described(planned: Outcome, best: Outcome | None) -> dict[str, object]:
    return {
        name: {
            "requests": outcome.tally.requests,
            "goodput": outcome.tally.goodput,
            "refused": outcome.tally.refused,
            "slow": outcome.tally.slow,
            "worker_hours": outcome.worker_hours,
            "alarms": sorted(outcome.alarms),
            "changes": [
                {
                    "time_s": change.time_s,
                    "prefill": change.prefill,
                    "decode": change.decode,
                    "why": change.why,
                }
                for change in outcome.changes
            ],
        }
        for name, outcome in (("planner", planned), ("oracle", best))
        if outcome is not None
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft plan",
        description="Runs the planner against a day in virtual time, and tells the numbers of "
        "workers that it would have wanted, the goodput and the worker hours.",
    )
    parser.add_argument(
        "--replay",
        required=True,
        metavar="TRACE",
        help="Mooncake's trace (.jsonl), Azure's LLM inference trace (.csv), or a made-up day: "
        f"{', '.join(DAYS)}",
    )
    limits = number(1e-6, 1e9)
    parser.add_argument(
        "--prefill-rate",
        type=limits,
        required=True,
        metavar="N",
        help="prompt tokens a second of a worker",
    )
    parser.add_argument(
        "--step-ms", type=limits, required=True, metavar="MS", help="its decode step, empty"
    )
    parser.add_argument(
        "--step-request-ms",
        type=limits,
        required=True,
        metavar="MS",
        help="what each request adds to the step",
    )
    parser.add_argument("--first-token", type=limits, default=1.0, metavar="S", help="target")
    parser.add_argument("--inter-token", type=limits, default=0.05, metavar="S", help="target")
    parser.add_argument(
        "--late",
        action="store_true",
        help="requests that miss the targets are answered all the same, not refused",
    )
    parser.add_argument(
        "--budget", type=whole_number(0, 4096), default=0, metavar="N", help="most workers; 0 = any"
    )
    parser.add_argument("--prefill", type=whole_number(1, 4096), default=1, help="at the beginning")
    parser.add_argument("--decode", type=whole_number(1, 4096), default=1, help="at the beginning")
    parser.add_argument(
        "--start", type=number(0, 3600), default=60.0, metavar="S", help="a worker's start"
    )
    parser.add_argument(
        "--rate", type=limits, default=8.0, metavar="N", help="most requests a second of such a day"
    )
    parser.add_argument("--hours", type=number(0.1, 168), default=24.0, help="its length")
    parser.add_argument(
        "--oracle", action="store_true", help="beside the least numbers with hindsight (slower)"
    )
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    return parser
