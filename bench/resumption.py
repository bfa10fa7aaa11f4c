"""The cost of a killed decode worker for its streams.

It starts a mesh with two decode workers, runs streams, kills one of the workers at a random moment
(both processes, its engine, or its server), and checks that every stream has the same tokens as
without the kill. The pause is in the client's timeline: from the loss to the next token.

    python bench/resumption.py                  20 kills of each kind, 32 streams, a tiny model
    python bench/resumption.py --model demo --streams 8 --tokens 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from serving import kills
from serving.mesh import MeshError, MeshProcess
from serving.setup import ROOT, MachineUse, describe_lines, describe_setup
from weft.chaos.tiny import VOCAB_SIZE, make_tiny_model
from weft.v1 import gateway_pb2, gateway_pb2_grpc

DECODE = ("decode-0", "decode-1")
FLAGS = (
    "--decode 2 --local-prefill-max-tokens 0 --gateway-args '--decode-policy round_robin' "
    # One worker has room for all streams, so that no pause is the wait for a slot.
    "--decode-args '--max-running-requests {slots}'"
)
BACK_TIMEOUT_S = 600.0
SETTLE_S = 5.0
"""Seconds between kills: a restarted worker is still starting its constraint compiler, for which
requests resumed there would wait.
"""


class WrongAnswer(Exception):
    """A stream failed, or had other tokens than without a kill."""


def ready_file(mesh: MeshProcess, name: str) -> dict[str, Any] | None:
    """Content of a worker's ready file; None if it does not exist."""
    try:
        content: dict[str, Any] = json.loads((mesh.state / "run" / f"{name}.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return content


async def wait_whole(mesh: MeshProcess, stub: Any) -> None:
    """Returns once all workers are ready and the gateway sees them healthy.

    Raises:
        MeshError: That takes too long.
    """
    deadline = time.monotonic() + BACK_TIMEOUT_S
    while time.monotonic() < deadline:
        if all(ready_file(mesh, name) for name in DECODE):
            fleet = await stub.GetFleet(gateway_pb2.GetFleetRequest(), timeout=10)
            if all(worker.healthy for worker in fleet.workers):
                return
        await asyncio.sleep(0.1)
    raise MeshError(f"a killed worker was not back after {BACK_TIMEOUT_S:.0f} s")


async def measure(
    mesh: MeshProcess,
    asks: list[kills.Ask],
    num_kills: int,
    minutes: float | None,
    draw: random.Random,
) -> dict[str, list[list[float]]]:
    """Kills workers while streams run.

    Args:
        mesh: A mesh with two decode workers.
        asks: The streams.
        num_kills: Most kills of each kind.
        minutes: Time after which no kill begins.
        draw: Source of victims and moments.

    Returns:
        By kind of kill, for each kill the pauses of the attempts that were lost, in seconds.

    Raises:
        WrongAnswer: A stream did not bring what it should.
        MeshError: A worker did not come back.
    """
    deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    pauses_s: dict[str, list[list[float]]] = {kind: [] for kind in kills.KINDS}
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        await wait_whole(mesh, stub)
        expected = await kills.stream_all(stub, asks)
        check(expected, expected)
        num_tokens = sum(len(ids) for outcome in expected for ids in outcome.ids.values())
        with Progress(transient=True) as progress:
            task = progress.add_task("killing", total=num_kills * len(kills.KINDS))
            # A kill of a worker that has already sent everything does not count.
            while any(len(by_kill) < num_kills for by_kill in pauses_s.values()):
                for kind in [kind for kind in kills.KINDS if len(pauses_s[kind]) < num_kills]:
                    if time.monotonic() > deadline:
                        return pauses_s
                    victim = ready_file(mesh, draw.choice(DECODE))
                    assert victim is not None
                    at_tokens = draw.randrange(num_tokens // 50, num_tokens // 2)
                    outcomes = await kills.stream_all(
                        stub, asks, at_tokens, lambda v=victim, k=kind: kills.kill(v, k)
                    )
                    check(outcomes, expected)
                    lost = [attempt for outcome in outcomes for attempt in outcome.lost]
                    if lost:
                        pauses_s[kind].append([one.pause.ToNanoseconds() / 1e9 for one in lost])
                        progress.advance(task)
                    await asyncio.sleep(0.5)  # Then the killed worker's ready file is gone.
                    await wait_whole(mesh, stub)
                    await asyncio.sleep(SETTLE_S)
    return pauses_s


def check(outcomes: list[kills.Outcome], expected: list[kills.Outcome]) -> None:
    """Checks that every stream brought the same as without a kill."""
    for number, (outcome, right) in enumerate(zip(outcomes, expected, strict=True)):
        if outcome.error or not outcome.is_same(right):
            raise WrongAnswer(f"stream {number}: {outcome.error or 'another text'}")


def report(
    arguments: argparse.Namespace, pauses_s: dict[str, list[list[float]]], setup: dict[str, Any]
) -> None:
    """Prints the table and writes the JSON."""
    table = Table(title="Pause of a stream whose decode worker was killed", title_justify="left")
    for name in ("killed", "kills", "streams lost", "p50 ms", "p99 ms", "max ms"):
        table.add_column(name, justify="left" if name == "killed" else "right")
    rows = []
    for kind, by_kill in pauses_s.items():
        values = [pause for pauses in by_kill for pause in pauses]
        if not values:
            continue
        p50, p99, most = (1e3 * float(np.percentile(values, q)) for q in (50, 99, 100))
        table.add_row(
            kind, str(len(by_kill)), str(len(values)), f"{p50:.0f}", f"{p99:.0f}", f"{most:.0f}"
        )
        rows.append(
            {
                "killed": kind,
                "kills": len(by_kill),
                "streams_lost": len(values),
                "pause_p50_ms": p50,
                "pause_p99_ms": p99,
                "pause_max_ms": most,
            }
        )
    console = Console()
    console.print(table)
    print_width = {"soft_wrap": True, "highlight": False}
    for line in [
        f"{arguments.streams} streams, {arguments.tokens} tokens a sample, greedy and seeded, "
        "n = 1 and 2, some with stop strings, some constrained, "
        f"model {arguments.model}, float32; every stream equal to its unkilled run",
        *describe_lines(setup),
        f"other programs kept {setup['other_cores']:.1f} cores busy",
    ]:
        console.print(line, **print_width)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path = arguments.out or ROOT / "bench" / "results" / f"resumption-{stamp}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"command": " ".join(sys.argv), "setup": setup, "rows": rows}
    path.write_text(json.dumps(content, indent=2) + "\n")
    console.print(f"written to {path}", **print_width)


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="tiny, demo or a model directory")
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--minutes", type=float, help="no kill begins later than this")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300, help="of each sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file; default: bench/results/")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    setup = describe_setup("float32", 1)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        model = arguments.model
        if model == "tiny":
            model = str(make_tiny_model(Path(folder) / "tiny", arguments.seed))
        ids = range(3, VOCAB_SIZE)
        stops = ["e", "th", "\ufffd"]
        asks = kills.make_asks(arguments.streams, arguments.tokens, ids, draw, stops)
        before = MachineUse.now()
        # A stream has one sample or two.
        flags = FLAGS.format(slots=2 * arguments.streams)
        mesh = MeshProcess(model, "float32", flags)
        try:
            mesh.wait_until_ready()
            pauses_s = asyncio.run(measure(mesh, asks, arguments.kills, arguments.minutes, draw))
            setup["other_cores"] = MachineUse.now().others_since(before)
        except (MeshError, WrongAnswer) as error:
            sys.stderr.write(f"resumption: {error}\n")
            return 1
        finally:
            mesh.stop()
    report(arguments, pauses_s, setup)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
