"""A mesh records its routing under load; the record replays to the same choices."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from weft.gateway.routing import make_policy
from weft.testing.meshes.local_mesh import wait_until
from weft.testing.meshes.tiny_mesh import MODEL, VOCAB, TinyMesh
from weft.testing.services.routing_replay import read_record, replay

pytestmark = [pytest.mark.needs("go"), pytest.mark.full, pytest.mark.timeout(600)]
PAGE = 16


def tokens(count: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(count)]


async def chat(http: httpx.AsyncClient, system: list[int], num_turns: int) -> None:
    """Turns one after the other; the answers' tokens are not said again."""
    said = list(system)
    for _ in range(num_turns):
        said = said + tokens(random.randint(5, 60))
        body: dict[str, Any] = {"model": MODEL, "prompt": said, "max_tokens": 6, "temperature": 0}
        answer = await http.post("/v1/completions", json=body | {"ignore_eos": True})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("events", ["", "--no-kv-events"])
def test_a_recorded_mesh_replays_to_the_same_choices(
    tmp_path: Path, rest_binary: Path, events: str
) -> None:
    seed = random.randrange(2**31)
    print("seed", seed)
    random.seed(seed)
    folder = tmp_path / "records"
    policies = "--prefill-policy cache_aware --decode-policy cache_aware"
    mesh = TinyMesh(
        tmp_path,
        *("--prefill", "2", "--decode", "2", "--kv-memory-bytes", str(8 << 20)),
        *("--gateway-args", f"{policies} {events} --routing-record-dir {folder}"),
    )
    try:
        mesh.wait_ready()
        mesh.wait_healthy()
        systems = [tokens(random.randint(4, 12) * PAGE) for _ in range(5)]

        async def load(num_chats: int) -> None:
            async with httpx.AsyncClient(base_url=mesh.url, timeout=240, trust_env=False) as http:
                chats = (chat(http, random.choice(systems), 4) for _ in range(num_chats))
                await asyncio.gather(*chats)

        asyncio.run(load(24))
        pid = mesh.service("prefill-1")["pid"]
        os.kill(pid, signal.SIGKILL)
        asyncio.run(load(12))
        wait_until(lambda: (mesh.ready_file("prefill-1") or {}).get("pid", pid) != pid, 90)
        mesh.wait_healthy()
        asyncio.run(load(12))
    finally:
        assert mesh.stop() == 0, mesh.text
    (path,) = folder.iterdir()
    decisions = list(replay(read_record(path), make_policy))
    assert [one for one in decisions if not one.is_same] == []
    for role in ("prefill", "decode"):
        of_pool = [one for one in decisions if one.pool == f"{MODEL}/{role}"]
        assert len(of_pool) >= 4 * (24 + 12 + 12)
        assert len({one.recorded[0].position for one in of_pool}) == 2
        assert any(one.recorded[0].match_tokens for one in of_pool)
