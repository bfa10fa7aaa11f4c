"""Roles that change under load: how long a change takes, what is lost, and what caches lose by it.

    python bench/role_switch.py                           three workers on the CPU, a few layers
    python bench/role_switch.py --device cuda:0,cuda:1 --workers 2 --layers 0 --dtype bfloat16

The workers are of both roles and have random weights; one prefills, and the others decode.

- `switch`: two workers change places again and again while clients ask without a pause. The time
  is that from the order until the worker's report says that a fill or a token has proved the role;
  reports come ten times a second.
- `reuse`: conversations run twice, and the second time two workers change places after a third of
  the turns. Texts must be equal. `reuse` is the share of prompt tokens that no worker computed,
  `cached` the share that owners had themselves, as usage reports it. Shipping pages must pay for
  what is moved to be reused, so the model must not be too small.
- `beside` (only if named): a prefill and a decode worker beside two of both roles that have the
  same roles: KV pages of the one that decodes, and the time between tokens of 1, 16 and 64 answers.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
from gpu_apart import make_model
from harness import Harness, Run, spread
from model_shapes import MODELS
from weft.testing.meshes.local_mesh import LocalMesh
from weft.testing.meshes.mesh_calls import Answer, Ask, Caller, new_salt
from weft.v1 import common_pb2, mesh_pb2, mesh_pb2_grpc, worker_pb2, worker_pb2_grpc

PROOF_TIMEOUT_S = 20.0


@dataclass
class Outcome:
    """What the conversations of one run were answered."""

    texts: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """By conversation and turn."""
    asked: int = 0
    cached: int = 0
    computed: int = 0
    lost: int = 0
    switch_s: list[float] = field(default_factory=list)

    def add(self, at: tuple[int, int], answer: Answer) -> None:
        timeline = answer.timeline
        assert answer.token_ids is not None
        self.texts[at] = answer.token_ids
        self.asked += answer.prompt_tokens
        self.cached += answer.cached_tokens
        self.computed += timeline.local_prefill_tokens
        self.computed += sum(fill.computed_tokens for fill in timeline.fills)
        self.lost += len(timeline.lost_attempts)

    @property
    def reuse(self) -> float:
        return 1 - self.computed / self.asked


class Operator:
    """Sets roles, and sees in workers' reports when they are proved."""

    def __init__(self, mesh: LocalMesh, workers: list[str]) -> None:
        token = (mesh.state / "admin-token").read_text().strip()
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._gateway = grpc.aio.insecure_channel(mesh.service("gateway")["admin_address"])
        self._channels = {
            name: grpc.aio.insecure_channel(mesh.service(name)["address"]) for name in workers
        }

    async def order(self, name: str, role: str) -> int:
        """The number of the worker's changes so far."""
        stub: mesh_pb2_grpc.MeshServiceAsyncStub = mesh_pb2_grpc.MeshServiceStub(self._gateway)
        request = mesh_pb2.SetMemberRoleRequest(member_id=name, role=role)
        answer = await stub.SetMemberRole(request, timeout=20, metadata=self._metadata)
        return int(answer.changes)

    async def switch(self, name: str, role: str) -> float:
        """Seconds from the order until a fill or a token has proved the role."""
        began_s = time.perf_counter()
        changes = await self.order(name, role)
        channel = self._channels[name]
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.WatchLoad(worker_pb2.WatchLoadRequest())
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                async for load in call:
                    if load.role.changes >= changes and load.role.proved:
                        break
        finally:
            call.cancel()
        return time.perf_counter() - began_s

    async def close(self) -> None:
        for channel in (self._gateway, *self._channels.values()):
            await channel.close()


def first_roles(workers: list[str]) -> dict[str, str]:
    return {name: "decode" if at else "prefill" for at, name in enumerate(workers)}


async def ask_without_pause(
    caller: Caller, run: Run, seed: int, over: asyncio.Event, answers: list[Answer]
) -> None:
    options, draw = run.options, random.Random(seed)
    while not over.is_set():
        prompt = [draw.randrange(10, options.vocab) for _ in range(options.prompt)]
        answers.append(await caller.grpc(Ask(prompt, options.tokens, ignore_eos=True)))


async def measure_switches(run: Run, mesh: LocalMesh, workers: list[str]) -> None:
    """Fresh prompts, so that every request ships its pages."""
    options, answers, over = run.options, list[Answer](), asyncio.Event()
    async with operating(mesh, workers) as (caller, operator):
        clients = [
            asyncio.create_task(ask_without_pause(caller, run, seed, over, answers))
            for seed in range(options.clients)
        ]
        roles = first_roles(workers)
        found: dict[str, list[float]] = {"decode": [], "prefill": []}
        for name, role in sorted(roles.items(), key=lambda one: one[1]):
            await operator.order(name, role)
        await asyncio.sleep(1.0)
        for turn in range(options.switches):
            # The one that prefills decodes before another one ceases to.
            old = next(name for name in workers if roles[name] == "prefill")
            new = [name for name in workers if name != old][turn % (len(workers) - 1)]
            for name, role in ((old, "decode"), (new, "prefill")):
                found[role].append(await operator.switch(name, role))
                roles[name] = role
            await asyncio.sleep(0.2)
        over.set()
        await asyncio.gather(*clients)
    lost = sum(len(answer.timeline.lost_attempts) for answer in answers)
    short = sum(len(answer.token_ids or []) != options.tokens for answer in answers)
    for role, times in found.items():
        run.row(
            table="switch",
            to=role,
            proved_s=spread(times),
            longest_s=max(times),
            requests=len(answers),
            lost_attempts=lost,
            wrong_length=short,
        )
    if lost or short:
        run.fail(f"{lost} attempts were lost, and {short} answers have a wrong length")


async def converse(
    caller: Caller, operator: Operator, run: Run, workers: list[str], seed: int, *, switches: bool
) -> Outcome:
    options, roles = run.options, first_roles(workers)
    for name, role in sorted(roles.items(), key=lambda one: one[1]):
        await operator.order(name, role)
    await asyncio.sleep(1.0)
    outcome, salt, switch = Outcome(), new_salt(), asyncio.Event()
    num = options.conversations

    async def conversation(at: int) -> None:
        draw = random.Random(f"{seed} {at}")
        prompt: list[int] = []
        for turn in range(options.turns):
            prompt += [draw.randrange(10, options.vocab) for _ in range(options.fresh)]
            answer = await caller.grpc(Ask(list(prompt), options.answer, salt, ignore_eos=True))
            outcome.add((at, turn), answer)
            prompt += outcome.texts[at, turn]
            if len(outcome.texts) >= num * options.turns // 3:
                switch.set()

    async def change() -> None:
        await switch.wait()
        await operator.order(workers[0], "decode")
        await operator.order(workers[1], "prefill")

    changing = [change()] if switches else []
    await asyncio.gather(*(conversation(at) for at in range(num)), *changing)
    return outcome


async def measure_reuse(run: Run, mesh: LocalMesh, workers: list[str]) -> None:
    options = run.options
    found: dict[bool, list[Outcome]] = {False: [], True: []}
    async with operating(mesh, workers) as (caller, operator):
        for pair in range(options.rounds):
            for switches in (pair % 2 == 0, pair % 2 == 1):
                found[switches].append(
                    await converse(caller, operator, run, workers, pair, switches=switches)
                )
            stay, changed = found[False][-1], found[True][-1]
            equal = sum(stay.texts[at] == changed.texts[at] for at in stay.texts)
            run.row(
                table="reuse",
                pair=pair,
                reuse=stay.reuse,
                reuse_switched=changed.reuse,
                of_it=changed.reuse / stay.reuse,
                cached=stay.cached / stay.asked,
                cached_switched=changed.cached / changed.asked,
                lost_attempts=changed.lost,
                answers=len(stay.texts),
                equal=equal,
            )
            if equal < len(stay.texts) or changed.lost:
                run.fail(f"{len(stay.texts) - equal} other texts, {changed.lost} attempts lost")
    stay_mean, changed_mean = (
        sum(one.reuse for one in found[key]) / options.rounds for key in (False, True)
    )
    run.note(
        f"reuse {stay_mean:.4f}, with a change {changed_mean:.4f}: "
        f"{changed_mean / stay_mean:.4f} of it"
    )


@asynccontextmanager
async def operating(mesh: LocalMesh, workers: list[str]) -> AsyncIterator[tuple[Caller, Operator]]:
    operator = Operator(mesh, workers)
    try:
        async with Caller(mesh) as caller:
            yield caller, operator
    finally:
        await operator.close()


def start(run: Run, *flags: str, fixed: bool = False) -> tuple[LocalMesh, list[str]]:
    """A mesh, and the names of its workers: of both roles unless `fixed`."""
    options = run.options
    worker = f"--dummy-weights {options.args}"
    workers = ("--both", str(options.workers))
    if fixed:
        workers = ("--prefill", "1", "--decode", "1", "--prefill-args", worker)
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-bench-")))
    model = make_model(folder, options)
    began_s = time.perf_counter()
    mesh = LocalMesh(
        folder,
        *("--model", str(model), "--dtype", options.dtype, "--device", options.device),
        *(*workers, "--decode-args", worker, *flags),
    )
    run.stack.callback(mesh.stop)
    mesh.model = options.model
    mesh.wait_ready()
    mesh.wait_healthy()
    print(f"ready after {time.perf_counter() - began_s:.0f} s", flush=True)
    if fixed:
        return mesh, ["prefill-0", "decode-0"]
    return mesh, [f"worker-{at}" for at in range(options.workers)]


async def measure_steps(run: Run, mesh: LocalMesh, workers: list[str], system: str) -> None:
    """Short prompts, which the one that decodes computes itself."""
    figures: dict[str, object] = {}
    async with operating(mesh, workers) as (caller, operator):
        if system == "both":
            await operator.order(workers[1], "decode")
            await operator.order(workers[0], "prefill")
            await asyncio.sleep(1.0)
        draw = random.Random(1)
        for count in (1, 16, 64):
            gaps: list[float] = []
            for turn in range(run.options.bursts + 1):
                asks = [
                    Ask([draw.randrange(10, run.options.vocab) for _ in range(24)], 128, new_salt())
                    for _ in range(count)
                ]
                found = await asyncio.gather(
                    *(caller.grpc(replace(one, ignore_eos=True)) for one in asks)
                )
                if turn:  # The first warms up.
                    gaps += [1e3 * pace_s(one.timeline) for one in found]
            figures[f"ms_of_{count}"] = spread(gaps)
    load = mesh.load(workers[1])
    run.row(table="beside", system=system, pages=load.total_pages, **figures)


def pace_s(timeline: common_pb2.Timeline) -> float:
    """Mean time between an answer's tokens, as its engine saw them."""
    first, last = timeline.first_token_time, timeline.finish_time
    return (last.ToNanoseconds() - first.ToNanoseconds()) / 127e9


harness = Harness(__file__, __doc__)
harness.flag("--model", choices=[*MODELS, "tiny"], default="qwen3-0.6b")
harness.flag("--device", default="cpu")
harness.flag("--dtype", default="float32")
harness.flag("--workers", type=int, default=3)
harness.flag("--layers", type=int, default=6, help="of the model; 0 = its own number")
harness.flag("--vocab", type=int, default=49_152)
harness.flag("--tokenizer", type=Path, help="folder of its files; default the demo model's")
harness.flag("--args", default="--deterministic", help="of workers")
harness.flag("--switches", type=int, default=10, help="times that two workers change places")
harness.flag("--clients", type=int, default=4)
harness.flag("--prompt", type=int, default=200, help="tokens, of clients that ask without a pause")
harness.flag("--tokens", type=int, default=16, help="of their answers")
harness.flag("--bursts", type=int, default=2, help="of each size, in `beside`")
harness.flag("--rounds", type=int, default=2, help="runs with and without a change, in turns")
harness.flag("--conversations", type=int, default=4)
harness.flag("--turns", type=int, default=8)
harness.flag("--fresh", type=int, default=100, help="new tokens of each turn")
harness.flag("--answer", type=int, default=16, help="tokens of each turn's answer")


@harness.part
def switch(run: Run) -> None:
    """Two workers change places under load; every prompt is shipped."""
    mesh, workers = start(run, "--local-prefill-max-tokens", "0")
    try:
        asyncio.run(measure_switches(run, mesh, workers))
    finally:
        mesh.stop()


@harness.part
def reuse(run: Run) -> None:
    """Conversations with a change and without; prompts are shipped where that pays."""
    mesh, workers = start(run)
    try:
        asyncio.run(measure_reuse(run, mesh, workers))
    finally:
        mesh.stop()


@harness.part_if_named
def beside(run: Run) -> None:
    """A worker of both roles that decodes, and a decode worker."""
    for system in ("fixed", "both"):
        mesh, workers = start(run, fixed=system == "fixed")
        try:
            asyncio.run(measure_steps(run, mesh, workers, system))
        finally:
            mesh.stop()


if __name__ == "__main__":
    sys.exit(harness.main())
