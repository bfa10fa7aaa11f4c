"""A mesh whose decode worker has two ranks: pages from a worker of one, and the end of a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from weft.testing.meshes.local_mesh import READY_TIMEOUT_S, wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import MODEL, Greedy, TinyMesh
from weft.v1 import worker_pb2

pytestmark = pytest.mark.needs("go", "nixl")
NUM_NEW = 8


@pytest.fixture
def mesh(tmp_path: Path, rest_binary: Path) -> Iterator[TinyMesh]:
    flags = ("--tp", "2", "--prefill-args", "--tp 1", "--decode-args", PATIENT)
    mesh = TinyMesh(tmp_path, "--local-prefill-max-tokens", "0", *flags)
    mesh.wait_ready()
    yield mesh
    assert mesh.stop() == 0, mesh.text


def check_fill(mesh: TinyMesh, greedy: Greedy) -> None:
    """A prompt that is filled elsewhere has the right text."""
    mesh.wait_healthy()
    prompt = greedy.prompt(100, NUM_NEW)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0}
    body |= {"ignore_eos": True, "weft_timeline": True}
    with httpx.Client(base_url=f"{mesh.url}/v1", timeout=60, trust_env=False) as client:
        answer = client.post("/completions", json=body).json()
    assert answer["choices"][0]["text"] == greedy.text(greedy.ids(prompt, NUM_NEW))
    (fill,) = answer["weft"]["timeline"]["fills"]
    assert (fill["source"], fill["end_token"]) == ("FILL_SOURCE_PREFILL", 96)


def test_two_ranks_take_pages_from_one_and_end_together(mesh: TinyMesh) -> None:
    greedy = Greedy(mesh.model_dir)
    check_fill(mesh, greedy)
    with mesh.worker("decode-0") as stub:
        info = stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=10)
    assert any("2 ranks" in notice for notice in info.notices), info.notices
    before = mesh.service("decode-0")
    (rank,) = psutil.Process(info.engine_pid).children()
    os.kill(rank.pid, signal.SIGKILL)

    def is_back() -> bool:
        ready = mesh.ready_file("decode-0")
        return ready is not None and ready["epoch"] != before["epoch"]

    wait_until(is_back, READY_TIMEOUT_S, lambda: mesh.text)
    assert "rank 1" in mesh.log("decode-0")
    assert "signal 9" in mesh.log("decode-0")
    mesh.wait_ready()
    check_fill(mesh, greedy)
