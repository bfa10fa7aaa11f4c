"""Embeddings, ranks, scores and classes through a mesh: clients, errors, lost workers."""

from __future__ import annotations

import base64
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import ollama
import openai
import psutil
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from weft.common.settings import list_text
from weft.testing.meshes.local_mesh import LocalMesh, wait_until
from weft.testing.models.tiny_embedders import make_classifier, make_embedder, make_judge, make_m3
from weft.testing.models.tiny_models import make_tiny
from weft.v1 import gateway_pb2, gateway_pb2_grpc

pytestmark = pytest.mark.needs("go")

VOCAB, CONTEXT = 517, 1024
LABELS = (300, 400)
"""Tokens that stand for yes and no."""
HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""As Qwen3-Reranker's model card has it."""
QUERY = "Given a search query, find passages: "
TEXTS = ["mesh", "a longer text about pages", "x" * 100]


class ManyTasks(LocalMesh):
    """`weft up` with an embedder, a reranker with one class, one that says yes or no, and a chat
    model.
    """

    def __init__(self, folder: Path) -> None:
        seed = random.randrange(2**31)
        shape: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
        self.embedder = make_embedder(
            "qwen3", folder / "embedder", seed, tokenizer=True, prompts={"query": QUERY}, **shape
        )
        one = {"id2label": {"0": "LABEL_0"}}
        self.ranker = make_classifier("qwen3", folder / "ranker", seed, **shape, **one)
        self.judge = make_judge("qwen3", folder / "judge", seed, labels=LABELS, **shape)
        chat = make_tiny("llama", folder / "chat", seed, tokenizer=True, **shape)
        tokenizer = (chat / "tokenizer.json").read_bytes()
        self.m3 = make_m3(folder / "m3", seed)
        for path in (self.ranker, self.judge, self.m3):
            (path / "tokenizer.json").write_bytes(tokenizer)
        self.tokenizer = Tokenizer.from_file(str(chat / "tokenizer.json"))
        flags = ["--dtype", "float32", "--kv-memory-bytes", str(16 << 20), "--prefill", "0"]
        for path in (self.embedder, self.ranker, self.judge, self.m3, chat):
            flags += ["--model", list_text([str(path)]), "--model-name", path.name]
        super().__init__(folder, *flags)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, trust_env=False)

    def json(self, path: str, **body: Any) -> Any:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def answers_all(self) -> bool:
        pair = {"text_1": "x", "text_2": "y"}
        asked = [("/v1/embeddings", name, {"input": "x"}) for name in ("embedder", "m3")]
        asked += [("/v1/score", name, pair) for name in ("ranker", "judge")]
        return all(
            self.post(path, model=name, **body).status_code == 200 for path, name, body in asked
        )

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    @torch.no_grad()
    def raw(self, ids: Sequence[int]) -> torch.Tensor:
        vector: torch.Tensor = loaded(AutoModel, self.embedder)(
            torch.tensor([ids])
        ).last_hidden_state[0, -1]
        return vector

    def embedding(self, ids: Sequence[int], size: int | None = None) -> torch.Tensor:
        vector = self.raw(ids)[:size]
        return vector / vector.norm()

    @torch.no_grad()
    def value(self, ids: Sequence[int]) -> torch.Tensor:
        """What the reranker's head makes of a prompt."""
        return loaded(AutoModelForSequenceClassification, self.ranker)(torch.tensor([ids])).logits[
            0
        ]

    @torch.no_grad()
    def yes(self, query: str, text: str, instruction: str) -> float:
        """Probability of yes against no, behind Qwen3-Reranker's template."""
        body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}"
        ids = [one for part in (HEAD, body, TAIL) for one in self.ids(part)]
        logits = loaded(AutoModelForCausalLM, self.judge)(torch.tensor([ids])).logits[0, -1]
        return float(logits[list(LABELS)].softmax(0)[0])


@cache
def loaded(kind: Any, path: Path) -> Any:
    return kind.from_pretrained(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyTasks]:
    running = ManyTasks(tmp_path_factory.mktemp("pooling"))
    try:
        running.wait_ready()
        # On a busy machine the gateway may meet the last workers later.
        wait_until(running.answers_all, 60, lambda: running.text)
        yield running
    finally:
        running.stop()


def cosine(found: Sequence[float], wanted: torch.Tensor) -> float:
    vector = torch.tensor(list(found))
    return float(torch.dot(vector, wanted) / vector.norm())


def test_openais_client_gets_the_reference_models_embeddings(mesh: ManyTasks) -> None:
    client = openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none")
    inputs: list[Any] = [TEXTS, TEXTS[0], [mesh.ids(text) for text in TEXTS], mesh.ids(TEXTS[1])]
    expected = [TEXTS, TEXTS[:1], TEXTS, TEXTS[1:2]]
    for given, texts in zip(inputs, expected, strict=True):
        # The client asks for base64 by itself.
        answer = client.embeddings.create(model="embedder", input=given)
        assert [one.index for one in answer.data] == list(range(len(texts)))
        assert answer.usage.prompt_tokens == sum(len(mesh.ids(text)) for text in texts)
        for one, text in zip(answer.data, texts, strict=True):
            assert cosine(one.embedding, mesh.embedding(mesh.ids(text))) > 0.99999
            assert abs(np.linalg.norm(one.embedding) - 1) < 1e-5
    cut = client.embeddings.create(
        model="embedder", input=TEXTS[1], dimensions=16, encoding_format="float"
    )
    assert len(cut.data[0].embedding) == 16
    assert cosine(cut.data[0].embedding, mesh.embedding(mesh.ids(TEXTS[1]), 16)) > 0.99999


def test_prompts_base64_and_raw_vectors(mesh: ManyTasks) -> None:
    model = {"model": "embedder", "input": TEXTS[1]}
    wanted = mesh.embedding(mesh.ids(QUERY + TEXTS[1]))
    answer = mesh.json("/v1/embeddings", **model, prompt_name="query", encoding_format="base64")
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert cosine(vector.tolist(), wanted) > 0.99999
    each = mesh.json("/pooling", **model, task="token_embed")["data"][0]
    count = len(mesh.ids(TEXTS[1]))
    assert each["shape"] == [count, 72]
    assert cosine(each["data"][-1], mesh.embedding(mesh.ids(TEXTS[1]))) > 0.99999
    bare = mesh.json("/pooling", **model, normalize=False)["data"][0]["data"]
    assert abs(np.linalg.norm(bare) - 1) > 0.01


@torch.no_grad()
def test_lexical_weights_and_vectors_of_tokens(mesh: ManyTasks) -> None:
    """The arithmetic of FlagEmbedding's BGEM3FlagModel, written anew."""
    linears = {name: torch.load(mesh.m3 / f"{name}_linear.pt") for name in ("sparse", "colbert")}
    linear = torch.nn.functional.linear
    sparse = mesh.json("/v1/embeddings", model="m3", input=TEXTS, output_type="sparse")["data"]
    many = mesh.json("/pooling", model="m3", input=TEXTS, task="multi_vector")["data"]
    all_wanted = []
    for text, weights, vectors in zip(TEXTS, sparse, many, strict=True):
        ids = mesh.ids(text)
        states = loaded(AutoModel, mesh.m3)(torch.tensor([ids])).last_hidden_state[0]
        wanted: dict[int, float] = {}
        for id_, weight in zip(ids, linear(states, **linears["sparse"]).relu()[:, 0], strict=True):
            if weight > 0 and id_ != 2:  # The tokenizer's end of text.
                wanted[id_] = max(float(weight), wanted.get(id_, 0.0))
        check_weights(weights["embedding"], wanted)
        each = torch.nn.functional.normalize(linear(states, **linears["colbert"])[1:], dim=-1)
        assert vectors["shape"] == list(each.shape)
        assert np.allclose(vectors["data"], each, atol=1e-5)
        all_wanted.append(wanted)
    again = mesh.json("/pooling", model="m3", input=TEXTS, task="sparse")["data"]
    for one, wanted in zip(again, all_wanted, strict=True):
        check_weights(one["data"], wanted)


def check_weights(found: dict[str, Any], wanted: dict[int, float]) -> None:
    """Weights of tokens in the order of their ids; of one that is nearly zero, rounding decides
    whether it is there.
    """
    assert found["indices"] == sorted(set(found["indices"]))
    weights = dict(zip(found["indices"], found["values"], strict=True))
    for id_ in weights | wanted:
        assert abs(weights.get(id_, 0.0) - wanted.get(id_, 0.0)) < 1e-5 * (1 + wanted.get(id_, 0.0))


def test_long_inputs_are_refused_or_cut_as_asked(mesh: ManyTasks) -> None:
    long = "y" * (CONTEXT + 44)
    refused = mesh.post("/v1/embeddings", model="embedder", input=["short", long])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input"
    refused = mesh.post("/v2/embed", model="embedder", texts=[long], truncate="NONE")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "texts"
    for most, left in ((-1, CONTEXT), (20, 20)):
        given = {"model": "embedder", "input": long, "truncate_prompt_tokens": most}
        answer = mesh.json("/v1/embeddings", **given)
        assert answer["usage"]["prompt_tokens"] == left
        wanted = mesh.embedding(mesh.ids(long)[:left])
        assert cosine(answer["data"][0]["embedding"], wanted) > 0.99999


def test_ranks_scores_and_classes_are_those_of_transformers(mesh: ManyTasks) -> None:
    query, wanted = "what is a mesh?", []
    for text in TEXTS:
        ids = mesh.ids(query) + mesh.ids(text)
        wanted.append(float(torch.sigmoid(mesh.value(ids)[0])))
    given = {"model": "ranker", "query": query}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
        results = mesh.json(path, **given, documents=documents, top_n=2)["results"]
        order = sorted(range(3), key=lambda index: -wanted[index])[:2]
        # float32 may not tell the values of two texts apart.
        ranked = [wanted[one["index"]] for one in results]
        assert np.allclose(ranked, [wanted[index] for index in order], rtol=0, atol=2e-5)
        for one in results:
            assert abs(one["relevance_score"] - wanted[one["index"]]) < 1e-5
            assert one["document"]["text"] == TEXTS[one["index"]]
    scores = mesh.json("/v1/score", model="ranker", text_1=query, text_2=TEXTS)["data"]
    assert np.allclose([one["score"] for one in scores], wanted, atol=1e-5)
    for one, text in zip(
        mesh.json("/v1/classify", model="ranker", input=TEXTS)["data"], TEXTS, strict=True
    ):
        probs = mesh.value(mesh.ids(text)).sigmoid()
        assert np.allclose(one["probs"], probs.tolist(), atol=1e-5)
        assert (one["label"], one["num_classes"]) == ("LABEL_0", 1)
    channel = grpc.insecure_channel(mesh.grpc_address)
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    ranked = stub.Rerank(
        gateway_pb2.RerankRequest(model="ranker", query=query, documents=TEXTS, top_n=1)
    )
    assert abs(ranked.documents[0].score - max(wanted)) < 1e-5
    inputs = [gateway_pb2.EmbedInput(text=TEXTS[0])]
    embedded = stub.Embed(gateway_pb2.EmbedRequest(model="embedder", inputs=inputs))
    vector = embedded.embeddings[0].values
    assert cosine(list(vector), mesh.embedding(mesh.ids(TEXTS[0]))) > 0.99999
    paired = stub.Score(
        gateway_pb2.ScoreRequest(model="ranker", first=[query], second=TEXTS)
    ).scores
    assert np.allclose(list(paired), wanted, atol=1e-5)
    # Typed requests carry the header, as others do; this gateway lets nobody choose.
    with pytest.raises(grpc.RpcError, match="--allow-worker-choice"):
        stub.Embed(
            gateway_pb2.EmbedRequest(model="embedder", inputs=inputs),
            metadata=(("x-worker-id", "decode-0"),),
        )
    channel.close()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"model": "chat", "input": "x"}, "model"),
        ("/v1/embeddings", {"model": "ranker", "input": "x"}, "model"),
        ("/v1/rerank", {"model": "embedder", "query": "x", "documents": ["y"]}, "model"),
        (
            "/v1/score",
            {"model": "ranker", "text_1": "x", "text_2": "y", "instruction": "z"},
            "instruction",
        ),
        ("/v1/classify", {"model": "embedder", "input": "x"}, "model"),
        ("/v1/completions", {"model": "embedder", "prompt": "x"}, "model"),
        ("/v1/embeddings", {"model": "embedder", "input": []}, "input"),
        ("/v1/embeddings", {"model": "embedder", "input": "x", "dimensions": 73}, "dimensions"),
        ("/v1/embeddings", {"model": "embedder", "input": "x", "prompt_name": "z"}, "prompt_name"),
        ("/v1/embeddings", {"model": "embedder", "input": "x", "input_type": "z"}, "input_type"),
        ("/v1/embeddings", {"model": "embedder", "input": [[VOCAB]]}, "input"),
        ("/v1/embeddings", {"model": "embedder", "input": "x", "output_type": "sparse"}, "model"),
        (
            "/v1/embeddings",
            {"model": "embedder", "input": "x", "late_chunking": True},
            "late_chunking",
        ),
        ("/v1/embeddings", {"model": "embedder", "input": "x", "task": "code"}, "task"),
        ("/v1/embeddings", {"model": "embedder", "input": "x", "prompt": "y"}, "prompt"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "ttft_timeout": 1}, "ttft_timeout"),
        ("/v1/classify", {"model": "ranker", "input": "x", "activation": False}, "activation"),
        ("/v1/score", {"model": "ranker", "text_1": ["x", "y"], "text_2": ["z"]}, "text_1"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    mesh: ManyTasks, path: str, body: dict[str, Any], param: str
) -> None:
    answer = mesh.post(path, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_models_show_what_they_serve(mesh: ManyTasks) -> None:
    listed = httpx.get(f"{mesh.url}/v1/models", trust_env=False).json()["data"]
    tasks = {one["id"]: one["task"] for one in listed}
    assert tasks == {
        "embedder": "embed", "ranker": "classify", "judge": "score", "m3": "embed",
        "chat": "generate",
    }  # fmt: skip
    able = {name: mesh.post("/api/show", model=name).json()["capabilities"] for name in tasks}
    assert able == {
        name: {"embed": ["embedding"], "generate": ["completion", "tools"]}.get(task, [])
        for name, task in tasks.items()
    }


def test_ollamas_vectors_are_those_of_openais(mesh: ManyTasks) -> None:
    client = ollama.Client(host=mesh.url, timeout=60, trust_env=False)
    given = {"model": "embedder", "input": TEXTS}
    wanted = [one["embedding"] for one in mesh.json("/v1/embeddings", **given)["data"]]
    found = client.embed(model="embedder:latest", input=TEXTS)
    assert found.model == "embedder:latest"
    assert np.allclose(found.embeddings, wanted, atol=1e-5)
    usage = mesh.json("/v1/embeddings", **given)["usage"]
    assert found.prompt_eval_count == usage["prompt_tokens"]
    (one,) = client.embed(model="embedder", input=TEXTS[1], dimensions=8, keep_alive=0).embeddings
    assert np.allclose(one, np.array(wanted[1][:8]) / np.linalg.norm(wanted[1][:8]), atol=1e-5)
    raw = np.array(client.embeddings(model="embedder", prompt=TEXTS[2]).embedding)
    assert np.allclose(raw / np.linalg.norm(raw), wanted[2], atol=1e-5)
    assert np.allclose(raw, mesh.raw(mesh.ids(TEXTS[2])).numpy(), atol=1e-3)
    # Without a text there is no vector; a long one is cut unless that is refused.
    assert client.embed(model="embedder", input=[]).embeddings == []
    assert mesh.json("/api/embeddings", model="embedder", prompt="") == {"embedding": []}
    long = "mesh " * 2 * CONTEXT
    assert len(client.embed(model="embedder", input=long).embeddings) == 1
    for body in ({"input": long, "truncate": False}, {"input": "x", "dimensions": 10**6}):
        refused = mesh.post("/api/embed", model="embedder", **body)
        assert (refused.status_code, list(refused.json())) == (400, ["error"]), refused.text
    assert mesh.post("/api/embed", model="chat", input="x").status_code == 400
    assert mesh.post("/api/embed", model="nobody", input=[]).status_code == 404


def test_a_model_that_says_yes_or_no_is_asked_in_its_template(mesh: ManyTasks) -> None:
    given = {"model": "judge", "query": "mesh?", "documents": TEXTS}
    for instruction in ("", "Is it a mesh?"):
        told = (
            instruction
            or "Given a web search query, retrieve relevant passages that answer the query"
        )
        found = mesh.json("/v1/rerank", **given, instruction=instruction)["results"]
        wanted = {index: mesh.yes("mesh?", text, told) for index, text in enumerate(TEXTS)}
        assert sorted(one["index"] for one in found) == list(wanted)
        ranked = [wanted[one["index"]] for one in found]
        assert np.allclose(ranked, sorted(wanted.values(), reverse=True), rtol=0, atol=2e-5)
        for one in found:
            assert abs(one["relevance_score"] - wanted[one["index"]]) < 1e-5
    cut = mesh.json(
        "/v1/score", model="judge", text_1="a", text_2="z" * 2 * CONTEXT, truncate_prompt_tokens=-1
    )
    assert cut["usage"]["prompt_tokens"] == CONTEXT
    assert (
        mesh.post("/v1/score", model="judge", text_1="a", text_2="z" * 2 * CONTEXT).status_code
        == 400
    )


def test_common_instructions_are_cached(mesh: ManyTasks) -> None:
    common = "instruction " * 10
    prompts = [common + text for text in TEXTS]
    first = mesh.json("/v1/embeddings", model="embedder", input=prompts[0])
    again = [mesh.json("/v1/embeddings", model="embedder", input=text) for text in prompts]
    for answer, text in zip((first, *again), (prompts[0], *prompts), strict=True):
        found = answer["data"][0]["embedding"]
        assert cosine(found, mesh.embedding(mesh.ids(text))) > 0.99999


def test_metrics_count_prompts_and_no_tokens(mesh: ManyTasks) -> None:
    def value(metric: str) -> float:
        address = mesh.service("gateway")["metrics_address"]
        lines = httpx.get(f"http://{address}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric))

    names = ("weft_prompt_tokens_total", "weft_generation_tokens_total")
    mesh.wait_counted()
    before = [value(name) for name in names]
    used = mesh.json("/v1/embeddings", model="embedder", input=TEXTS)["usage"]["prompt_tokens"]
    assert used == sum(len(mesh.ids(text)) for text in TEXTS)

    def gained() -> list[float]:
        return [value(name) - old for name, old in zip(names, before, strict=True)]

    # A request is counted when it is over, which its client may know first.
    wait_until(lambda: gained() == [used, 0], 30, lambda: str(gained()))


def test_a_killed_worker_costs_a_retry_or_503(mesh: ManyTasks) -> None:
    """Goes last: the mesh has restarted a worker behind it."""
    pid = next(
        process.pid
        for process in mesh.family()
        if "embedder" in " ".join(process.cmdline()) and "decode" in " ".join(process.cmdline())
    )
    answers: list[httpx.Response] = []

    def ask() -> None:
        inputs = ["z" * random.randrange(100, 200) for _ in range(200)]
        for _ in range(10):
            answers.append(mesh.post("/v1/embeddings", model="embedder", input=inputs))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.5)
    psutil.Process(pid).send_signal(signal.SIGKILL)
    thread.join()
    assert {answer.status_code for answer in answers} <= {200, 503}

    def serves() -> bool:
        return mesh.post("/v1/embeddings", model="embedder", input="x").status_code == 200

    wait_until(serves, 60, lambda: mesh.text)
