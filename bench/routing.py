"""Routing policies over simulated fleets: what they save, how even the load is, what they cost.

    python bench/routing.py [--requests 100000]
    python bench/routing.py --blocks conversation_trace.jsonl --speed 10
    python bench/routing.py --log requests.log
    python bench/routing.py --replay records/gateway-1a2b3c4d.jsonl
    python bench/routing.py --sizes 512 --size-requests 1000000 --only sizes

Policies, view, load estimates and page index are the gateway's own; workers are made up and live on
a virtual clock (`bench/fleet/`). The trace is made-up chats with shared system prompts drawn by
Zipf's law, a request log of a gateway (`--log`), or block hashes in the form in which the Mooncake
project publishes its traces (`--blocks`). `--replay` gives the policies the recorded inputs of a
gateway with `--routing-record-dir`, and counts the choices that are the same.

| part | rows |
| --- | --- |
| `policies` | every policy of a prefill pool, on one trace |
| `decode` | those that look at load, in a decode pool, with one gateway and with four |
| `sizes` | `cache_aware` with 4 to 512 workers: cost of a decision, memory of the index |
| `costs` | page keys of a prompt, and what the engine pays for events |
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fleet.simulation import Result, Setup, Simulation
from fleet.trace import PAGE_SIZE, Arrival, block_hashes, conversations, request_log
from harness import Harness, Run, Spread, in_turns, spread, timed
from weft.contract.keys import ROOT_KEY, ShortKeys
from weft.gateway.routing import POLICIES, PolicyOptions, make_policy
from weft.pages.memory.events import KvEvents
from weft.testing.services import routing_replay

PREFILL = [*(name for name in POLICIES if name != "follow"), "cache_aware approximate"]
DECODE = ["round_robin", "total_requests", "total_tokens", "power_of_two", "cache_aware"]
harness = Harness(__file__, __doc__)
harness.flag("--requests", type=int, default=100_000, help="of the made-up trace")
harness.flag("--workers", type=int, default=64)
harness.flag("--gateways", type=int, default=1)
harness.flag("--pages", type=int, default=8192, help="of each worker's cache")
harness.flag("--rate", type=float, default=40.0, help="requests a second and worker")
harness.flag("--sizes", type=int, nargs="*", default=[4, 16, 64, 256, 512])
harness.flag("--size-requests", type=int, default=100_000, help="of the part sizes")
harness.flag("--blocks", type=Path, help="trace of block hashes")
harness.flag("--speed", type=float, default=1.0, help="of that trace")
harness.flag("--log", type=Path, help="request log of a gateway")
harness.flag("--replay", type=Path, help="record of a gateway's routing, and no more")
harness.flag("--seed", type=int, default=1)
harness.flag("--policies", nargs="*", default=PREFILL, help="of the part policies")
harness.flag(
    "--option",
    nargs="*",
    default=[],
    help="NAME=VALUE of weft.gateway.routing.PolicyOptions, as in compute_weight=1",
)


def simulated(run: Run, part: str, trace: Iterable[Arrival], setup: Setup) -> Result:
    """Simulates one row."""
    result = Simulation(setup).run(trace)
    run.row(
        table=part,
        policy=setup.policy,
        pool=setup.pool,
        workers=setup.num_workers,
        gateways=setup.num_gateways,
        requests=result.num_requests,
        hit_rate=result.hit_rate,
        extra=result.extra_tokens,
        balance=result.balance,
        p50_ms=1e3 * result.p50_s,
        p99_ms=1e3 * result.p99_s,
        choose_us=result.choose_p50_us,
        choose_p99_us=result.choose_p99_us,
        index_mb=result.index_bytes / 1e6,
        result=asdict(result),
    )
    return result


def cost_of(calls: int, work: Callable[[], object], repeats: int = 15) -> Spread:
    """Processor microseconds of one of so many calls."""
    (times,) = in_turns({"": lambda: timed(work, time.thread_time)}, repeats).values()
    return spread(times, 1e6 / calls)


@harness.part
def costs(run: Run) -> None:
    """Microseconds of what is not in a decision."""
    rng = random.Random(1)
    prompts = [[rng.randrange(50_000) for _ in range(2000)] for _ in range(20)]

    def keys() -> None:
        for ids in prompts:
            ShortKeys(ids, PAGE_SIZE, bytes(32)).upto(len(ids) // PAGE_SIZE)

    names = [number.to_bytes(8, "little") + bytes(24) for number in range(1, 4097)]

    def events() -> None:
        collector = KvEvents(PAGE_SIZE)
        for start in range(0, len(names), PAGE_SIZE):
            parent = ROOT_KEY
            for name in names[start : start + PAGE_SIZE]:
                collector.stored(name, parent)
                parent = name
            collector.take()

    idle = KvEvents(PAGE_SIZE)
    found = {
        "page keys of a prompt of 2,000 tokens": cost_of(len(prompts), keys),
        "events of a page, 16 a step": cost_of(len(names), events),
        "events of a step that changes nothing": cost_of(1, idle.take),
    }
    for name, us in found.items():
        run.row(table="costs", what=name, us=us)


def replay_record(path: Path) -> None:
    """Replays a record; prints the number of choices of each pool, and of those that are
    the same.
    """
    choices: Counter[str] = Counter()
    same: Counter[str] = Counter()
    for decision in routing_replay.replay(routing_replay.read_record(path), make_policy):
        choices[decision.pool] += 1
        same[decision.pool] += decision.is_same
    for pool, count in choices.items():
        print(f"{pool}: {count:,} choices, {same[pool]:,} of them the same again")


def shape_of(run: Run) -> dict[str, Any]:
    """What all set-ups have in common."""
    flags, options = run.options, PolicyOptions(request_tokens=512)
    for name, value in (option.split("=") for option in flags.option):
        kind = type(getattr(options, name))
        options = replace(options, **{name: kind(value)})
    return {
        "options": options,
        "num_workers": flags.workers,
        "pages_per_worker": flags.pages,
        "seed": flags.seed,
        "num_gateways": flags.gateways,
    }


@harness.part
def policies(run: Run) -> None:
    """Every policy of a prefill pool."""
    flags = run.options
    for name in flags.policies:
        trace: Iterable[Arrival]
        if flags.blocks:
            trace = block_hashes(flags.blocks, flags.speed)
        elif flags.log:
            trace = request_log(flags.log)
        else:
            trace = conversations(flags.requests, flags.rate * flags.workers, flags.seed)
        setup = Setup(policy=name, **shape_of(run))
        result = simulated(run, "policies: times to the end of the prompt", trace, setup)
    run.note(f"an endless cache: hit {100 * result.oracle_hit_rate:.1f} %")


@harness.part
def decode(run: Run) -> None:
    """Policies of a decode pool that look at load."""
    flags, shape = run.options, shape_of(run)
    for gateways in (1, 4):
        for name in DECODE:
            setup = Setup(policy=name, pool="decode", **{**shape, "num_gateways": gateways})
            arrivals = conversations(flags.requests // 5, 6.9 * flags.workers, flags.seed)
            simulated(run, "decode: times between tokens", arrivals, setup)


@harness.part
def sizes(run: Run) -> None:
    """Fleets of other sizes."""
    flags, shape = run.options, shape_of(run)
    for size in flags.sizes:
        arrivals = conversations(flags.size_requests, flags.rate * size, flags.seed)
        setup = Setup(policy="cache_aware", **{**shape, "num_workers": size})
        simulated(run, "sizes", arrivals, setup)


@harness.part_if_named
def replay(run: Run) -> None:
    """The choices of a record (--replay), and those that are the same."""
    replay_record(run.options.replay)


@harness.check
def complete(options: argparse.Namespace) -> None:
    """With a trace of one's own, policies and costs alone; a record is replayed, and no more."""
    if options.replay:
        options.only = ["replay"]
    if options.blocks or options.log:
        options.only = options.only or ["policies", "costs"]


if __name__ == "__main__":
    sys.exit(harness.main())
