"""Routes of experts over REST, from a mesh that ships pages."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import VOCAB, TinyMesh
from weft.testing.models.choices import asks_surely
from weft.testing.models.reference_routes import reference_routes

pytestmark = [pytest.mark.needs("go"), pytest.mark.full]
NUM_TOKENS = 20
KEEPS = "--enable-return-routed-experts"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[TinyMesh]:
    mesh = TinyMesh(
        tmp_path_factory.mktemp("routes"),
        *("--local-prefill-max-tokens", "0", "--prefill-args", KEEPS),
        *("--decode-args", f"{PATIENT} {KEEPS}", "--gateway-args", "--rl"),
        kind="qwen3_moe",
        shape={"num_hidden_layers": 3, "mlp_only_layers": [1]},
    )
    mesh.wait_ready()
    mesh.wait_healthy()
    yield mesh
    assert mesh.stop() == 0, mesh.text


def post(mesh: TinyMesh, path: str, body: object) -> httpx.Response:
    token = (mesh.state / "admin-token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    url = f"{mesh.url}/{path}"
    return httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)


def test_both_dialects_return_what_transformers_routers_choose(mesh: TinyMesh) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(
        mesh.model_dir, dtype=torch.float32, experts_implementation="eager"
    )
    reference = loaded.eval()
    prompt = [random.randrange(3, VOCAB) for _ in range(70)]
    limits = {"temperature": 0.7, "ignore_eos": True}
    for turn in range(2):  # The second finds the prompt's pages cached.
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {**limits, "n": 2, "max_new_tokens": NUM_TOKENS},
            "return_routed_experts": True,
            "routed_experts_start_len": 5 * turn,
        }
        answer = post(mesh, "generate", body)
        assert answer.status_code == 200, answer.text
        for sample in answer.json():
            numbers = base64.b64decode(sample["meta_info"]["routed_experts"])
            check(reference, prompt + sample["output_ids"], np.frombuffer(numbers, "<i4"), 5 * turn)
        body = {
            "token_ids": prompt,
            "sampling_params": {**limits, "max_tokens": NUM_TOKENS},
            "routed_experts_prompt_start": 3 * turn,
        }
        (choice,) = post(mesh, "inference/v1/generate", body).json()["choices"]
        file = io.BytesIO(base64.b64decode(choice["routed_experts"]))
        found = np.load(file, allow_pickle=False)
        assert found.dtype == np.uint8
        check(reference, prompt + choice["token_ids"], found, 3 * turn)
        body["stream"] = True
        events = streamed(post(mesh, "inference/v1/generate", body))
        choices = [choice for event in events for choice in event["choices"]]
        *others, last = choices
        assert len(choices) > 1
        assert not any("routed_experts" in choice for choice in others)
        found = np.load(io.BytesIO(base64.b64decode(last["routed_experts"])), allow_pickle=False)
        tokens = [token for choice in choices for token in choice["token_ids"]]
        check(reference, prompt + tokens, found, 3 * turn)
    body = {
        "input_ids": prompt,
        "sampling_params": {**limits, "n": 2, "max_new_tokens": NUM_TOKENS},
        "return_routed_experts": True,
        "stream": True,
    }
    ended = [
        event
        for event in streamed(post(mesh, "generate", body))
        if "routed_experts" in event["meta_info"]
    ]
    assert sorted(event["index"] for event in ended) == [0, 1]
    for event in ended:
        assert event["meta_info"]["finish_reason"] is not None
        numbers = base64.b64decode(event["meta_info"]["routed_experts"])
        check(reference, prompt + event["output_ids"], np.frombuffer(numbers, "<i4"), 0)


def streamed(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def check(reference: Any, tokens: list[int], flat: np.ndarray, begin: int) -> None:
    layers, top_k = reference.config.num_hidden_layers, reference.config.num_experts_per_tok
    found = flat.reshape(-1, layers, top_k)
    assert len(found) == len(tokens) - 1 - begin
    right = reference_routes(reference, tokens[:-1])
    assert sorted(right) == [0, 2]
    assert not found[:, 1].any()
    if asks_surely(reference, tokens[:-1]):
        for layer, chosen in right.items():
            assert (found[:, layer] == chosen[begin:]).all()
