"""Meshes whose decode workers share experts: texts, routing to each, and their common end."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from weft.testing.meshes.local_mesh import READY_TIMEOUT_S, wait_until
from weft.testing.meshes.tiny_mesh import MODEL, Greedy, TinyMesh
from weft.v1 import worker_pb2

pytestmark = [pytest.mark.needs("go"), pytest.mark.full]
SHAPE: dict[str, Any] = {"num_experts": 8, "num_hidden_layers": 2}
Start = Callable[..., TinyMesh]


@pytest.fixture
def start(tmp_path: Path, rest_binary: Path) -> Iterator[Start]:
    meshes: list[TinyMesh] = []

    def start_mesh(*flags: str) -> TinyMesh:
        flags = ("--attention-dp", "2", "--max-restart-delay-s", "0.5", *flags)
        mesh = TinyMesh(tmp_path, *flags, kind="qwen3_moe", shape=SHAPE)
        meshes.append(mesh)
        mesh.wait_ready()
        return mesh

    yield start_mesh
    for mesh in meshes:
        assert mesh.stop() == 0, mesh.text


def complete(mesh: TinyMesh, prompt: list[int], num_new: int) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_new, "temperature": 0}
    with httpx.Client(base_url=f"{mesh.url}/v1", timeout=180, trust_env=False) as client:
        answer = client.post("/completions", json=body | {"ignore_eos": True})
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def test_each_worker_of_a_group_serves(start: Start) -> None:
    mesh = start("--prefill", "0", "--decode", "2")
    greedy = Greedy(mesh.model_dir)
    prompts = [greedy.prompt(random.choice((5, 60, 200)), 16) for _ in range(12)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: complete(mesh, prompt, 16), prompts))
    assert found == [greedy.text(greedy.ids(prompt, 16)) for prompt in prompts]
    for name in mesh.names("decode"):
        assert mesh.counters(name)["gathered_rows"] > 0
        assert mesh.counters(name)["generated_tokens"] > 0


def test_a_lost_worker_ends_its_group_and_texts_go_on_elsewhere(start: Start) -> None:
    mesh = start("--prefill", "0", "--decode", "4")
    greedy, num_new = Greedy(mesh.model_dir), 300
    prompts = [greedy.prompt(random.choice((5, 60, 200)), num_new) for _ in range(8)]
    expected = [greedy.text(greedy.ids(prompt, num_new)) for prompt in prompts]
    names = mesh.names("decode")
    before = {name: mesh.service(name) for name in names}
    lost = random.randrange(2)
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = [pool.submit(complete, mesh, prompt, num_new) for prompt in prompts]
        wait_until(
            lambda: all(mesh.load_now(name).running_requests for name in names[:2]),
            READY_TIMEOUT_S,
            lambda: mesh.text,
        )
        os.kill(before[names[lost]]["engine_pid"], signal.SIGKILL)
        assert [one.result() for one in found] == expected

    def epochs() -> list[bool]:
        now = {name: mesh.ready_file(name) for name in names}
        return [
            file is not None and file["epoch"] != before[name]["epoch"]
            for name, file in now.items()
        ]

    wait_until(lambda: epochs() == [True, True, False, False], READY_TIMEOUT_S, lambda: mesh.text)
    assert f"worker {lost} of 2 with shared experts has ended" in mesh.log(names[1 - lost])
    mesh.wait_ready()
    mesh.wait_healthy()
    assert complete(mesh, prompts[0], num_new) == expected[0]
    mesh.wait_empty()


def test_a_group_drains_together(start: Start) -> None:
    mesh = start("--prefill", "0", "--decode", "2")
    first, second = mesh.names("decode")
    with mesh.worker(first) as stub:
        stub.Drain(worker_pb2.DrainRequest(), timeout=60)
    wait_until(lambda: mesh.load_now(second).draining, READY_TIMEOUT_S, lambda: mesh.text)
    with mesh.worker(second) as stub:
        stub.Undrain(worker_pb2.UndrainRequest(), timeout=60)
    wait_until(lambda: not mesh.load_now(first).draining, READY_TIMEOUT_S, lambda: mesh.text)
    with mesh.worker(first) as one, mesh.worker(second) as other:
        request = worker_pb2.GetInfoRequest()
        infos = [stub.GetInfo(request, timeout=60) for stub in (one, other)]
    assert infos[0].expert_group == infos[1].expert_group != ""
    assert [info.expert_group_rank for info in infos] == [0, 1]
