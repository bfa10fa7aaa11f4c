"""Roles that change under load: time until work shows the new ones, and what caches lose by it.

Conversations run on three workers of both roles, of which one prefills. In every second run, two of
them change places when a third of the turns is done. The texts must be equal.

    python bench/role_switch.py                 four pairs of runs, on a tiny model
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf.duration_pb2 import Duration
from harness import Harness, Run
from weft.testing.meshes.mesh_calls import Ask, Caller, new_salt
from weft.testing.meshes.tiny_mesh import VOCAB, TinyMesh
from weft.v1 import mesh_pb2, mesh_pb2_grpc

FIRST = {"worker-0": "prefill", "worker-1": "decode", "worker-2": "decode"}
SWITCHED = {"worker-0": "decode", "worker-1": "prefill"}
NUM_NEW, FRESH_TOKENS = 16, 60
WATCH = mesh_pb2.WatchMeshRequest(interval=Duration(nanos=500_000_000))


class WrongAnswer(Exception):
    """A request was lost, or had another text than without a change."""


@dataclass
class Outcome:
    texts: list[list[int]]
    cached: int = 0
    asked: int = 0
    lost: int = 0
    proved_s: float = 0.0
    """From the orders until a fill and a token have shown the new roles, by news twice a second."""


class Operator:
    def __init__(self, mesh: TinyMesh) -> None:
        address = mesh.service("gateway")["admin_address"]
        token = (mesh.state / "admin-token").read_text().strip()
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = mesh_pb2_grpc.MeshServiceStub(self._channel)

    async def set_roles(self, roles: dict[str, str], *, prove: bool) -> float:
        """Returns the time until all are proved, or with `prove` off until they are set."""
        began_s = time.perf_counter()
        for name, role in sorted(roles.items(), key=lambda one: one[1]):
            order = mesh_pb2.SetMemberRoleRequest(member_id=name, role=role)
            await self._stub.SetMemberRole(order, timeout=20, metadata=self._metadata)
        if prove:
            call = self._stub.WatchMesh(WATCH, metadata=self._metadata)
            async for message in call:
                states = {one.member_id: one for one in message.members if one.member_id in roles}
                if len(states) == len(roles) and all(
                    one.role_state.proved for one in states.values()
                ):
                    break
            call.cancel()
        return time.perf_counter() - began_s

    async def close(self) -> None:
        await self._channel.close()


async def converse(
    caller: Caller, operator: Operator, num: int, turns: int, seed: int, *, switches: bool
) -> Outcome:
    await operator.set_roles(FIRST, prove=False)
    await asyncio.sleep(1.0)
    outcome = Outcome(texts=[[] for _ in range(num)])
    salt, done = new_salt(), 0
    switch = asyncio.Event()

    async def conversation(at: int) -> None:
        nonlocal done
        draw = random.Random(f"{seed} {at}")
        prompt: list[int] = []
        for _ in range(turns):
            prompt += [draw.randrange(3, VOCAB) for _ in range(FRESH_TOKENS)]
            answer = await caller.grpc(Ask(list(prompt), NUM_NEW, salt, ignore_eos=True))
            assert answer.token_ids is not None
            outcome.texts[at] += answer.token_ids
            outcome.cached += answer.cached_tokens
            outcome.asked += len(prompt)
            outcome.lost += len(answer.timeline.lost_attempts)
            prompt += answer.token_ids
            done += 1
            if done >= num * turns // 3:
                switch.set()

    async def change() -> None:
        await switch.wait()
        outcome.proved_s = await operator.set_roles(SWITCHED, prove=True)

    changing = [change()] if switches else []
    await asyncio.gather(*(conversation(at) for at in range(num)), *changing)
    return outcome


async def measure(run: Run, mesh: TinyMesh) -> None:
    options = run.options
    operator = Operator(mesh)
    hits: dict[bool, list[float]] = {False: [], True: []}
    async with Caller(mesh) as caller:
        for pair in range(options.rounds):
            found: dict[bool, Outcome] = {}
            for switches in (pair % 2 == 0, pair % 2 == 1):
                found[switches] = await converse(
                    caller,
                    operator,
                    options.conversations,
                    options.turns,
                    pair,
                    switches=switches,
                )
            if found[False].texts != found[True].texts:
                raise WrongAnswer("a text is another one after a change")
            for switches, outcome in found.items():
                hits[switches].append(outcome.cached / outcome.asked)
            run.row(
                pair=pair,
                hit_rate_stay=hits[False][-1],
                hit_rate_switched=hits[True][-1],
                lost=found[True].lost,
                proved_s=found[True].proved_s,
            )
    await operator.close()
    stay, switched = (sum(hits[key]) / len(hits[key]) for key in (False, True))
    run.note(f"hit rate {stay:.4f}, with a change {switched:.4f}, {switched / stay:.4f} of it")


harness = Harness(__file__, __doc__)
harness.flag("--rounds", type=int, default=4, help="runs with and without a change, in turns")
harness.flag("--conversations", type=int, default=6)
harness.flag("--turns", type=int, default=9)


@harness.part
def role_switch(run: Run) -> None:
    """Two workers change places while conversations run."""
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-bench-")))
    mesh = TinyMesh(
        folder, "--both", "3", "--local-prefill-max-tokens", "0", max_context_tokens=2048
    )
    run.stack.callback(mesh.stop)
    mesh.wait_ready()
    asyncio.run(measure(run, mesh))


if __name__ == "__main__":
    sys.exit(harness.main())
