"""A mesh whose KV stores keep their pages in a real Valkey or Redis server; chat sessions."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from weft.testing.meshes.local_mesh import WEFT, wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import MODEL, VOCAB, Greedy, TinyMesh

with contextlib.suppress(ImportError):
    from weft.testing.services.valkey_server import ValkeyServer, valkey_server

pytestmark = [pytest.mark.needs("go", "valkey"), pytest.mark.full]
NUM_PROMPT, NUM_NEW, PAGE = 600, 8, 16
NUM_PAGES = (NUM_PROMPT - 1) // PAGE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def mesh(
    tmp_path_factory: pytest.TempPathFactory, rest_binary: Path, server: ValkeyServer
) -> Iterator[TinyMesh]:
    mesh = TinyMesh(
        tmp_path_factory.mktemp("mesh"),
        *("--kvstore", "2", "--local-prefill-max-tokens", "0"),
        # For a machine with other work; workers wait for 0.08 s.
        *("--kvstore-args", f"--backend valkey --valkey-url {server.url}"),
        *("--decode-args", f"--load-back-threshold 0 {PATIENT}"),
        *("--prefill-args", "--load-back-threshold 0"),
    )
    mesh.wait_ready()
    mesh.wait_healthy()
    yield mesh
    assert mesh.stop() == 0, mesh.text


@pytest.fixture(scope="module")
def greedy(mesh: TinyMesh) -> Greedy:
    return Greedy(mesh.model_dir)


def ask(mesh: TinyMesh, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0}
    body |= {"ignore_eos": True, "weft_timeline": True} | fields
    answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def prompt_of(length: int = NUM_PROMPT) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def status(mesh: TinyMesh) -> dict[str, dict[str, Any]]:
    command = [*WEFT, "status", "--address", mesh.grpc_address, "--json"]
    done = subprocess.run(command, check=True, capture_output=True, timeout=60)
    return {worker["worker_id"]: worker for worker in json.loads(done.stdout)["workers"]}


def forget(mesh: TinyMesh) -> None:
    """Workers have nothing, and stores nothing but what the server has."""
    for name in ("prefill-0", "decode-0"):
        mesh.flush(name)
    for name in mesh.names("kvstore"):
        pid = mesh.service(name)["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: (mesh.ready_file(name) or {}).get("pid", pid) != pid, 90)  # noqa: B023
    mesh.wait_ready()
    mesh.wait_healthy()


def test_pages_outlive_all_stores(mesh: TinyMesh, greedy: Greedy, server: ValkeyServer) -> None:
    prompt = greedy.prompt(NUM_PROMPT, NUM_NEW)
    expected = greedy.text(greedy.ids(prompt, NUM_NEW))
    assert ask(mesh, prompt)["choices"][0]["text"] == expected
    wait_until(lambda: len(server.page_names()) >= NUM_PAGES, 30)
    for _ in range(5):  # A lookup of a busy machine may be too late.
        forget(mesh)
        again = ask(mesh, prompt)
        assert again["choices"][0]["text"] == expected
        fills = again["weft"]["timeline"]["fills"]
        if any(fill["source"] == "FILL_SOURCE_KVSTORE" for fill in fills):
            break
    else:
        raise AssertionError(str(fills))
    found = status(mesh)
    tiers = [tier["name"] for tier in found["kvstore-0"]["tiers"]]
    assert tiers == ["arena", "valkey"]
    assert f"valkey at 127.0.0.1:{server.port}" in found["kvstore-0"]["transport_detail"]


def test_a_killed_server_costs_no_request(
    mesh: TinyMesh, greedy: Greedy, server: ValkeyServer
) -> None:
    server.kill()
    try:
        for _ in range(3):
            prompt = greedy.prompt(NUM_PROMPT, NUM_NEW)
            text = ask(mesh, prompt)["choices"][0]["text"]
            assert text == greedy.text(greedy.ids(prompt, NUM_NEW))
        wait_until(lambda: "Error" in status(mesh)["kvstore-0"]["transport_detail"], 30)
    finally:
        server.start()


def test_chats_are_pinned_and_shown(mesh: TinyMesh, greedy: Greedy) -> None:
    prompt = greedy.prompt(NUM_PROMPT, NUM_NEW)
    first = ask(mesh, prompt, session_id="chat")
    assert first["choices"][0]["text"] == greedy.text(greedy.ids(prompt, NUM_NEW))
    wait_until(lambda: status(mesh)["decode-0"]["sessions"] == 1, 30)
    assert status(mesh)["decode-0"]["pinned_pages"] >= NUM_PAGES
    command = [*WEFT, "status", "--address", mesh.grpc_address]
    shown = subprocess.run(command, check=True, capture_output=True, timeout=60, text=True).stdout
    assert "decode-0: 1 sessions pin" in shown
    ask(mesh, prompt, session_id="chat", end_session=True)
    wait_until(lambda: status(mesh)["decode-0"]["sessions"] == 0, 30)


def test_a_chat_is_ended_without_a_request(mesh: TinyMesh) -> None:
    prompts = {name: prompt_of() for name in ("one", "two")}
    for name, prompt in prompts.items():
        ask(mesh, prompt, session_id=name)
    wait_until(lambda: status(mesh)["decode-0"]["sessions"] == 2, 30)
    ending = {"session_id": "one"}
    answer = httpx.post(f"{mesh.url}/v1/end_session", json=ending, timeout=30, trust_env=False)
    assert (answer.status_code, answer.json()) == (200, {"status": "success", "workers": 1})
    wait_until(lambda: status(mesh)["decode-0"]["sessions"] == 1, 30)
    again = ask(mesh, prompts["two"], session_id="two", end_session=True)
    assert int(again["weft"]["timeline"]["matched_tokens"]) >= NUM_PAGES * PAGE
    wait_until(lambda: status(mesh)["decode-0"]["sessions"] == 0, 30)
