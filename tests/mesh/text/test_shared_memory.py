"""A mesh without NIXL on one host: pages travel in memory that both workers map."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from weft.contract.faults import FaultSpec
from weft.testing.meshes.local_mesh import wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import MODEL, Greedy, TinyMesh
from weft.v1 import common_pb2, worker_pb2

pytestmark = [pytest.mark.needs("go"), pytest.mark.full]
NUM_PROMPT, NUM_NEW = 300, 8


@pytest.fixture
def mesh(tmp_path: Path, rest_binary: Path) -> Iterator[TinyMesh]:
    flags = ["--transport", "shared", "--local-prefill-max-tokens", "0", "--enable-faults"]
    flags += ["--kvstore", "1", "--max-restart-delay-s", "0.5", "--decode-args", PATIENT]
    mesh = TinyMesh(tmp_path, *flags)
    mesh.wait_ready()
    mesh.wait_healthy()
    yield mesh
    assert mesh.stop() == 0, mesh.text


def test_pages_travel_in_shared_memory_and_survive_a_killed_writer(mesh: TinyMesh) -> None:
    greedy = Greedy(mesh.model_dir)

    def ask(prompt: list[int]) -> list[dict[str, Any]]:
        """Checks the answer to a prompt; its fills."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0}
        body |= {"ignore_eos": True, "weft_timeline": True}
        url = f"{mesh.url}/v1/completions"
        answer = httpx.post(url, json=body, timeout=60, trust_env=False).json()
        assert answer["choices"][0]["text"] == greedy.text(greedy.ids(prompt, NUM_NEW))
        fills: list[dict[str, Any]] = answer["weft"]["timeline"]["fills"]
        return fills

    shared = "TRANSPORT_KIND_SHARED"
    prompt = greedy.prompt(NUM_PROMPT, NUM_NEW)
    (fill,) = ask(prompt)
    assert (fill["source"], fill["transport"]) == ("FILL_SOURCE_PREFILL", shared)
    with mesh.worker("prefill-0") as stub:

        def told() -> worker_pb2.GetInfoResponse:
            return stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=60)

        assert common_pb2.TRANSPORT_KIND_SHARED in told().transports
        wanted = "to decode-0: memory shared on this host"
        wait_until(lambda: wanted in told().transport_detail, 30)
    # The store has the pages by messages, and writes them into the same memory.
    wait_until(lambda: mesh.counters("prefill-0").get("store_stored_pages", 0) > 0, 30)
    for name in ("prefill-0", "decode-0"):
        mesh.flush(name)
    fills = ask(prompt)
    assert {fill["source"] for fill in fills} <= {"FILL_SOURCE_KVSTORE", "FILL_SOURCE_PREFILL"}
    assert {fill["transport"] for fill in fills} == {shared}
    # A writer that is killed in the middle.
    before = mesh.service("prefill-0")["pid"]
    mesh.arm("prefill-0", FaultSpec(point="ship.post", kind="kill"))
    ask(greedy.prompt(NUM_PROMPT, NUM_NEW))
    wait_until(lambda: (mesh.ready_file("prefill-0") or {"pid": before})["pid"] != before, 60)
    mesh.wait_healthy()
    mesh.wait_empty()
    # Its successor has the memory anew.
    (fill,) = ask(greedy.prompt(NUM_PROMPT, NUM_NEW))
    assert fill["transport"] == shared
    mesh.wait_idle()
