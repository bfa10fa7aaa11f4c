"""Counts of experts over REST, and experts that get other ranks in a mesh that serves."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from weft.testing.meshes.local_mesh import WEFT
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import MODEL, VOCAB, TinyMesh

pytestmark = [pytest.mark.needs("go"), pytest.mark.full]
RANKS = "--tp 2 --ep 2 --balance-experts order --redundant-experts 1"
EXPERTS, TOP_K, PROMPT, NEW = 8, 2, 40, 12


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[TinyMesh]:
    mesh = TinyMesh(
        tmp_path_factory.mktemp("experts"),
        *("--prefill", "0", "--decode-args", f"{PATIENT} {RANKS}"),
        kind="qwen3_moe",
        num_heads=8,
        shape={
            **{"num_hidden_layers": 2, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K},
            **{"num_key_value_heads": 4, "moe_intermediate_size": 43},
        },
    )
    mesh.wait_ready()
    mesh.wait_healthy()
    yield mesh
    assert mesh.stop() == 0, mesh.text


def ask(mesh: TinyMesh, method: str, path: str, token: str | None = None) -> httpx.Response:
    token = token or (mesh.state / "admin-token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    url = f"{mesh.url}/{path}"
    return httpx.request(method, url, headers=headers, timeout=60, trust_env=False)


def complete(mesh: TinyMesh, prompt: list[int]) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": NEW, "temperature": 0}
    answer = httpx.post(
        f"{mesh.url}/v1/completions",
        json=body | {"ignore_eos": True},
        timeout=60,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_operators_count_and_balance(mesh: TinyMesh) -> None:
    prompts = [[random.randrange(3, VOCAB) for _ in range(PROMPT)] for _ in range(6)]
    record = "{}_expert_distribution_record"
    for path in (record.format("start"), record.format("dump"), "balance_experts"):
        assert ask(mesh, "POST", path, token="wrong").status_code == 401
    refused = ask(mesh, "POST", "balance_experts")
    assert (refused.status_code, "start counting" in refused.text) == (409, True), refused.text
    started = ask(mesh, "POST", record.format("start")).json()["workers"]["decode-0"]
    assert (started["is_counting"], started["num_steps"], started["num_ranks"]) == (True, 0, 2)
    texts = [complete(mesh, prompt) for prompt in prompts]
    stopped = ask(mesh, "GET", record.format("stop")).json()["workers"]["decode-0"]
    assert (stopped["is_counting"], stopped["layers"]) == (False, [])
    (first, _) = ask(mesh, "GET", record.format("dump")).json()["workers"]["decode-0"]["layers"]
    # Every token but the last drawn one was a row, unless its page was found cached.
    assert sum(first["rows"]) == len(prompts) * (PROMPT + NEW - 1) * TOP_K
    assert sorted(set(first["places"])) == [-1, *range(EXPERTS)]
    assert all(0 < steps <= stopped["num_steps"] for steps in first["steps"])
    done = ask(mesh, "POST", "balance_experts").json()["workers"]["decode-0"]["balance"]
    assert (done["num_failed"], done["problem"]) == (0, "")
    assert [complete(mesh, prompt) for prompt in prompts] == texts
    shown = subprocess.run(
        [*WEFT, "status", "--address", mesh.grpc_address],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    placements = f"experts: {done['num_placements']} placements, {done['num_moved']} copies"
    assert placements in re.sub(r"\s+", " ", shown.stdout)
