"""Load on any OpenAI server, by several client processes that do not wait for answers.

    python bench/load.py --url http://127.0.0.1:8000 --rate 4 8 16 --prompt 2048 --tokens 200
    python bench/load.py --burst 256 --prompt 512 --tokens 256
    python bench/load.py --sessions 8 --turns 6 --history 8000 64000 --prompt 200 1500

Requests arrive by chance (`--arrivals poisson`), evenly or all at once; the time to the first token
counts from when a request was due, so a client that is late makes the figures worse, and says so.
Prompts are made-up token ids: `--vocab` must not exceed the model's. Sessions send their whole
history again with each turn, as agents do; each turn is a row of its own, and the last row is of
all turns but the first.

"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import Harness, Run
from open_loop.clients import Outcome, Target
from open_loop.clients import run as send
from open_loop.report import Goal, summarize
from open_loop.workload import Visit, arrivals, sessions, single_requests

harness = Harness(__file__, __doc__)
harness.flag("--url", default="http://127.0.0.1:8000", help="without /v1")
kind = harness.one_of()
kind.add_argument("--rate", type=float, nargs="+", help="requests a second, a row each")
kind.add_argument("--burst", type=int, nargs="+", help="requests at once, a row each")
kind.add_argument("--sessions", type=int, help="sessions of --turns requests")
harness.flag("--seconds", type=float, default=20.0, help="of arrivals at each rate")
harness.flag("--arrivals", choices=("poisson", "uniform"), default="poisson")
harness.flag(
    "--prompt", type=int, nargs="+", default=[512], help="tokens, or a range; new ones of turns"
)
harness.flag("--tokens", type=int, nargs="+", default=[128], help="new ones, or a range")
harness.flag("--turns", type=int, default=6)
harness.flag("--history", type=int, nargs="+", default=[8000], help="of first turns")
harness.flag("--pause", type=float, default=1.0, help="mean seconds between turns")
harness.flag("--session-rate", type=float, default=2.0, help="sessions begun a second")
harness.flag("--ttft-target", type=float, default=0.5, help="seconds, for goodput")
harness.flag("--itl-target", type=float, default=0.025, help="seconds, for goodput")
harness.flag("--processes", type=int, default=4)
harness.flag("--vocab", type=int, default=30_000, help="token ids lie below")
harness.flag("--no-ids", action="store_true", help="the server gives no token ids")
harness.flag("--timeout", type=float, default=300.0, help="seconds of each request")
harness.flag("--repeats", type=int, default=1, help="runs of each row")
harness.flag("--seed", type=int, default=1)
harness.flag(
    "--warm-up",
    action=argparse.BooleanOptionalAction,
    default=True,
    help="a few requests first",
)
harness.flag("--name", default="", help="of the system, before each row's")


@harness.check
def complete(options: argparse.Namespace) -> None:
    """Ranges as pairs."""
    for name in ("prompt", "tokens", "history"):
        given = getattr(options, name)
        if len(given) > 2 or min(given) < 1:
            harness.error(f"--{name} takes one number or a range")
        setattr(options, name, (given[0], given[-1]))


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


@harness.part
def load(run: Run) -> None:
    """Runs all loads; rows in their order, those of sessions by turn."""
    options = run.options
    target = Target(options.url, options.vocab, options.timeout, wants_ids=not options.no_ids)
    goal = Goal(options.ttft_target, options.itl_target)
    if options.warm_up:
        warm = random.Random(-options.seed)
        send(single_requests([0.0] * options.processes, (64, 64), (8, 8), warm), target, 1)
    for name, visits in loads(options):
        outcomes = send(visits, target, options.processes)
        for label, part in _parts(f"{options.name} {name}".strip(), outcomes):
            row = summarize(label, part, goal)
            run.row(row)
            if row.failed:
                run.fail(f"{label}: {row.failed} requests: {row.errors}")


def _parts(name: str, outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    most = max((outcome.turn for outcome in outcomes), default=0)
    if not most:
        yield name, list(outcomes)
        return
    for turn in range(most + 1):
        yield f"{name}, turn {turn + 1}", [one for one in outcomes if one.turn == turn]
    if most > 1:
        yield f"{name}, later turns", [one for one in outcomes if one.turn]


if __name__ == "__main__":
    sys.exit(harness.main())
