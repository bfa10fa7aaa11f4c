"""Two models behind one gateway, each with its own prefill and decode worker and KV store."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from weft.common.settings import list_text
from weft.testing.meshes.local_mesh import WEFT, LocalMesh, wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import Greedy
from weft.testing.models.tiny_models import make_tiny
from weft.v1 import gateway_pb2, gateway_pb2_grpc

pytestmark = pytest.mark.needs("go")

SHAPES: dict[str, dict[str, Any]] = {
    "first": {"kind": "llama", "vocab_size": 517, "max_position_embeddings": 512},
    "second": {"kind": "qwen3", "vocab_size": 801, "max_position_embeddings": 1024},
}
ROLES = ("kvstore", "prefill", "decode")
NUM_NEW = 12


class TwoModels(LocalMesh):
    """`weft up` with two random models, and what transformers makes of each."""

    def __init__(self, folder: Path) -> None:
        flags: list[str] = []
        self.greedy: dict[str, Greedy] = {}
        for number, (name, shape) in enumerate(SHAPES.items()):
            path = make_tiny(path=folder / f"dir,{name}", seed=number, tokenizer=True, **shape)
            flags += ["--model", list_text([str(path)]), "--model-name", name]
            self.greedy[name] = Greedy(path)
        flags += ["--kvstore", "1", "--dtype", "float32", "--local-prefill-max-tokens", "0"]
        flags += ["--decode-args", PATIENT]
        super().__init__(folder, *flags)

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, trust_env=False)

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", timeout=60, trust_env=False).json()

    def complete(self, model: str, prompt: list[int], num_new: int = NUM_NEW) -> str:
        answer = self.post(
            model=model, prompt=prompt, max_tokens=num_new, temperature=0, ignore_eos=True
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return str(answer.json()["choices"][0]["text"])

    def expected(self, model: str, prompt: list[int], num_new: int = NUM_NEW) -> str:
        greedy = self.greedy[model]
        return greedy.text(greedy.ids(prompt, num_new))


def prompt_of(model: str, length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{model} {length} {seed}")
    return [rng.randrange(3, SHAPES[model]["vocab_size"]) for _ in range(length)]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[TwoModels]:
    mesh = TwoModels(tmp_path_factory.mktemp("two"))
    with mesh.serving():
        yield mesh


def test_each_model_answers_as_transformers_does(mesh: TwoModels) -> None:
    for length in (3, 40, 130, 300):
        for model in SHAPES:
            prompt = prompt_of(model, length)
            assert mesh.complete(model, prompt) == mesh.expected(model, prompt), (model, length)
    # Each was prefilled and stored by its own workers, and by no others.
    for index in range(2):
        # The last report may be older than the answers.
        owner, filler = mesh.load_now(f"decode-{index}"), mesh.load_now(f"prefill-{index}")
        assert owner.counters["accepted_pages"] >= (40 + 130 + 300) // 16 - 3
        assert filler.counters["shipped_pages"] > 0
        assert not owner.counters["fills_declined"]


def test_models_are_listed_and_others_unknown(mesh: TwoModels) -> None:
    listed = {model["id"]: model["max_model_len"] for model in mesh.get("/v1/models")["data"]}
    assert listed == {"first": 512, "second": 1024}
    assert mesh.get("/v1/models/second")["id"] == "second"
    for answer in (
        mesh.post(model="third", prompt="x"),
        mesh.post("/v1/chat/completions", model="third", messages=[]),
        mesh.post("/tokenize", model="third", prompt="x"),
    ):
        assert answer.status_code in (400, 404)
    error = mesh.post(model="third", prompt="x").json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "`first`, `second`" in error["message"]
    unnamed = mesh.post(prompt="x")
    assert unnamed.status_code == 400
    assert unnamed.json()["error"]["param"] == "model"


def test_each_model_has_its_tokenizer_and_context(mesh: TwoModels) -> None:
    for model, shape in SHAPES.items():
        ids = mesh.post("/tokenize", model=model, prompt="Hello", add_special_tokens=False).json()
        assert ids["max_model_len"] == shape["max_position_embeddings"]
        back = mesh.post("/detokenize", model=model, tokens=ids["tokens"]).json()
        assert back == {"prompt": "Hello"}
    # Beyond the first one's vocabulary and context, and within the second's.
    assert mesh.post("/detokenize", model="first", tokens=[600]).status_code == 400
    assert mesh.post("/detokenize", model="second", tokens=[600]).status_code == 200
    prompt = prompt_of("first", 600)
    assert mesh.post(model="first", prompt=prompt).status_code == 400
    assert mesh.post(model="second", prompt=prompt, max_tokens=1).status_code == 200


def test_status_tells_which_worker_serves_what(mesh: TwoModels) -> None:
    with grpc.insecure_channel(mesh.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        fleet = stub.GetFleet(gateway_pb2.GetFleetRequest())
        assert {(worker.worker_id, worker.model) for worker in fleet.workers} == {
            (f"{role}-{index}", model)
            for index, model in enumerate(SHAPES)
            for role in ("prefill", "decode")
        }
        models = stub.ListModels(gateway_pb2.ListModelsRequest()).models
        assert [(model.name, model.ready) for model in models] == [
            ("first", True),
            ("second", True),
        ]
    shown = subprocess.run(
        [*WEFT, "status", "--address", mesh.grpc_address],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "200"},
    ).stdout
    row = next(line for line in shown.splitlines() if line.startswith("decode-1"))
    assert row.split()[-1] == "second"
    assert "gateway: 0 prompts in work, 0 queued, 0 held" in shown
    assert mesh.get("/readyz") == {
        "status": "ready",
        "models": {"first": "ready", "second": "ready"},
    }


def test_a_killed_worker_of_one_model_does_not_disturb_the_other(mesh: TwoModels) -> None:
    prompt = prompt_of("first", 90, seed=1)
    expected = mesh.expected("first", prompt)
    with mesh.worker("decode-1"):
        ready = mesh.service("decode-1")
    engines = [process for process in mesh.family() if process.pid == ready["pid"]]
    assert engines
    for process in engines:
        process.kill()

    def says_so() -> bool:
        told = mesh.get("/readyz")
        return bool(told.get("models", {}).get("second") == "no healthy decode worker")

    wait_until(says_so, 30)
    with grpc.insecure_channel(mesh.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        second = stub.GetModel(gateway_pb2.GetModelRequest(model="second")).model
        first = stub.GetModel(gateway_pb2.GetModelRequest(model="first")).model
    assert first.ready
    # It may have come back meanwhile.
    assert second.ready or second.problem == "no healthy decode worker"
    for _ in range(5):
        assert mesh.complete("first", prompt) == expected

    def is_back() -> bool:
        return mesh.get("/readyz").get("models") == {"first": "ready", "second": "ready"}

    wait_until(is_back, 60)
    prompt = prompt_of("second", 90, seed=1)
    assert mesh.complete("second", prompt) == mesh.expected("second", prompt)
