"""Chats with a real mesh: what each routing policy computes, and how long first tokens take.

    python bench/conversations.py [--chats 240] [--json PATH]
    python bench/conversations.py --policies round_robin cache_aware --loads high --rounds 3

2 prefill and 2 decode workers (and everything else) on this machine, a mesh of its own for each
policy, the same chats for all. Chats share system prompts (Zipf's law) and have several turns; a
turn's prompt is all that was said, answers included. Policies are those of both pools.

| load | chats |
| --- | --- |
| `low` | so few at a time that nobody waits |
| `high` | more than the mesh can serve when it computes every prompt anew |

Prompt tokens computed are the workers' own counters, of all that they did. The oracle is one cache
without bounds, in whole pages, that knows each prompt once it is sent and each answer once it has
ended. All policies must give the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from chats.client import Asking, ChatClient, Turn
from chats.mesh import MODEL, SHAPE, VOCAB, about, chat_mesh, make_model, prompt_tokens
from chats.workload import EndlessCache, make_chats
from rich.console import Console
from rich.table import Table
from weft.testing.meshes.local_mesh import LocalMesh


class Pools(NamedTuple):
    """Routing policies of a mesh."""

    prefill: str
    decode: str
    flags: str = ""
    """Further flags of the gateway."""


def both(name: str, flags: str = "") -> Pools:
    """The same policy for both pools."""
    return Pools(name, name, flags)


POLICIES: dict[str, Pools] = {
    **{name: both(name) for name in ("random", "round_robin", "total_requests", "power_of_two")},
    **{name: both(name) for name in ("consistent_hashing", "manual")},
    "prefix_hash": both("prefix_hash", "--prefix-tokens 128"),
    "cache_aware approximate": both("cache_aware", "--no-kv-events"),
    "cache_aware": both("cache_aware"),
    "cache_aware, decode total_requests": Pools("cache_aware", "total_requests"),
}
LOADS = ("low", "high")
NUM_WARM_UP = 12


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one policy under one load."""

    policy: str
    load: str
    round: int
    num_turns: int
    num_failed: int
    prompt_tokens: int
    computed_tokens: int
    oracle_tokens: int
    by_worker: dict[str, int]
    """Computed tokens by worker."""
    first_p50_s: float
    first_p99_s: float
    first_mean_s: float
    wall_s: float

    @property
    def extra(self) -> float:
        """Tokens computed beyond the oracle's, as a share of those."""
        return self.computed_tokens / self.oracle_tokens - 1


class TokensDiffer(RuntimeError):
    """A policy changed the tokens of an answer."""


class Bench:
    """Runs policies one after the other over the same chats.

    Args:
        folder: For models and states.
        flags: From the command line.
    """

    def __init__(self, folder: Path, flags: argparse.Namespace) -> None:
        self._folder = folder
        self._flags = flags
        self._model_dir = make_model(folder)
        self._answers: dict[tuple[str, int], list[int]] = {}
        """Answers by chat and turn, of the first run that had them."""
        self._num_meshes = 0

    def run(self, policy: str, load: str, number: int) -> Row:
        """Measures one row, on a mesh of its own.

        Raises:
            TokensDiffer: A turn's answer is not that of an earlier run.
        """
        pools, flags = POLICIES[policy], self._flags
        gateway = f"--prefill-policy {pools.prefill} --decode-policy {pools.decode} {pools.flags}"
        gateway += f" {flags.gateway}"
        if flags.record:
            gateway += f" --routing-record-dir {flags.record.resolve()}"
        workers = ["--prefill", "2", "--decode", "2", "--transport", flags.transport]
        workers += ["--kv-memory-bytes", str(flags.memory_bytes), *shlex.split(flags.up)]
        self._num_meshes += 1
        folder = self._folder / f"mesh-{self._num_meshes}"
        with chat_mesh(folder, self._model_dir, *workers, "--gateway-args", gateway) as mesh:
            return asyncio.run(self._measure(mesh, policy, load, number))

    async def _measure(self, mesh: LocalMesh, policy: str, load: str, number: int) -> Row:
        flags, oracle = self._flags, EndlessCache()
        rate = flags.low if load == "low" else flags.high
        # Other prompts than those measured, so that pages of the warm-up are of no use later.
        warm_up = make_chats(NUM_WARM_UP, rate, VOCAB, flags.seed + 1, pause_s=0.1)
        chats = make_chats(flags.chats, rate, VOCAB, flags.seed, pause_s=flags.pause)
        asking = Asking(max_tokens=flags.answer)
        async with ChatClient(mesh.grpc_address, MODEL) as client:
            await client.run(warm_up, asking)
            mesh.wait_idle()
            before, began = prompt_tokens(mesh), time.perf_counter()
            turns = await client.run(chats, asking, oracle)
            wall_s = time.perf_counter() - began
        mesh.wait_idle()
        by_worker = {name: count - before[name] for name, count in prompt_tokens(mesh).items()}
        self._check(turns)
        first = [turn.first_s for turn in turns if not turn.error]
        return Row(
            policy=policy,
            load=load,
            round=number,
            num_turns=len(turns),
            num_failed=sum(bool(turn.error) for turn in turns),
            prompt_tokens=oracle.prompt_tokens,
            computed_tokens=sum(by_worker.values()),
            oracle_tokens=oracle.computed_tokens,
            by_worker=by_worker,
            first_p50_s=float(np.percentile(first, 50)),
            first_p99_s=float(np.percentile(first, 99)),
            first_mean_s=float(np.mean(first)),
            wall_s=wall_s,
        )

    def _check(self, turns: list[Turn]) -> None:
        for turn in turns:
            if turn.error:
                sys.stderr.write(f"{turn.chat}, turn {turn.number}: {turn.error}\n")
                continue
            expected = self._answers.setdefault((turn.chat, turn.number), turn.tokens)
            if turn.tokens != expected:
                raise TokensDiffer(f"{turn.chat}, turn {turn.number}: {turn.tokens}, {expected}")


def print_table(rows: list[Row]) -> None:
    """Prints one line per policy and load; medians over rounds."""
    table = Table()
    for name in ("load", "policy", "computed", "of prompts", "extra", "busiest / mean"):
        table.add_column(name, justify="left" if name in ("load", "policy") else "right")
    for name in ("first p50, ms", "p99, ms", "failed"):
        table.add_column(name, justify="right")
    for load, policy in dict.fromkeys((row.load, row.policy) for row in rows):
        of_row = [row for row in rows if (row.load, row.policy) == (load, policy)]
        last = of_row[-1]
        workers = list(last.by_worker.values())
        table.add_row(
            load,
            policy,
            f"{statistics.median(row.computed_tokens for row in of_row):,.0f}",
            f"{last.computed_tokens / last.prompt_tokens:.0%}",
            f"{statistics.median(row.extra for row in of_row):+.1%}",
            f"{max(workers) * len(workers) / sum(workers):.2f}",
            f"{1e3 * statistics.median(row.first_p50_s for row in of_row):.0f}",
            f"{1e3 * statistics.median(row.first_p99_s for row in of_row):.0f}",
            str(sum(row.num_failed for row in of_row)),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    for load in dict.fromkeys(row.load for row in rows):
        oracle = [row.oracle_tokens for row in rows if row.load == load]
        print(f"{load}: the oracle computes {statistics.median(oracle):,.0f} tokens")


def write_json(flags: argparse.Namespace, rows: list[Row]) -> None:
    """Writes all figures so far, merged into the file's earlier ones, since a long run may be
    interrupted.
    """
    runs = json.loads(flags.json.read_text())["runs"] if flags.json.exists() else []
    run = {
        **about(),
        "setup": {key: str(value) for key, value in vars(flags).items()},
        "model": SHAPE,
        "rows": [asdict(row) | {"extra": row.extra} for row in rows],
    }
    if runs and runs[-1]["setup"] == run["setup"] and len(runs[-1]["rows"]) < len(rows):
        runs.pop()
    flags.json.write_text(json.dumps({"runs": [*runs, run]}, indent=1) + "\n")


def main() -> None:
    """Parses arguments, measures, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chats", type=int, default=240, help="of each run")
    parser.add_argument("--low", type=float, default=2.0, help="chats that begin a second")
    parser.add_argument("--high", type=float, default=8.0, help="likewise, at the high load")
    parser.add_argument("--pause", type=float, default=1.0, help="mean, between turns, in seconds")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=LOADS)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each row, in turns")
    parser.add_argument("--transport", default="auto", help="of weft up")
    parser.add_argument("--memory-bytes", type=int, default=512 << 20, help="of each worker's pool")
    parser.add_argument("--up", default="", help="further flags of weft up, in one string")
    parser.add_argument("--gateway", default="", help="likewise, of each gateway")
    parser.add_argument("--record", type=Path, help="folder for records of the gateways' routing")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for all figures; runs are added")
    flags = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="weft-chats-") as name:
        bench = Bench(Path(name), flags)
        for number in range(flags.rounds):
            for load in flags.loads:
                for policy in flags.policies:
                    row = bench.run(policy, load, number)
                    rows.append(row)
                    print(
                        f"{load}, {policy}: {row.computed_tokens:,} tokens ({row.extra:+.1%}), "
                        f"first token p50 {1e3 * row.first_p50_s:.0f} ms, "
                        f"p99 {1e3 * row.first_p99_s:.0f} ms, {row.wall_s:.0f} s",
                        flush=True,
                    )
                    if flags.json:
                        write_json(flags, rows)
    print_table(rows)


if __name__ == "__main__":
    main()
