"""Each invariant is broken on purpose; a run that did not turn red would be worth nothing."""

from __future__ import annotations

import signal

import pytest
from weft.chaos.run import ChaosPlan, run_on
from weft.chaos.sabotage.classes import SABOTAGES
from weft.testing.meshes.chaos_mesh import Chaos

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.needs("nixl"),
    pytest.mark.timeout(1200),
]
QUICK = "deliver"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == QUICK else pytest.mark.full)
        for name in sorted(SABOTAGES, key=lambda name: name != QUICK)
    ],
)
async def test_a_broken_invariant_turns_the_run_red(chaos: Chaos, name: str) -> None:
    sabotage = SABOTAGES[name]
    plan = ChaosPlan(
        seed=chaos.seed,
        num_faults=1 if name == QUICK else 8,
        minutes=None,
        num_clients=4,
        max_prompt_tokens=300,
        max_new_tokens=48,
        sabotage=name,
        checks_hit_rate=sabotage.invariant == 6,
    )
    result = await run_on(chaos.mesh, plan, chaos.known, print)
    found = "\n".join(f"{v.invariant}: {v.what}" for v in result.violations)
    print(found)
    assert sabotage.invariant in result.red, found
    if name != QUICK:
        await repair(chaos, sabotage.role)


async def repair(chaos: Chaos, role: str) -> None:
    """What was broken is gone with its processes, and with what others hold of them."""
    mesh = chaos.mesh
    for name in (*mesh.named("kvstore"), *mesh.named("prefill")):
        await mesh.flush(name)
    for name in mesh.named(role):
        old = mesh.ready(name)
        mesh.send(name, "whole", signal.SIGKILL)
        await mesh.until(lambda name=name, old=old: mesh.ready(name) is not old, name, 60.0)  # type: ignore[misc]
    await mesh.wait_healthy()
