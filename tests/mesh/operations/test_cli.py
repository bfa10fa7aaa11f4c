"""The terminal's commands against a mesh with the real model."""

from __future__ import annotations

import json
import subprocess

import pytest
from weft.testing.meshes.local_mesh import MODEL, WEFT, LocalMesh
from weft.testing.meshes.mesh_calls import Ask, Caller, new_salt
from weft.testing.meshes.mesh_kinds import NUM_TOKENS, on
from weft.testing.meshes.mesh_prompts import BY_NAME, MeshPrompt
from weft.testing.meshes.text_reference import TextReference

pytestmark = [pytest.mark.needs("go", "nixl"), pytest.mark.timeout(600), on("nixl")]


def weft(*arguments: str, typed: str = "") -> str:
    command = [*WEFT, *arguments]
    done = subprocess.run(
        command, input=typed, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_chat_talks_to_the_model(mesh: LocalMesh, reference: TextReference) -> None:
    arguments = ("--address", mesh.grpc_address, "--temperature", "0")
    length = ("--max-tokens", str(NUM_TOKENS))
    first, second = BY_NAME["capital"], BY_NAME["chat-japanese"]
    (_, question), (_, other) = first.messages[0], second.messages[0]
    out = weft("chat", *arguments, *length, typed=f"{question}\n/reset\n{other}\nWhy?\n/quit\n")
    answers = [
        reference.text(reference.of(prompt, NUM_TOKENS).token_ids) for prompt in (first, second)
    ]
    assert out.startswith(f"{MODEL} at {mesh.grpc_address}")
    for answer in answers:
        assert f"{answer}\n" in out
    assert out.count("tokens/s") == 3
    # The third answer is to the whole conversation since the reset.
    turns = (("user", other), ("assistant", answers[1]), ("user", "Why?"))
    async with Caller(mesh) as caller:
        third = await caller.rest(Ask(MeshPrompt("third", messages=turns), NUM_TOKENS))
    assert f"{third.text}\n" in out


async def test_status_shows_workers_and_transports(mesh: LocalMesh) -> None:
    async with Caller(mesh) as caller:
        await caller.rest(Ask(BY_NAME["python"], 1, new_salt()))
    mesh.wait_idle()
    workers = json.loads(weft("status", "--json", "--address", mesh.grpc_address))["workers"]
    by_name = {worker["worker_id"]: worker for worker in workers}
    assert by_name.keys() == {"decode-0", "prefill-0"}
    for name, worker in by_name.items():
        assert worker["healthy"]
        assert (worker["model"], worker["dtype"]) == (MODEL, "float32")
        assert worker["transports"][0] == "nixl"
        pages = worker["pages"]
        assert pages["free"] + pages["cached"] == pages["total"], name
    assert by_name["decode-0"]["counters"]["accepted_pages"] > 0
    assert by_name["prefill-0"]["counters"]["shipped_pages"] > 0
    assert "UCX" in by_name["prefill-0"]["transport_detail"]
    shown = weft("status", "--address", mesh.grpc_address)
    for word in ("decode-0", "prefill-0", "nixl+data", "over UCX, to decode-0: intra-node: "):
        assert word in shown
