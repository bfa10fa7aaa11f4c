"""Adapters that bring tokens and a chat template of their own, in a real mesh."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from weft.chaos.tiny import EOS_TOKEN_ID
from weft.testing.meshes.local_mesh import wait_until
from weft.testing.meshes.mesh_adapters import TIMEOUT_S, load, post, unload
from weft.testing.meshes.tiny_mesh import MODEL, VOCAB, TinyMesh
from weft.testing.models.choices import Choices
from weft.testing.models.tiny_adapters import peft_model
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

pytestmark = [pytest.mark.needs("go"), pytest.mark.timeout(300)]

END, NOTE = "<|end-of-note|>", "<note>"
NUM_NEW, NUM_TRIES = 12, 20
TEMPLATE = (
    "{% for m in messages %}" + NOTE + "{{ m['role'] }} {{ m['content'] }}" + END + "{% endfor %}"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def mesh(
    tmp_path_factory: pytest.TempPathFactory, root: Path, rest_binary: Path
) -> Iterator[TinyMesh]:
    """Two gateways; prompts are filled by a prefill worker, and an EAGLE head drafts."""
    room = "--lora-added-tokens 4 --lora-projections q,embed_tokens,lm_head"
    mesh = TinyMesh(
        tmp_path_factory.mktemp("mesh"),
        *(f"--decode-args={room}", f"--prefill-args={room}", "--adapter-root", str(root)),
        *("--local-prefill-max-tokens", "0", "--drafter", "eagle3"),
        gateways=2,
        has_draft=True,
    )
    wait_until(lambda: "Weft is ready" in mesh.text, 180, lambda: mesh.text)
    yield mesh
    assert mesh.stop() == 0, mesh.text


class Grown:
    """An adapter that adds three tokens, and PEFT's model of it."""

    def __init__(self, mesh: TinyMesh, folder: Path) -> None:
        seed = random.randrange(2**31)
        print(f"seed {seed}")
        self.model = peft_model(
            mesh.model_dir, seed, resize=VOCAB + 3, r=8, target_modules=["q_proj"]
        )
        rows = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
                layer.weight[VOCAB:] += 0.5 * torch.randn(3, 72, generator=rows)
        self.model.save_pretrained(folder)
        self.tokenizer = Tokenizer.from_file(str(mesh.model_dir / "tokenizer.json"))
        self.tokenizer.add_special_tokens([END])
        self.tokenizer.add_tokens([NOTE, AddedToken("<verse>", lstrip=False)])
        self.tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"eos_token": END, "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        self.folder = folder
        self.ended = next(filter(self.has_end, texts_of(self, NUM_TRIES)), "")
        """A text behind which comes its end of text, not at once and not the model's; empty: none
        was found.
        """

    def has_end(self, text: str) -> bool:
        prompt = self.tokenizer.encode(text, add_special_tokens=False).ids
        ids = self.ids(prompt)
        return VOCAB in ids[1:] and EOS_TOKEN_ID not in ids

    def ids(self, prompt: list[int]) -> list[int]:
        """PEFT's greedy tokens, past any end of sequence."""
        return Choices(self.logits, prompt, NUM_NEW)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[num_tokens, vocabulary]"""
        found: torch.Tensor = self.model(input_ids=torch.tensor([tokens])).logits[0]
        return found

    def is_clear(self, text: str) -> bool:
        """Whether float32 can tell all tokens behind a text."""
        prompt = self.tokenizer.encode(text, add_special_tokens=False).ids
        return Choices(self.logits, prompt, NUM_NEW).is_clear()


@pytest.fixture(scope="module")
def grown(mesh: TinyMesh, root: Path) -> Iterator[Grown]:
    for _ in range(NUM_TRIES):
        made = Grown(mesh, root / "grown")
        if made.ended:
            break
    answer = load(mesh, "grown", "grown")
    assert answer.status_code == 200, answer.text
    yield made
    assert unload(mesh, "grown").status_code == 200


def texts_of(grown: Grown, count: int) -> Iterator[str]:
    """Prompts with added tokens in them."""
    num_found = 0
    while num_found < count:
        words = [grown.tokenizer.decode([random.randrange(40, VOCAB)]) for _ in range(20)]
        text = NOTE + "".join(words) + random.choice([END, "<verse>"])
        if grown.is_clear(text):
            num_found += 1
            yield text


def complete(address: str, text: str, **stop: Any) -> gateway_pb2.Choice:
    with grpc.insecure_channel(address) as channel:
        request = gateway_pb2.CompleteRequest(
            model="grown",
            text=text,
            sampling=common_pb2.SamplingParams(temperature=0),
            stop=common_pb2.StopCriteria(max_tokens=NUM_NEW, **stop),
        )
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        (message,) = stub.Complete(request, timeout=TIMEOUT_S)
        return message.choices[0]


def test_texts_are_pefts_at_each_gateway(mesh: TinyMesh, grown: Grown) -> None:
    """Also where another gateway has loaded the adapter: prompts are cut by its tokenizer, and its
    tokens are read back.
    """
    found = set()
    for text in (*texts_of(grown, 3), grown.ended):
        prompt = grown.tokenizer.encode(text, add_special_tokens=False).ids
        assert prompt[0] == VOCAB + 1
        expected = grown.ids(prompt)
        for address in mesh.grpc_addresses:
            choice = complete(address, text, ignore_eos=True)
            assert list(choice.token_ids) == expected
            assert choice.text == grown.tokenizer.decode(expected)
        found |= {token for token in expected if token >= VOCAB}
    assert found, "no added token was generated: nothing was shown"


def test_its_end_of_text_ends_answers(mesh: TinyMesh, grown: Grown) -> None:
    prompt = grown.tokenizer.encode(grown.ended, add_special_tokens=False).ids
    expected = grown.ids(prompt)
    choice = complete(mesh.grpc_address, grown.ended)
    assert choice.finish_reason == common_pb2.FINISH_REASON_STOP
    assert choice.text == grown.tokenizer.decode(expected[: expected.index(VOCAB)])


def test_chats_use_its_template(mesh: TinyMesh, grown: Grown) -> None:
    told = (f"the quick brown fox {number}" for number in itertools.count())
    content = next(text for text in told if grown.is_clear(f"{NOTE}user {text}{END}"))
    messages = [{"role": "user", "content": content}]
    prompt = grown.tokenizer.encode(f"{NOTE}user {content}{END}").ids
    body = {"model": "grown", "messages": messages, "temperature": 0, "max_tokens": NUM_NEW}
    answer = post(mesh, "/v1/chat/completions", {**body, "ignore_eos": True}).json()
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["message"]["content"] == grown.tokenizer.decode(grown.ids(prompt))


def test_the_model_itself_does_not_know_them(mesh: TinyMesh, grown: Grown) -> None:
    own = post(mesh, "/tokenize", {"model": "grown", "prompt": NOTE}).json()["tokens"]
    assert own == [VOCAB + 1]
    assert len(post(mesh, "/tokenize", {"model": MODEL, "prompt": NOTE}).json()["tokens"]) > 1
    for model, token, status in ((MODEL, VOCAB, 400), ("grown", VOCAB + 3, 400), ("grown", 1, 200)):
        body = {"model": model, "prompt": [5, token], "max_tokens": 1}
        answer = post(mesh, "/v1/completions", body)
        assert answer.status_code == status, answer.text
        if status == 400:
            assert f"token id {token} is outside the vocabulary" in answer.text


@pytest.mark.parametrize("damage", ["rows", "ids", "too many", "no tokenizer"])
def test_a_tokenizer_that_does_not_fit_is_refused(
    mesh: TinyMesh, root: Path, grown: Grown, damage: str
) -> None:
    """With what is wrong; a lenient load goes without tokens for which there is no room."""
    folder = root / "other"
    shutil.copytree(grown.folder, folder)
    file = folder / "tokenizer.json"
    try:
        if damage == "rows":
            grown.tokenizer.add_tokens([f"<more {number}>" for number in range(3)])
            grown.tokenizer.save(str(file))
            problem = f"it has token {VOCAB + 5}, and the embedding {VOCAB + 3} rows"
        elif damage == "ids":
            content = json.loads(file.read_text())
            vocabulary = content["model"]["vocab"]
            first, second = list(vocabulary)[300:302]
            vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
            file.write_text(json.dumps(content))
            problem = "an adapter's tokenizer may only add tokens"
        elif damage == "too many":
            model = peft_model(mesh.model_dir, 1, resize=VOCAB + 5, target_modules=["q_proj"])
            model.save_pretrained(folder)
            problem = "lora_added_tokens = 4"
        else:
            file.write_text("{}")
            problem = "tokenizer.json: not a tokenizer"
        refused = load(mesh, "other", "other")
        assert refused.status_code == 400, refused.text
        assert problem in refused.text
        assert str(folder) not in refused.text
        prompt = {"prompt": [5, 7], "max_tokens": 1}
        assert post(mesh, "/v1/completions", {"model": "grown", **prompt}).status_code == 200
        if damage == "too many":
            done = load(mesh, "other", "other", lenient=True)
            assert done.status_code == 200, done.text
            found = post(mesh, "/tokenize", {"model": "other", "prompt": NOTE}).json()["tokens"]
            assert max(found) < VOCAB
            assert post(mesh, "/v1/completions", {"model": "other", **prompt}).status_code == 200
            assert unload(mesh, "other").status_code == 200
    finally:
        shutil.rmtree(folder)


def test_streams_show_added_tokens(mesh: TinyMesh, grown: Grown) -> None:
    """As server-sent events, piece by piece."""
    (text,) = texts_of(grown, 1)
    prompt = grown.tokenizer.encode(text, add_special_tokens=False).ids
    body = {"model": "grown", "prompt": text, "temperature": 0, "max_tokens": NUM_NEW}
    body |= {"ignore_eos": True, "stream": True}
    pieces = []
    url = f"{mesh.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S, trust_env=False) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces += [one["text"] for one in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == grown.tokenizer.decode(grown.ids(prompt))


def test_added_ids_are_ids_like_others(mesh: TinyMesh, grown: Grown) -> None:
    """In biases, stops and log-probabilities of prompts; a grammar allows none of them."""
    (text,) = texts_of(grown, 1)
    prompt = grown.tokenizer.encode(text, add_special_tokens=False).ids
    body = {"model": "grown", "prompt": text, "temperature": 0, "max_tokens": NUM_NEW}

    def complete_with(**fields: Any) -> dict[str, Any]:
        answer = post(mesh, "/v1/completions", {**body, "ignore_eos": True, **fields})
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    verse = VOCAB + 2
    assert complete_with(logit_bias={verse: 100})["text"] == NUM_NEW * "<verse>"
    stopped = complete_with(logit_bias={verse: 100}, stop_token_ids=[verse])
    assert stopped["finish_reason"] == "stop"
    found = re.fullmatch(
        "[a-f]{6}", complete_with(structured_outputs={"regex": "[a-f]{6}"})["text"]
    )
    assert found
    scores = complete_with(prompt_logprobs=1, max_tokens=1)["prompt_logprobs"]
    with torch.inference_mode():
        logits = grown.model(input_ids=torch.tensor([prompt])).logits[0].double()
    for position, token in enumerate(prompt[1:], 1):
        expected = float(logits[position - 1].log_softmax(-1)[token])
        tolerance = 1e-4 * float(logits[position - 1].abs().max())
        assert abs(scores[position][str(token)]["logprob"] - expected) <= tolerance
