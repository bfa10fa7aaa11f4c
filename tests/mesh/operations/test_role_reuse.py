"""Roles that change in the middle of chats: what was computed is used again."""

from __future__ import annotations

import asyncio
import random
import subprocess
from pathlib import Path

import pytest
from weft.testing.meshes.local_mesh import WEFT
from weft.testing.meshes.mesh_calls import Ask, Caller, new_salt
from weft.testing.meshes.tiny_mesh import VOCAB, TinyMesh

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

NUM_CHATS, NUM_TURNS, NUM_NEW, NUM_ASKED = 4, 8, 24, 40


def tokens(count: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(count)]


async def set_roles(mesh: TinyMesh, **roles: str) -> None:
    for name, role in roles.items():
        command = [*WEFT, "role", name.replace("_", "-"), role, "--state-dir", str(mesh.state)]
        done = await asyncio.to_thread(
            subprocess.run, [*command, "--force"], capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, done.stderr


async def test_reuse_is_that_of_a_mesh_whose_roles_stay(tmp_path: Path) -> None:
    """Two workers change places in the middle. Long prompts are shipped, further turns are not."""
    mesh = TinyMesh(tmp_path, "--both", "3", "--local-prefill-max-tokens", "72")
    computed, asked, moved = [0, 0], 0, 0
    try:
        mesh.wait_ready()
        async with Caller(mesh) as caller:
            for changes in (False, True):
                await set_roles(mesh, worker_0="decode", worker_1="decode", worker_2="prefill")
                chats, owners = [tokens(100) for _ in range(NUM_CHATS)], [""] * NUM_CHATS
                salt, asked = new_salt(), 0
                for turn in range(NUM_TURNS):
                    if changes and turn == NUM_TURNS // 2:
                        # The one that answered all chats' last turn, or most of them.
                        old = max(set(owners), key=owners.count).replace("-", "_")
                        await set_roles(mesh, worker_2="decode", **{old: "prefill"})
                    for number, chat in enumerate(chats):
                        ask = Ask(list(chat), NUM_NEW, salt, ignore_eos=True)
                        answer = await caller.grpc(ask)
                        assert answer.token_ids is not None
                        timeline = answer.timeline
                        assert timeline.lost_attempts == []
                        computed[changes] += timeline.local_prefill_tokens
                        computed[changes] += sum(fill.computed_tokens for fill in timeline.fills)
                        moved += bool(changes and turn and timeline.worker_id != owners[number])
                        owners[number] = timeline.worker_id
                        asked += len(chat)
                        chat += answer.token_ids + tokens(NUM_ASKED)
                    await asyncio.to_thread(mesh.wait_idle)
                    await asyncio.to_thread(mesh.wait_indexed)
    finally:
        mesh.stop()
    assert moved
    reuse, reuse_changed = (1 - count / asked for count in computed)
    assert reuse > 0.5
    assert reuse_changed >= 0.99 * reuse, computed
