"""Routing policies over simulated fleets: what they save, how even the load is, what they cost.

    python bench/routing.py [--requests 100000] [--json PATH]
    python bench/routing.py --blocks conversation_trace.jsonl --speed 10
    python bench/routing.py --log requests.log
    python bench/routing.py --replay records/gateway-1a2b3c4d.jsonl
    python bench/routing.py --sizes 512 --size-requests 1000000 --parts sizes

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
import json
import random
import statistics
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
from weft.contract.keys import ROOT_KEY, ShortKeys
from weft.engine.memory.events import KvEvents
from weft.gateway.routing import POLICIES, PolicyOptions, make_policy
from weft.testing.services.routing_replay import read_record, replay

PREFILL = [*(name for name in POLICIES if name != "follow"), "cache_aware approximate"]
DECODE = ["round_robin", "total_requests", "total_tokens", "power_of_two", "cache_aware"]
COLUMNS = (
    ("policy", "{}"),
    ("pool", "{}"),
    ("workers", "{}"),
    ("gateways", "{}"),
    ("requests", "{:,}"),
    ("hit %", "{:.1f}"),
    ("extra %", "{:.1f}"),
    ("balance", "{:.2f}"),
    ("p50 ms", "{:.1f}"),
    ("p99 ms", "{:.1f}"),
    ("choose us", "{:.1f}"),
    ("p99 us", "{:.1f}"),
    ("index MB", "{:.1f}"),
)


def cells(setup: Setup, result: Result) -> list[str]:
    """The cells of one row of the table."""
    values = (
        *(setup.policy, setup.pool, setup.num_workers, setup.num_gateways, result.num_requests),
        *(100 * result.hit_rate, 100 * result.extra_tokens, result.balance),
        *(1e3 * result.p50_s, 1e3 * result.p99_s),
        *(result.choose_p50_us, result.choose_p99_us, result.index_bytes / 1e6),
    )
    return [form.format(value) for (_, form), value in zip(COLUMNS, values, strict=True)]


class Report:
    """Runs, prints as it goes, and keeps everything for the JSON file."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []
        self._widths = [24, 8, 7, 8, 9, 6, 7, 7, 8, 8, 9, 7, 8]

    def part(self, title: str, note: str = "") -> None:
        """Prints a heading."""
        print(f"\n{title}{note}")
        self._line([name for name, _ in COLUMNS])

    def run(self, setup: Setup, trace: Iterable[Arrival], part: str) -> Result:
        """Simulates one row."""
        began = time.perf_counter()
        result = Simulation(setup).run(trace)
        wall_s = round(time.perf_counter() - began, 1)
        self._line(cells(setup, result))
        self.rows.append(
            {"part": part, "setup": asdict(setup) | {"options": None}, "wall_s": wall_s}
            | {"options": {k: v for k, v in asdict(setup.options).items() if k != "clock"}}
            | {"result": asdict(result)}
        )
        return result

    def _line(self, row: list[str]) -> None:
        shown = [text.ljust(width) for text, width in zip(row, self._widths, strict=True)]
        print(" ".join(shown).rstrip(), flush=True)


def costs(repeats: int = 15) -> dict[str, float]:
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
    return {
        "page keys of a prompt of 2,000 tokens": timed(keys, repeats) / len(prompts),
        "events of a page, 16 a step": timed(events, repeats) / len(names),
        "events of a step that changes nothing": timed(idle.take, repeats),
    }


def timed(work: Callable[[], object], repeats: int) -> float:
    """Median CPU microseconds."""
    work()
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        work()
        times.append((time.thread_time() - began) * 1e6)
    return statistics.median(times)


def replay_record(path: Path) -> None:
    """Replays a record; prints the number of choices of each pool, and of those that are
    the same.
    """
    choices: Counter[str] = Counter()
    same: Counter[str] = Counter()
    for decision in replay(read_record(path), make_policy):
        choices[decision.pool] += 1
        same[decision.pool] += decision.is_same
    for pool, count in choices.items():
        print(f"{pool}: {count:,} choices, {same[pool]:,} of them the same again")


def main() -> None:
    """Parses arguments, simulates, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000, help="of the made-up trace")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--pages", type=int, default=8192, help="of each worker's cache")
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second and worker")
    parser.add_argument("--sizes", type=int, nargs="*", default=[4, 16, 64, 256, 512])
    parser.add_argument("--size-requests", type=int, default=100_000, help="of the part sizes")
    parser.add_argument("--blocks", type=Path, help="trace of block hashes")
    parser.add_argument("--speed", type=float, default=1.0, help="of that trace")
    parser.add_argument("--log", type=Path, help="request log of a gateway")
    parser.add_argument("--replay", type=Path, help="record of a gateway's routing, and no more")
    parser.add_argument("--parts", nargs="*", default=["policies", "decode", "sizes", "costs"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policies", nargs="*", default=PREFILL, help="of the part policies")
    parser.add_argument(
        "--option",
        nargs="*",
        default=[],
        help="NAME=VALUE of weft.gateway.routing.PolicyOptions, as in compute_weight=1",
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    flags = parser.parse_args()
    if flags.replay:
        replay_record(flags.replay)
        return

    def trace() -> Iterable[Arrival]:
        if flags.blocks:
            return block_hashes(flags.blocks, flags.speed)
        if flags.log:
            return request_log(flags.log)
        return conversations(flags.requests, flags.rate * flags.workers, flags.seed)

    report = Report()
    options = PolicyOptions(request_tokens=512)
    for name, value in (option.split("=") for option in flags.option):
        kind = type(getattr(options, name))
        options = replace(options, **{name: kind(value)})
    shape: dict[str, Any] = {
        "options": options,
        "num_workers": flags.workers,
        "pages_per_worker": flags.pages,
        "seed": flags.seed,
        "num_gateways": flags.gateways,
    }
    if "policies" in flags.parts:
        report.part("Prefill pool: p50 and p99 to the end of the prompt")
        for name in flags.policies:
            result = report.run(Setup(policy=name, **shape), trace(), "policies")
        print(f"an endless cache: hit {100 * result.oracle_hit_rate:.1f} %")
    if "decode" in flags.parts and not flags.blocks and not flags.log:
        report.part("Decode pool: p50 and p99 between tokens")
        for gateways in (1, 4):
            for name in DECODE:
                setup = Setup(policy=name, pool="decode", **{**shape, "num_gateways": gateways})
                rate = 6.9 * flags.workers
                arrivals = conversations(flags.requests // 5, rate, flags.seed)
                report.run(setup, arrivals, "decode")
    if "sizes" in flags.parts and not flags.blocks and not flags.log:
        report.part("Fleets")
        for size in flags.sizes:
            arrivals = conversations(flags.size_requests, flags.rate * size, flags.seed)
            setup = Setup(policy="cache_aware", **{**shape, "num_workers": size})
            report.run(setup, arrivals, "sizes")
    measured = costs() if "costs" in flags.parts else {}
    for name, value in measured.items():
        print(f"{name}: {value:.2f} us")
    if flags.json:
        command = " ".join(sys.argv)
        content = {"command": command, "rows": report.rows, "costs_us": measured}
        flags.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
