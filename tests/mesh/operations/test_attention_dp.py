"""Meshes whose decode workers share experts: texts, routing to each, and their common end."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from weft.testing.meshes.local_mesh import READY_TIMEOUT_S, wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import MODEL, Greedy, TinyMesh
from weft.v1 import worker_pb2

pytestmark = [pytest.mark.needs("go"), pytest.mark.full]
SHAPE: dict[str, Any] = {"num_experts": 8, "num_hidden_layers": 2}
NUM_LOSSES = 3
LIMIT_S = 5.0
"""Longest wait of a worker for those that share its experts."""
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


def lose_one(mesh: TinyMesh, prompts: Sequence[list[int]], num_new: int) -> list[str]:
    """Kills or stops one engine while requests run, and waits until its group is back. Returns the
    texts of the requests.
    """
    names = mesh.names("decode")
    before = {name: mesh.service(name) for name in names}
    lost = random.randrange(len(names))
    group = names[lost // 2 * 2 : lost // 2 * 2 + 2]
    (other,) = set(group) - {names[lost]}
    victim, companion = (before[name]["engine_pid"] for name in (names[lost], other))
    kind = random.choice((signal.SIGKILL, signal.SIGSTOP))
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(complete, mesh, prompt, num_new) for prompt in prompts]
        wait_until(
            lambda: (
                mesh.load_now(names[lost]).running_requests > 0
                or all(answer.done() for answer in answers)
            ),
            READY_TIMEOUT_S,
            lambda: mesh.text,
        )
        os.kill(victim, kind)
        wait_until(lambda: not psutil.pid_exists(companion), READY_TIMEOUT_S, lambda: mesh.text)
        if kind == signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)
        texts = [answer.result() for answer in answers]

    def is_as_wanted(name: str) -> bool:
        file = mesh.ready_file(name)
        return file is not None and (file["epoch"] != before[name]["epoch"]) == (name in group)

    wait_until(lambda: all(map(is_as_wanted, names)), READY_TIMEOUT_S, lambda: mesh.text)
    assert f"worker {lost % 2} of 2 with shared experts has " in mesh.log(other)
    return texts


@pytest.mark.timeout(900)
def test_a_lost_worker_ends_its_group_and_texts_go_on_elsewhere(start: Start) -> None:
    """Killed, or stopped for longer than the others wait, under load; time and again."""
    mesh = start("--prefill", "0", "--decode", "4", "--decode-args", f"--rank-timeout-s {LIMIT_S}")
    greedy, num_new = Greedy(mesh.model_dir), 200
    prompts = [greedy.prompt(random.choice((5, 60, 200)), num_new) for _ in range(8)]
    expected = [greedy.text(greedy.ids(prompt, num_new)) for prompt in prompts]
    for _ in range(NUM_LOSSES):
        mesh.wait_healthy()
        assert lose_one(mesh, prompts, num_new) == expected
    mesh.wait_ready()
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


def test_pages_travel_between_groups_and_through_tiers(start: Start) -> None:
    tiers = ("--host-cache-bytes", str(8 << 20))
    shipped = ("--local-prefill-max-tokens", "0", "--decode-args", f"{PATIENT} --num-pages 40")
    mesh = start("--prefill", "2", "--decode", "2", *tiers, *shipped)
    greedy = Greedy(mesh.model_dir)
    mesh.wait_healthy()
    prompts = [greedy.prompt(100, 8) for _ in range(8)]
    expected = [greedy.text(greedy.ids(prompt, 8)) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            found = list(pool.map(lambda prompt: complete(mesh, prompt, 8), prompts))
            assert found == expected
    owners = [mesh.counters(name) for name in mesh.names("decode")]
    fillers = [mesh.counters(name) for name in mesh.names("prefill")]
    assert sum(each["accepted_pages"] for each in owners) > 0
    assert all(each["gathered_rows"] > 0 for each in fillers)
    mesh.wait_empty()
