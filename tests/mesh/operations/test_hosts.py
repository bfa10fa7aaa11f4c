"""A mesh whose prefill worker has two hosts, each of which writes its share of pages, and the end
of the second while prompts are filled.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from weft.cli.up.ports import free_ports
from weft.testing.meshes.local_mesh import READY_TIMEOUT_S, WEFT, wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import MODEL, Greedy, TinyMesh

pytestmark = [pytest.mark.needs("go"), pytest.mark.needs("nixl"), pytest.mark.full]
NUM_NEW, NUM_PROMPTS = 8, 12


class HostsMesh(TinyMesh):
    def __init__(self, folder: Path) -> None:
        (port,) = free_ports("127.0.0.1", 1)
        self._joined = ["--pp", "2", "--hosts", "2", "--rendezvous", f"127.0.0.1:{port}"]
        of_prefill = " ".join([*self._joined, "--host-rank", "0", "--rank-timeout-s", "30"])
        flags = ("--local-prefill-max-tokens", "0", "--prefill-args", of_prefill)
        self._other: subprocess.Popen[bytes] | None = None
        super().__init__(folder, *flags, "--decode-args", PATIENT, shape={"num_hidden_layers": 2})

    def start_other(self) -> None:
        command = [*WEFT, "serve", "prefill", "--model-dir", str(self.model_dir)]
        self._other = subprocess.Popen([*command, *self._joined, "--host-rank", "1"])

    def kill_other(self) -> None:
        if self._other is not None:
            self._other.kill()
            self._other.wait()

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0}
        body |= {"ignore_eos": True, "weft_timeline": True}
        with httpx.Client(base_url=f"{self.url}/v1", timeout=60, trust_env=False) as client:
            answer: dict[str, Any] = client.post("/completions", json=body).json()
        return answer


@pytest.fixture
def mesh(tmp_path: Path, rest_binary: Path) -> Iterator[HostsMesh]:
    mesh = HostsMesh(tmp_path)
    try:
        mesh.start_other()
        mesh.wait_ready()
        yield mesh
    finally:
        mesh.kill_other()
        mesh.stop()


def check_fill(mesh: HostsMesh, greedy: Greedy) -> None:
    mesh.wait_healthy()
    prompt = greedy.prompt(100, NUM_NEW)
    answer = mesh.ask(prompt)
    assert answer["choices"][0]["text"] == greedy.text(greedy.ids(prompt, NUM_NEW))
    (fill,) = answer["weft"]["timeline"]["fills"]
    assert (fill["transport"], fill["end_token"]) == ("TRANSPORT_KIND_NIXL", 96)


def test_a_prefill_worker_of_two_hosts_fills_and_ends_with_its_second_host(mesh: HostsMesh) -> None:
    greedy = Greedy(mesh.model_dir)
    check_fill(mesh, greedy)
    before = mesh.service("prefill-0")
    prompts = [greedy.prompt(100, NUM_NEW) for _ in range(NUM_PROMPTS)]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(mesh.ask, prompt) for prompt in prompts]
        asked[1].result()
        mesh.kill_other()
        for prompt, one in zip(prompts, asked, strict=True):
            text = greedy.text(greedy.ids(prompt, NUM_NEW))
            assert one.result()["choices"][0]["text"] == text
    mesh.start_other()

    def is_back() -> bool:
        ready = mesh.ready_file("prefill-0")
        return ready is not None and ready["epoch"] != before["epoch"]

    wait_until(is_back, READY_TIMEOUT_S, lambda: mesh.text)
    assert "rank 1" in mesh.log("prefill-0")
    mesh.wait_ready()
    check_fill(mesh, greedy)
