"""Seeded faults while half of the requests have images: the invariants hold."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from weft.chaos.command import mesh_settings
from weft.chaos.report import as_json
from weft.chaos.run import ChaosPlan, run_chaos
from weft.testing.meshes.chaos_mesh import for_tests
from weft.testing.models.tiny_vision import make_vision

pytestmark = [
    pytest.mark.full,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.needs("nixl"),
    pytest.mark.timeout(3600),
]


@pytest.mark.parametrize("has_tower", [True, False], ids=["towers", "owners without towers"])
async def test_two_hundred_faults_among_images_leave_every_invariant_whole(
    tmp_path: Path, has_tower: bool
) -> None:
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    plan = ChaosPlan(
        seed=seed,
        num_faults=200,
        minutes=None,
        num_clients=4,
        max_prompt_tokens=300,
        max_new_tokens=48,
        checks_hit_rate=False,
        has_images=True,
    )
    folder = make_vision("smolvlm", tmp_path / "seeing", seed)
    settings = for_tests(mesh_settings(tmp_path / "state", is_tiny=False, gateways=2))
    if not has_tower:
        args = f"{settings.decode_args} --language-model-only"
        settings = settings.model_copy(update={"decode_args": args})
    result = await run_chaos(plan, settings, folder, folder.name, print)
    assert result.num_happened >= 200
    assert result.load.outcomes["ok"] > 0
    assert result.load.num_resumed > 0
    assert not result.violations, json.dumps(as_json(plan, result, "pytest"), indent=1)
