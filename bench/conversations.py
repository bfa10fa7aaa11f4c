"""Chats with a real mesh: what each routing policy computes, and how long first tokens take.

    python bench/conversations.py [--chats 240]
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
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from chats.client import Asking, ChatClient, Turn
from chats.mesh import MODEL, SHAPE, VOCAB, chat_mesh, make_model, prompt_tokens
from chats.workload import EndlessCache, make_chats
from harness import Harness, Run
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


harness = Harness(__file__, __doc__)
harness.flag("--chats", type=int, default=240, help="of each run")
harness.flag("--low", type=float, default=2.0, help="chats that begin a second")
harness.flag("--high", type=float, default=8.0, help="likewise, at the high load")
harness.flag("--pause", type=float, default=1.0, help="mean, between turns, in seconds")
harness.flag("--answer", type=int, default=16, help="tokens of each answer")
harness.flag("--policies", nargs="*", default=list(POLICIES), choices=POLICIES)
harness.flag("--loads", nargs="*", default=list(LOADS), choices=LOADS)
harness.flag("--rounds", type=int, default=1, help="runs of each row, in turns")
harness.flag("--transport", default="auto", help="of weft up")
harness.flag("--memory-bytes", type=int, default=512 << 20, help="of each worker's pool")
harness.flag("--up", default="", help="further flags of weft up, in one string")
harness.flag("--gateway", default="", help="likewise, of each gateway")
harness.flag("--record", type=Path, help="folder for records of the gateways' routing")
harness.flag("--seed", type=int, default=1)


@harness.part
def conversations(run: Run) -> None:
    """All policies under all loads, in turns."""
    flags, folder = run.options, tempfile.TemporaryDirectory(prefix="weft-chats-")
    bench = Bench(Path(run.stack.enter_context(folder)), flags)
    run.keep(model=SHAPE)
    for number, load, policy in product(range(flags.rounds), flags.loads, flags.policies):
        row = bench.run(policy, load, number)
        workers = list(row.by_worker.values())
        run.row(
            row,
            extra=row.extra,
            share_of_prompts=row.computed_tokens / row.prompt_tokens,
            busiest_over_mean=max(workers) * len(workers) / sum(workers),
        )


if __name__ == "__main__":
    sys.exit(harness.main())
