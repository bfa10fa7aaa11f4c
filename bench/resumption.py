"""The cost of a killed decode worker for its streams.

It starts a mesh with two decode workers, runs streams, kills one of the workers at a random moment
(both processes, its engine, or its server), and checks that every stream has the same tokens as
without the kill. The pause is in the client's timeline: from the loss to the next token.

    python bench/resumption.py                  20 kills of each kind, 32 streams, a tiny model
    python bench/resumption.py --model demo --streams 8 --tokens 64
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
from harness import Harness, Run, percentiles
from serving import kills
from serving.mesh import MeshError, MeshProcess
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
                await asyncio.sleep(0.5)  # Then the killed worker's ready file is gone.
                await wait_whole(mesh, stub)
                await asyncio.sleep(SETTLE_S)
    return pauses_s


def check(outcomes: list[kills.Outcome], expected: list[kills.Outcome]) -> None:
    """Checks that every stream brought the same as without a kill."""
    for number, (outcome, right) in enumerate(zip(outcomes, expected, strict=True)):
        if outcome.error or not outcome.is_same(right):
            raise WrongAnswer(f"stream {number}: {outcome.error or 'another text'}")


harness = Harness(__file__, __doc__)
harness.flag("--model", default="tiny", help="tiny, demo or a model directory")
harness.flag("--kills", type=int, default=20, help="of each kind")
harness.flag("--minutes", type=float, help="no kill begins later than this")
harness.flag("--streams", type=int, default=32)
harness.flag("--tokens", type=int, default=300, help="of each sample")
harness.flag("--seed", type=int, default=0)


@harness.part
def resumption(run: Run) -> None:
    """All kinds of kills."""
    options, draw = run.options, random.Random(run.options.seed)
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-bench-")))
    model = options.model
    if model == "tiny":
        model = str(make_tiny_model(folder / "tiny", options.seed))
    ids = range(3, VOCAB_SIZE)
    stops = ["e", "th", "\ufffd"]
    asks = kills.make_asks(options.streams, options.tokens, ids, draw, stops)
    # A stream has one sample or two.
    mesh = MeshProcess(model, "float32", FLAGS.format(slots=2 * options.streams))
    run.stack.callback(mesh.stop)
    mesh.wait_until_ready()
    found = asyncio.run(measure(mesh, asks, options.kills, options.minutes, draw))
    for kind, by_kill in found.items():
        values = [pause for pauses in by_kill for pause in pauses]
        if values:
            found_ms = percentiles(values, 1e3) | {"most": 1e3 * max(values)}
            counts = {"killed": kind, "kills": len(by_kill), "streams_lost": len(values)}
            run.row(counts | found_ms, table="ms of a stream's pause")
    run.note("every stream was equal to its run without a kill")


if __name__ == "__main__":
    sys.exit(harness.main())
