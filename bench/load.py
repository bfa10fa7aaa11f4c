"""Load on any OpenAI server, by several client processes that do not wait for answers.

    python bench/load.py --url http://127.0.0.1:8000 --rate 4 8 16 --prompt 2048 --tokens 200
    python bench/load.py --burst 256 --prompt 512 --tokens 256
    python bench/load.py --sessions 8 --turns 6 --history 8000 64000 --prompt 200 1500

Requests arrive by chance (`--arrivals poisson`), evenly or all at once; the time to the first token
counts from when a request was due, so a client that is late makes the figures worse, and says so.
Prompts are made-up token ids: `--vocab` must not exceed the model's. Sessions send their whole
history again with each turn, as agents do; each turn is a row of its own, and the last row is of
all turns but the first.

One table; `--out` keeps the rows as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from open_loop.clients import Outcome, Target, run
from open_loop.report import Goal, Row, show, summarize
from open_loop.workload import Visit, arrivals, sessions, single_requests


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="without /v1")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--rate", type=float, nargs="+", help="requests a second, a row each")
    kind.add_argument("--burst", type=int, nargs="+", help="requests at once, a row each")
    kind.add_argument("--sessions", type=int, help="sessions of --turns requests")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals at each rate")
    parser.add_argument("--arrivals", choices=("poisson", "uniform"), default="poisson")
    parser.add_argument(
        "--prompt", type=int, nargs="+", default=[512], help="tokens, or a range; new ones of turns"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[128], help="new ones, or a range")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--history", type=int, nargs="+", default=[8000], help="of first turns")
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds between turns")
    parser.add_argument("--session-rate", type=float, default=2.0, help="sessions begun a second")
    parser.add_argument("--ttft-target", type=float, default=0.5, help="seconds, for goodput")
    parser.add_argument("--itl-target", type=float, default=0.025, help="seconds, for goodput")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=30_000, help="token ids lie below")
    parser.add_argument("--no-ids", action="store_true", help="the server gives no token ids")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of each request")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each row")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a few requests first",
    )
    parser.add_argument("--name", default="", help="of the system, before each row's")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    for name in ("prompt", "tokens", "history"):
        given = getattr(options, name)
        if len(given) > 2 or min(given) < 1:
            parser.error(f"--{name} takes one number or a range")
        setattr(options, name, (given[0], given[-1]))
    return options


def loads(options: argparse.Namespace) -> Iterator[tuple[str, list[Visit]]]:
    """Each run: its name and its requests."""
    for repeat in range(options.repeats):
        rng = random.Random(options.seed + repeat)
        lengths = options.prompt, options.tokens
        if options.sessions:
            times_s = list(arrivals(options.session_rate, options.sessions, "poisson", rng))
            name = f"{options.sessions} sessions"
            yield (
                name,
                sessions(times_s, options.history, options.turns, *lengths, options.pause, rng),
            )
        for rate in options.rate or ():
            count = max(1, round(rate * options.seconds))
            times_s = list(arrivals(rate, count, options.arrivals, rng))
            yield f"{rate:g}/s", single_requests(times_s, *lengths, rng)
        for count in options.burst or ():
            yield f"burst of {count}", single_requests([0.0] * count, *lengths, rng)


def measure(options: argparse.Namespace) -> list[Row]:
    """Runs all loads; rows in their order, those of sessions by turn."""
    target = Target(options.url, options.vocab, options.timeout, wants_ids=not options.no_ids)
    goal = Goal(options.ttft_target, options.itl_target)
    if options.warm_up:
        warm = random.Random(-options.seed)
        run(single_requests([0.0] * options.processes, (64, 64), (8, 8), warm), target, 1)
    rows: list[Row] = []
    for name, visits in loads(options):
        outcomes = run(visits, target, options.processes)
        for label, part in _parts(f"{options.name} {name}".strip(), outcomes):
            rows.append(summarize(label, part, goal))
    return rows


def _parts(name: str, outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    most = max((outcome.turn for outcome in outcomes), default=0)
    if not most:
        yield name, list(outcomes)
        return
    for turn in range(most + 1):
        yield f"{name}, turn {turn + 1}", [one for one in outcomes if one.turn == turn]
    if most > 1:
        yield f"{name}, later turns", [one for one in outcomes if one.turn]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 1 if a request failed."""
    options = parse(argv)
    rows = measure(options)
    show(rows, Goal(options.ttft_target, options.itl_target))
    if options.out is not None:
        about = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(sys.argv),
        }
        text = json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1)
        options.out.write_text(text + "\n")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
