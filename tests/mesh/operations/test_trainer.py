"""Trainers' calls on a mesh with prefill workers: pauses, new weights, refusals, two dialects."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.meshes.local_mesh import wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import MODEL, SHAPE, TinyMesh
from weft.testing.models.lenders import lent_by_host
from weft.testing.models.senders import Sender, free_port, packed, tensors_of
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("go")
LONG_S = 120
SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "train_toy.py"
PROMPTS = [list(range(3, 63)), list(range(20, 90))]
NUM_TOKENS = 24


class TrainedMesh(TinyMesh):
    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder,
            *("--local-prefill-max-tokens", "0", "--decode-args", PATIENT),
            *("--gateway-args", "--rl"),
        )

    def call(
        self, method: str, path: str, body: object = None, *, has_token: bool = True
    ) -> httpx.Response:
        token = (self.state / "admin-token").read_text().strip()
        return httpx.request(
            method,
            f"{self.url}/{path}",
            json=body,
            headers={"Authorization": f"Bearer {token}"} if has_token else {},
            timeout=LONG_S,
            trust_env=False,
        )

    def post(self, path: str, body: object = None) -> dict[str, Any]:
        answer = self.call("POST", path, body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def complete(self, prompt: list[int]) -> httpx.Response:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        }
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=LONG_S, trust_env=False)

    def texts(self) -> list[list[int]]:
        answers = [self.complete(prompt) for prompt in PROMPTS]
        assert [one.status_code for one in answers] == [200] * len(answers), answers[0].text
        return [one.json()["choices"][0]["token_ids"] for one in answers]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[TrainedMesh]:
    mesh = TrainedMesh(tmp_path_factory.mktemp("trainer"))
    mesh.wait_ready()
    mesh.wait_healthy()
    yield mesh
    assert mesh.stop() == 0, mesh.text


def test_a_mesh_takes_new_weights_as_one_server(mesh: TrainedMesh, tmp_path: Path) -> None:
    sizes = {"max_position_embeddings": 2048, "num_attention_heads": 6, **SHAPE}
    other = make_tiny("llama", tmp_path / "other", 77, tokenizer=True, **sizes)
    before = mesh.texts()
    stop = StopCriteria(max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(other, dtype="float32", num_pages=64) as fresh:
        right = [one.token_ids for one in fresh.generate(PROMPTS, stop=stop)]
        digest = fresh.weights.model_digest.hex()
    told = mesh.post("update_weights_from_disk", {"model_path": str(other), "weight_version": "2"})
    assert told["weight_version"] == "2"
    assert len(told["workers"]) == 2
    assert {one["model_digest"] for one in told["workers"].values()} == {digest}
    assert right != before
    assert mesh.texts() == right
    answer = mesh.complete(PROMPTS[0]).json()
    assert answer["weight_versions"] == [[{"version": "2", "start": 0, "end": NUM_TOKENS}]]
    # Prompts are still shipped: prefill workers have the new weights too, under the same name.
    assert mesh.texts() == right
    sums = mesh.post("weights_checker", {"action": "checksum"})["workers"].values()
    assert len({one["packed_digest"] for one in sums}) == 1
    assert mesh.call("GET", "server_info?config_format=json").json()["weight_version"] == "2"
    assert mesh.post("reset_prefix_cache")["success"]
    # A folder that is none changes nothing, pauses nobody, and says so.
    nothing = {"model_path": str(tmp_path / "no"), "abort_all_requests": True}
    refused = mesh.call("POST", "update_weights_from_disk", nothing)
    assert (refused.status_code, "no folder" in refused.text) == (400, True), refused.text
    assert mesh.texts() == right


def test_tokens_in_and_tokens_out(mesh: TrainedMesh) -> None:
    """Both forms answer with the tokens and the log-probabilities of a completion."""
    right = mesh.texts()[0]
    limits = {"temperature": 0, "ignore_eos": True}
    told = mesh.post(
        "generate",
        {
            "input_ids": PROMPTS[0],
            "sampling_params": {**limits, "max_new_tokens": NUM_TOKENS},
            "return_logprob": True,
        },
    )
    assert told["output_ids"] == right
    continued = mesh.post(
        "inference/v1/generate",
        {
            "token_ids": PROMPTS[0],
            "sampling_params": {**limits, "max_tokens": NUM_TOKENS, "logprobs": 0},
        },
    )
    (choice,) = continued["choices"]
    assert choice["token_ids"] == right
    own = [entry[0] for entry in told["meta_info"]["output_token_logprobs"]]
    other = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert own == pytest.approx(other, abs=1e-4)
    assert all(-1e3 < one <= 0 for one in own)


def test_a_pause_is_for_all_workers(mesh: TrainedMesh) -> None:
    before = mesh.texts()
    assert mesh.post("pause?mode=keep")["success"]
    assert mesh.post("pause?mode=keep")["success"]
    assert mesh.call("GET", "is_paused").json() == {"is_paused": True}
    found: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: found.append(mesh.texts()))
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()
    assert mesh.post("resume")["success"]
    thread.join(LONG_S)
    assert found == [before]
    assert mesh.call("GET", "is_paused").json() == {"is_paused": False}
    # SGLang's words; new requests are refused.
    assert mesh.post("pause_generation", {"mode": "abort"})["success"]
    refused = mesh.complete(PROMPTS[0])
    assert refused.status_code == 503, refused.text
    assert mesh.post("continue_generation", {})["success"]
    assert mesh.texts() == before


def test_a_mesh_is_one_member_of_a_trainers_group_in_two_dialects(
    mesh: TrainedMesh, tmp_path: Path
) -> None:
    sizes = {"max_position_embeddings": 2048, "num_attention_heads": 6, **SHAPE}
    other = make_tiny("llama", tmp_path / "sent", 78, tokenizer=True, **sizes)
    stop = StopCriteria(max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(other, dtype="float32", num_pages=64) as fresh:
        right = [one.token_ids for one in fresh.generate(PROMPTS, stop=stop)]
    new, old = tensors_of(other), tensors_of(mesh.model_dir)
    mesh.post("update_weights_from_disk", {"model_path": str(mesh.model_dir)})
    before = mesh.texts()
    ranks = mesh.call("GET", "get_world_size?include_dp=true").json()["world_size"]
    assert ranks == 2
    place = {
        "master_address": "127.0.0.1",
        "master_port": free_port(),
        "rank_offset": 1,
        "world_size": 1 + ranks,
        "backend": "gloo",
    }

    def beside(work: Callable[[], Any], path: str, body: object) -> Any:
        with ThreadPoolExecutor(1) as threads:
            done = threads.submit(work)
            mesh.post(path, body)
            return done.result(LONG_S)

    # SGLang's, in two parts; the last tensor ends the update.
    name = "slime-pp_0"
    refused = mesh.call("POST", "init_weights_update_group", place | {"world_size": 2})
    assert refused.status_code == 400
    assert "world_size" in refused.text
    sender = beside(
        lambda: Sender(place["master_port"], 1 + ranks, name),
        "init_weights_update_group",
        place | {"group_name": name},
    )
    # As slime's `update_weight_from_distributed.py` calls its `SGLangEngine` (624b824a).
    mesh.post("pause_generation", {})
    assert mesh.call("GET", "flush_cache").status_code == 200
    names = list(new)
    for part in (names[:4], names[4:]):
        sent = [new[one] for one in part]
        body = {
            "names": part,
            "dtypes": [str(one.dtype).replace("torch.", "") for one in sent],
            "shapes": [list(one.shape) for one in sent],
            "group_name": name,
            "flush_cache": False,
            "weight_version": "3",
        }
        beside(partial(sender.send, sent), "update_weights_from_distributed", body)
    mesh.post("continue_generation", {})
    mesh.post("destroy_weights_update_group", {"group_name": name})
    sender.close()
    assert mesh.texts() == right
    assert mesh.call("GET", "get_weight_version").json() == {"weight_version": "3"}
    # vLLM's, as TRL sends it, in packs.
    place["master_port"] = free_port()
    place |= {"packed": True, "packed_buffer_size_bytes": 20_000}
    sender = beside(
        lambda: Sender(place["master_port"], 1 + ranks, "vllm"),
        "init_weight_transfer_engine",
        {"init_info": place},
    )
    mesh.post("pause?mode=keep")
    mesh.post("start_weight_update", {"is_checkpoint_format": True})
    assert mesh.call("POST", "resume").status_code == 409
    info = {
        "names": list(old),
        "dtype_names": [str(one.dtype).removeprefix("torch.") for one in old.values()],
        "shapes": [list(one.shape) for one in old.values()],
    }
    packs = packed(list(old.values()), 20_000)
    beside(partial(sender.send, packs), "update_weights", {"update_info": info})
    mesh.post("finish_weight_update")
    mesh.post("resume")
    mesh.post("shutdown_weight_transfer_engine")
    sender.close()
    assert mesh.texts() == before
    # A trainer on this machine lends tensors, in both forms.
    with lent_by_host(new) as tensors:
        info = {
            "names": [one.name for one in tensors],
            "shapes": [one.shape for one in tensors],
            "handles": [[{"shm": h.shm, "offset": h.offset} for h in t.handles] for t in tensors],
        }
        dtypes = [one.dtype for one in tensors]
        lent = {**info, "dtypes": dtypes, "weight_version": "lent"}
        assert mesh.post("update_weights_from_tensor", lent)["weight_version"] == "lent"
        assert mesh.texts() == right
        mesh.post("start_weight_update")
        mesh.post("update_weights", {"update_info": {**info, "dtype_names": dtypes}})
        mesh.post("finish_weight_update", {"weight_version": "again"})
        assert mesh.texts() == right
    # What would have to be unpickled is refused by name.
    for path, body in (
        ("update_weights_from_tensor", {"serialized_named_tensors": ["x"]}),
        ("update_weights_from_ipc", {"zmq_handles": {}}),
        ("update_weights", {"update_info": {**info, "dtype_names": dtypes, "ipc_handles": "x"}}),
    ):
        refused = mesh.call("POST", path, body)
        assert (refused.status_code, "pickled" in refused.text) == (400, True), refused.text


def num_requests(mesh: TrainedMesh) -> int:
    """As slime's `server_control.py` counts them."""
    loads = mesh.call("GET", "v1/loads?include=core").json()["loads"]
    return sum(one["num_running_reqs"] + one["num_waiting_reqs"] for one in loads)


def test_slimes_engine_gets_what_it_reads(mesh: TrainedMesh, tmp_path: Path) -> None:
    """The requests of slime's `SGLangEngine` and of its rollouts (THUDM/slime at 624b824a), beside
    those of a group.
    """
    sizes = {"max_position_embeddings": 2048, "num_attention_heads": 6, **SHAPE}
    other = make_tiny("llama", tmp_path / "other", 31, tokenizer=True, **sizes)
    assert mesh.call("GET", "health_generate").status_code == 200
    mesh.post("pause_generation", {})
    assert mesh.call("GET", "flush_cache").status_code == 200
    body: dict[str, Any] = {"model_path": str(other), "load_format": "auto", "weight_version": "7"}
    assert mesh.post("update_weights_from_disk", body)["success"]
    mesh.post("continue_generation", {})
    assert mesh.call("GET", "get_weight_version").json()["weight_version"] == "7"
    mesh.post("weights_checker", {"action": "snapshot"})
    mesh.post("release_memory_occupation", {})
    mesh.post("resume_memory_occupation", {"tags": ["weights"]})
    mesh.post("resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    mesh.post("resume_memory_occupation", {"tags": None})
    mesh.post("weights_checker", {"action": "compare"})
    answer = mesh.post(
        "generate",
        {
            "input_ids": PROMPTS[0],
            "return_logprob": True,
            "sampling_params": {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": NUM_TOKENS,
                "stop": None,
                "stop_token_ids": None,
                "skip_special_tokens": False,
                "no_stop_trim": True,
                "spaces_between_special_tokens": False,
            },
        },
    )
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] in ("stop", "length")
    assert meta["weight_version"] == "7"
    assert [one[1] for one in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(one[0] <= 0 for one in meta["output_token_logprobs"])
    assert isinstance(answer["text"], str)
    # Its rollouts end what still runs, and wait until nothing does.
    long = {
        "input_ids": [PROMPTS[0]] * 8,
        "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True},
    }
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(mesh.post("generate", long)))
    thread.start()
    wait_until(lambda: num_requests(mesh) == 8, LONG_S)
    assert mesh.post("abort_request", {"abort_all": True})["success"]
    wait_until(lambda: num_requests(mesh) == 0, LONG_S)
    thread.join(LONG_S)
    (answers,) = found
    assert {one["meta_info"]["finish_reason"]["type"] for one in answers} == {"abort"}
    assert all(len(one["output_ids"]) < 1900 for one in answers)
    assert mesh.call("GET", "is_paused").json() == {"is_paused": False}
    refused = mesh.call("POST", "abort_request", {"rid": "a", "abort_all": True})
    assert (refused.status_code, "rid" in refused.text) == (400, True), refused.text
    # What it asks for only with formats and channels of its own is not there, and says so.
    for path in ("post_process_weights", "pull_weights"):
        assert mesh.call("POST", path, {}).status_code == 404


def test_trls_client_gets_what_it_reads(mesh: TrainedMesh) -> None:
    """The requests of TRL 1.16's `VLLMClient` and rollout worker, whose server has a URL with a
    password, since they send no other credentials.
    """
    token = (mesh.state / "admin-token").read_text().strip()
    url = mesh.url.replace("//", f"//trl:{token}@")
    with httpx.Client(base_url=url, timeout=LONG_S, trust_env=False) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 2048
        told = client.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
        assert told["model_config"]["dtype"] == "torch.float32"
        assert told["lora_config"] is None
        assert told["parallel_config"]["data_parallel_size"] == 1
        assert client.get("/get_world_size").json()["world_size"] == 2
        assert client.post("/pause", params={"mode": "keep"}).status_code == 200
        assert client.post("/resume").status_code == 200
        body = {
            "model": MODEL,
            "prompt": PROMPTS[0],
            "max_tokens": 8,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "repetition_penalty": 1.0,
            "n": 1,
            "return_token_ids": True,
            "logprobs": 0,
            "seed": 2**63 - 1,
        }
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
    with httpx.Client(base_url=mesh.url.replace("//", "//trl:wrong@"), trust_env=False) as client:
        assert client.get("/get_world_size").status_code == 401


def test_a_mesh_sleeps_and_wakes_as_one_server(mesh: TrainedMesh, tmp_path: Path) -> None:
    before = mesh.texts()
    mesh.post("weights_checker", {"action": "snapshot"})
    told = mesh.post("sleep?level=1")["workers"]
    assert [one["asleep"] for one in told.values()] == [["weights", "kv_cache"]] * 2
    assert mesh.call("GET", "is_sleeping").json() == {"is_sleeping": True}
    assert mesh.post("sleep")["success"]
    refused = mesh.complete(PROMPTS[0])
    assert refused.status_code == 503, refused.text
    assert "asleep" in refused.text
    mesh.post("wake_up?tags=weights")
    refused = mesh.complete(PROMPTS[0])
    assert refused.status_code == 503
    assert "kv_cache" in refused.text
    mesh.post("wake_up?tags=kv_cache")
    assert mesh.call("GET", "is_sleeping").json() == {"is_sleeping": False}
    mesh.post("weights_checker", {"action": "compare"})
    # Pages are shipped again, into memory that is registered anew.
    assert mesh.texts() == before
    # SGLang's words, and weights that are dropped: nothing is served until an update.
    mesh.post("release_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    mesh.post("resume_memory_occupation", {})
    assert mesh.texts() == before
    mesh.post("sleep?level=2")
    mesh.post("wake_up")
    refused = mesh.complete(PROMPTS[0])
    assert refused.status_code == 503, refused.text
    assert refused.json()["error"]["code"] == "weights_incomplete"
    mesh.post("update_weights_from_disk", {"model_path": str(mesh.model_dir)})
    other = mesh.call("POST", "weights_checker", {"action": "compare"})
    assert other.status_code in (200, 409)
    mesh.texts()


@pytest.mark.parametrize(
    "path", ["sleep", "wake_up", "pause", "resume", "update_weights_from_disk", "flush_cache"]
)
def test_trainers_need_the_operators_token(mesh: TrainedMesh, path: str) -> None:
    answer = mesh.call("POST", path, {"model_path": "/tmp"}, has_token=False)
    assert answer.status_code == 401, answer.text
    assert mesh.call("GET", "is_paused").json() == {"is_paused": False}


def test_words_that_are_not_known_are_refused_by_name(mesh: TrainedMesh) -> None:
    answer = mesh.call("POST", "pause?mode=later")
    assert answer.status_code == 400
    assert "mode" in answer.text
    for path, word in (("sleep?level=0", "level"), ("sleep?tags=graphs", "tags")):
        answer = mesh.call("POST", path)
        assert answer.status_code == 400
        assert word in answer.text
    answer = mesh.call("POST", "weights_checker", {"action": "reset"})
    assert answer.status_code == 400
    assert "action" in answer.text


@pytest.mark.full
@pytest.mark.parametrize("way", ["folder", "gloo"])
def test_a_toy_task_is_learnt_in_twenty_updates(
    way: str, mesh: TrainedMesh, tmp_path: Path
) -> None:
    given = ["--out", str(tmp_path / "versions")] if way == "folder" else ["--gloo", "127.0.0.1"]
    mesh.post("update_weights_from_disk", {"model_path": str(mesh.model_dir)})
    done = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), str(mesh.model_dir), "--url", mesh.url),
            *("--model", MODEL, "--token-file", str(mesh.state / "admin-token")),
            *given,
        ],
        capture_output=True,
        text=True,
        timeout=5 * LONG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(steps) == 21
    rewards = [step["reward"] for step in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    # After each update the mesh draws from the trainer's weights.
    assert max(step["gap"] for step in steps) < 1e-3
