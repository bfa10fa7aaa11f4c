"""Host memory, disk and replicas of the KV store in a real mesh, and what kills them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from weft.testing.meshes.local_mesh import WEFT, wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import MODEL, Greedy, TinyMesh

pytestmark = pytest.mark.needs("go")
NUM_PROMPT, NUM_NEW, PAGE = 600, 8, 16
WORKERS = ("prefill-0", "decode-0")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[TinyMesh]:
    folder = tmp_path_factory.mktemp("tiers")
    mesh = TinyMesh(
        folder,
        *("--kvstore", "2", "--host-cache-bytes", str(16 << 20)),
        *("--disk-cache-dir", str(folder / "disk"), "--disk-cache-bytes", str(64 << 20)),
        *("--local-prefill-max-tokens", "0"),
        # These are pages of a few kilobytes: computing them is as fast as anything.
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


def ask(mesh: TinyMesh, prompt: list[int]) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": NUM_NEW,
        "temperature": 0,
        "ignore_eos": True,
        "weft_timeline": True,
    }
    answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check(greedy: Greedy, prompt: list[int], answer: dict[str, Any]) -> None:
    assert answer["choices"][0]["text"] == greedy.text(greedy.ids(prompt, NUM_NEW))


def sources(answer: dict[str, Any]) -> list[str]:
    return [fill["source"] for fill in answer["weft"]["timeline"]["fills"]]


def has_on_disk(mesh: TinyMesh, name: str, num_pages: int) -> bool:
    (disk,) = (found for found in mesh.load(name).tiers if found.name == "disk")
    return bool(disk.cached_pages >= num_pages)


def kill(mesh: TinyMesh, name: str) -> None:
    """SIGKILL, and the return of the service."""
    pid = mesh.service(name)["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid) or _is_zombie(pid), 10)


def is_back(mesh: TinyMesh, name: str, pid: int) -> bool:
    return bool((mesh.ready_file(name) or {}).get("pid", pid) != pid)


def test_a_killed_decode_worker_finds_its_pages_on_disk(mesh: TinyMesh, greedy: Greedy) -> None:
    prompt = greedy.prompt(NUM_PROMPT, NUM_NEW)
    num_pages = (NUM_PROMPT - 1) // PAGE
    check(greedy, prompt, ask(mesh, prompt))
    for name in WORKERS:
        wait_until(partial(has_on_disk, mesh, name, num_pages), 30)
    pid = mesh.service("decode-0")["pid"]
    kill(mesh, "decode-0")
    wait_until(lambda: is_back(mesh, "decode-0", pid), 90)
    mesh.wait_ready()
    mesh.wait_healthy()
    again = ask(mesh, prompt)
    check(greedy, prompt, again)
    assert set(sources(again)) <= {"FILL_SOURCE_DISK", "FILL_SOURCE_HOST"}
    loaded = sum(int(fill["accepted_tokens"]) for fill in fills(again))
    assert loaded == num_pages * PAGE


def fills(answer: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer["weft"]["timeline"]["fills"]
    return found


def test_status_tells_of_every_tier(mesh: TinyMesh) -> None:
    done = subprocess.run(
        [*WEFT, "status", "--address", mesh.grpc_address, "--json"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    found = {
        worker["worker_id"]: [tier["name"] for tier in worker["tiers"]]
        for worker in json.loads(done.stdout)["workers"]
    }
    for name in WORKERS:
        assert found[name] == ["device", "host", "disk", "store"]
    assert {"kvstore-0", "kvstore-1"} <= found.keys()
    table = subprocess.run(
        [*WEFT, "status", "--address", mesh.grpc_address],
        check=True,
        capture_output=True,
        timeout=60,
        text=True,
    ).stdout
    assert "hit rate" in table
    assert any(line.split()[:2] == ["decode-0", "disk"] for line in table.splitlines())


def forget(mesh: TinyMesh) -> None:
    for name in WORKERS:
        mesh.flush(name)


def stored(mesh: TinyMesh) -> int:
    return sum(mesh.load_now(name).counters["store_stored_pages"] for name in WORKERS)


def test_a_killed_replica_is_a_miss_and_never_an_error(mesh: TinyMesh, greedy: Greedy) -> None:
    """Both replicas have pages of these prompts; with one of them gone the texts are the same."""
    prompts = [greedy.prompt(NUM_PROMPT, NUM_NEW) for _ in range(5)]
    mesh.wait_empty()
    before = stored(mesh)
    for prompt in prompts:
        check(greedy, prompt, ask(mesh, prompt))
    wait_until(lambda: stored(mesh) - before >= 5 * ((NUM_PROMPT - 1) // PAGE), 30)
    found: set[str] = set()

    def are_of_both() -> bool:
        """A replica is asked for 80 ms at most, which a busy machine may miss."""
        for prompt in prompts:
            forget(mesh)
            answer = ask(mesh, prompt)
            check(greedy, prompt, answer)
            found.update(f["worker_id"] for f in fills(answer) if "KVSTORE" in f["source"])
        return found == {"kvstore-0", "kvstore-1"}

    wait_until(are_of_both, 60, lambda: str(found))
    pid = mesh.service("kvstore-0")["pid"]
    kill(mesh, "kvstore-0")
    for prompt in prompts:
        forget(mesh)
        check(greedy, prompt, ask(mesh, prompt))
    wait_until(lambda: is_back(mesh, "kvstore-0", pid), 90)
    found.clear()
    wait_until(are_of_both, 60, lambda: str(found))
    mesh.wait_idle()


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
