"""A model with recurrent layers behind the whole mesh; prompts are computed by a prefill worker."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from weft.chaos.tiny import write_tokenizer
from weft.testing.meshes.local_mesh import WEFT, LocalMesh, wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import Greedy
from weft.testing.models.choices import OF_STATES
from weft.testing.models.families import make_family
from weft.v1 import admin_pb2

pytestmark = pytest.mark.needs("go")

VOCAB, PAGE, NUM_NEW = 517, 16, 24


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid") / "hybrid"
    seed = random.randrange(2**31)
    make_family("qwen3_5", folder, seed, vocab_size=VOCAB, max_position_embeddings=1024)
    write_tokenizer(folder, VOCAB, max_context_tokens=1024)
    return folder


@pytest.fixture(scope="module")
def mesh(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory, rest_binary: Path
) -> Iterator[LocalMesh]:
    flags = ("--model", str(model_dir), "--dtype", "float32")
    args = "--load-back-threshold 0"
    flags += ("--local-prefill-max-tokens", "0", "--kvstore", "1", "--prefill-args", args)
    flags += ("--decode-args", f"{PATIENT} --drafter ngram {args}")
    mesh = LocalMesh(tmp_path_factory.mktemp("mesh"), *flags)
    with mesh.serving():
        yield mesh


def complete(mesh: LocalMesh, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": "hybrid", "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0}
    answer = httpx.post(
        f"{mesh.url}/v1/completions",
        json={**body, "ignore_eos": True, **fields},
        timeout=60,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_states_come_from_the_store(mesh: LocalMesh, model_dir: Path) -> None:
    """No worker has them any more; the answers stay transformers'."""
    workers = [*mesh.names("prefill"), *mesh.names("decode")]
    greedy = Greedy(model_dir, OF_STATES)
    prompt = greedy.prompt(200, NUM_NEW)
    text = greedy.text(greedy.ids(prompt, NUM_NEW))
    assert complete(mesh, prompt)["choices"][0]["text"] == text
    found: list[int] = []

    def is_of_store() -> bool:
        """The store is asked for 80 ms at most, which a busy machine may miss."""
        for name in workers:
            with mesh.operators(name) as (stub, metadata):
                stub.FlushCache(admin_pb2.FlushCacheRequest(), metadata=metadata, timeout=60)
        answer = complete(mesh, prompt)
        assert answer["choices"][0]["text"] == text
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        return bool(found[-1])

    wait_until(is_of_store, 60)
    assert found[-1] == 199 // PAGE * PAGE
    assert mesh.dump("decode-0")["engine"]["counters"]["store_hit_pages"]


def test_answers_are_transformers_and_prefixes_are_reused(mesh: LocalMesh, model_dir: Path) -> None:
    greedy = Greedy(model_dir, OF_STATES)
    prompt = greedy.prompt(200, NUM_NEW)
    others = [greedy.prompt(9, NUM_NEW, begin=prompt[:150]) for _ in range(2)]
    cached = []
    for each in (prompt, prompt, *others):
        answer = complete(mesh, each)
        ids = greedy.ids(each, NUM_NEW)
        assert answer["choices"][0]["text"] == greedy.text(ids)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    # The second branch continues where the first one left the prompt.
    assert cached == [0, 199 // PAGE * PAGE, 0, 150 // PAGE * PAGE]
    assert mesh.dump("decode-0")["engine"]["counters"]["fills_done"]
    shown = httpx.get(
        f"http://{mesh.service('decode-0')['metrics_address']}/metrics", trust_env=False
    ).text
    assert 'weft_state_blocks{state="cached"}' in shown
    command = [*WEFT, "status", "--address", mesh.grpc_address]
    text, found = (
        subprocess.run([*command, *more], capture_output=True, text=True, check=True).stdout
        for more in ((), ("--json",))
    )
    assert "requests can continue in" in text
    workers = {worker["worker_id"]: worker for worker in json.loads(found)["workers"]}
    states = workers["decode-0"]["states"]
    assert states["checkpoint_tokens"] == 1024
    assert 0 < states["cached"] < states["total"]
    assert 0 < states["continuable_pages"] <= states["prefix_pages"]
    names = [worker["kv_layout"] for worker in mesh.dump("gateway")["workers"]]
    assert all("states=gated-delta" in name for name in names), names
