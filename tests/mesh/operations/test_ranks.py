"""A mesh whose decode worker has two ranks: pages from a worker of one, the cores of each rank, and
the end of one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from weft.testing.meshes.local_mesh import READY_TIMEOUT_S, WEFT, wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import MODEL, Greedy, TinyMesh
from weft.v1 import worker_pb2

pytestmark = pytest.mark.needs("go", "nixl")
NUM_NEW = 8
ALLOWED = sorted(os.sched_getaffinity(0))
CORES = (ALLOWED[0], ALLOWED[-1])
"""Of rank 0 and rank 1."""


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.full)])
def mesh(tmp_path: Path, rest_binary: Path, request: pytest.FixtureRequest) -> Iterator[TinyMesh]:
    """With 2 the ranks divide the pages of the model's only KV head."""
    divides = f"--dcp {request.param}"
    bound = f"--numa-bind-cpus {CORES[0]}|{CORES[1]}"
    more = f"{PATIENT} {bound} {divides}"
    flags = ("--tp", "2", "--prefill-args", "--tp 1", "--decode-args", more)
    shape = {"num_key_value_heads": 1} if request.param > 1 else None
    mesh = TinyMesh(tmp_path, "--local-prefill-max-tokens", "0", *flags, shape=shape)
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


def check_places(mesh: TinyMesh, engine: psutil.Process, rank: psutil.Process) -> None:
    """All threads of both processes are where they were bound, and the worker says so."""
    for process, core in zip((engine, rank), CORES, strict=True):
        threads = [thread.id for thread in process.threads()]
        assert {tuple(os.sched_getaffinity(thread)) for thread in threads} == {(core,)}
    told, shown = (
        subprocess.run(
            [*WEFT, "status", flag, "--address", mesh.grpc_address],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for flag in ("--json", "--hosts")
    )
    workers = {one["worker_id"]: one for one in json.loads(told)["workers"]}
    ranks = workers["decode-0"]["ranks"]
    assert [(one["device"], one["cores"]) for one in ranks] == [
        ("cpu", str(core)) for core in CORES
    ]
    # What nobody asked for is not bound.
    assert [(one["cores"], one["memory_node"]) for one in workers["prefill-0"]["ranks"]] == [
        ("", None)
    ]
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert shown.startswith(f"host {socket.gethostname()}\n")
    assert str(CORES[1]) in rows["decode-0/1"].split()
    assert "not bound" in rows["prefill-0"]
    assert "nearest first: " in shown


def test_two_ranks_take_pages_from_one_and_end_together(mesh: TinyMesh) -> None:
    greedy = Greedy(mesh.model_dir)
    check_fill(mesh, greedy)
    with mesh.worker("decode-0") as stub:
        info = stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=60)
    assert any("2 ranks" in notice for notice in info.notices), info.notices
    before = mesh.service("decode-0")
    engine = psutil.Process(info.engine_pid)
    (rank,) = engine.children()
    check_places(mesh, engine, rank)
    os.kill(rank.pid, signal.SIGKILL)

    def is_back() -> bool:
        ready = mesh.ready_file("decode-0")
        return ready is not None and ready["epoch"] != before["epoch"]

    wait_until(is_back, READY_TIMEOUT_S, lambda: mesh.text)
    assert "rank 1" in mesh.log("decode-0")
    assert "signal 9" in mesh.log("decode-0")
    mesh.wait_ready()
    check_fill(mesh, greedy)
