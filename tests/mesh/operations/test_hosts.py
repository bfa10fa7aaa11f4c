"""Meshes of workers with hosts. A prefill worker's hosts each write their share of pages, and the
second ends while prompts are filled. A decode worker's pages are in a KV store, and come back.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
    """One worker of `role` has several hosts.

    Args:
        others: Arguments of the other role's workers; None: there are none.
        settings: Of the worker with hosts.
    """

    def __init__(
        self,
        folder: Path,
        role: str,
        hosts: int,
        *flags: str,
        others: tuple[str, str] | None = None,
        settings: str = "",
    ) -> None:
        (port,) = free_ports("127.0.0.1", 1)
        count = str(hosts)
        self._role, self._numbers = role, range(1, hosts)
        self._joined = ["--pp", count, "--hosts", count, "--rendezvous", f"127.0.0.1:{port}"]
        own = " ".join([*self._joined, "--host-rank", "0", "--rank-timeout-s", "30", settings])
        self._others: list[subprocess.Popen[bytes]] = []
        more = (f"--{role}-args={own}", *flags)
        if others is not None:
            more += (f"--{others[0]}-args", others[1])
        super().__init__(folder, *more, shape={"num_hidden_layers": hosts})

    def start_others(self) -> None:
        command = [*WEFT, "serve", self._role, "--model-dir", str(self.model_dir), *self._joined]
        self._others = [
            subprocess.Popen([*command, "--host-rank", str(number)]) for number in self._numbers
        ]

    def kill_others(self) -> None:
        for other in self._others:
            other.kill()
            other.wait()

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0}
        body |= {"ignore_eos": True, "weft_timeline": True}
        with httpx.Client(base_url=f"{self.url}/v1", timeout=60, trust_env=False) as client:
            answer: dict[str, Any] = client.post("/completions", json=body).json()
        return answer


@contextmanager
def running(mesh: HostsMesh) -> Iterator[HostsMesh]:
    try:
        mesh.start_others()
        mesh.wait_ready()
        yield mesh
    finally:
        mesh.kill_others()
        mesh.stop()


@pytest.fixture
def mesh(tmp_path: Path, rest_binary: Path) -> Iterator[HostsMesh]:
    flags, others = ("--local-prefill-max-tokens", "0"), ("decode", PATIENT)
    with running(HostsMesh(tmp_path, "prefill", 2, *flags, others=others)) as mesh:
        yield mesh


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
        mesh.kill_others()
        for prompt, one in zip(prompts, asked, strict=True):
            text = greedy.text(greedy.ids(prompt, NUM_NEW))
            assert one.result()["choices"][0]["text"] == text
    mesh.start_others()

    def is_back() -> bool:
        ready = mesh.ready_file("prefill-0")
        return ready is not None and ready["epoch"] != before["epoch"]

    wait_until(is_back, READY_TIMEOUT_S, lambda: mesh.text)
    assert "rank 1" in mesh.log("prefill-0")
    mesh.wait_ready()
    check_fill(mesh, greedy)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_store_has_the_pages_of_a_decode_worker_of_three_hosts(
    tp: int, tmp_path: Path, rest_binary: Path
) -> None:
    flags = ("--prefill", "0", "--kvstore", "1", "--local-prefill-max-tokens", "1000000")
    settings = f"--tp {tp} --load-back-threshold 0 --kv-memory-bytes 16777216 {PATIENT}"
    with running(HostsMesh(tmp_path, "decode", 3, *flags, settings=settings)) as mesh:
        mesh.wait_healthy()
        greedy = Greedy(mesh.model_dir)
        prompt = greedy.prompt(200, NUM_NEW)
        text = greedy.text(greedy.ids(prompt, NUM_NEW))
        assert mesh.ask(prompt)["choices"][0]["text"] == text

        def num_stored() -> int:
            return int(mesh.load_now("decode-0").counters["store_stored_pages"])

        wait_until(lambda: num_stored() >= len(prompt) // 16, 60)
        fills: list[Any] = []

        def is_of_store() -> bool:
            """The store is asked for 80 ms at most, which a busy machine may miss."""
            mesh.flush("decode-0")
            answer = mesh.ask(prompt)
            assert answer["choices"][0]["text"] == text
            fills[:] = answer["weft"]["timeline"].get("fills", ())
            return bool(fills)

        wait_until(is_of_store, 60)
        (fill,) = fills
        assert fill["source"] == "FILL_SOURCE_KVSTORE"
        assert fill["end_token"] == len(prompt) // 16 * 16
