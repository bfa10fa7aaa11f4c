"""Seeded faults of all kinds under load: the invariants hold."""

from __future__ import annotations

import json

import pytest
from weft.chaos.report import as_json
from weft.chaos.run import ChaosPlan, run_on
from weft.testing.meshes.chaos_mesh import Chaos

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.needs("nixl"),
    pytest.mark.timeout(900),
]


NUM_FAULTS = 8
"""`weft chaos` sends any number."""


def plan(chaos: Chaos, num_faults: int) -> ChaosPlan:
    return ChaosPlan(
        seed=chaos.seed,
        num_faults=num_faults,
        minutes=None,
        num_clients=4,
        max_prompt_tokens=300,
        max_new_tokens=48,
        checks_hit_rate=False,
    )


async def test_faults_leave_every_invariant_whole(chaos: Chaos) -> None:
    wanted = plan(chaos, NUM_FAULTS)
    result = await run_on(chaos.mesh, wanted, chaos.known, print)
    assert result.num_happened >= NUM_FAULTS
    assert result.load.outcomes["ok"] > 0
    assert result.load.drafted_tokens >= result.load.accepted_tokens > 0
    assert not result.violations, json.dumps(as_json(wanted, result, "pytest"), indent=1)
