"""Log-probabilities of a prompt's tokens, over both faces, also when their owner is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer, processors
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import PeerUnavailable, WeftError
from weft.gateway.api.openai import answers
from weft.gateway.api.openai.prompt_logprobs import text_offsets
from weft.gateway.generation import pipeline
from weft.gateway.text.detokenize import Vocabulary
from weft.gateway.validate import MAX_PROMPT_LOGPROBS
from weft.testing.models.tiny_tokenizers import CORPUS, byte_fallback_bpe, byte_level_bpe
from weft.testing.services.fake_decode import FakeWorker, Script, prompt_score
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import common_pb2, decode_pb2, gateway_pb2

TOKENIZER = byte_level_bpe()
ANSWER = "An answer, 你好."
TOKENS = TOKENIZER.encode(ANSWER).ids
VOCABULARY_SIZE = TOKENIZER.get_vocab_size()
NEVER = 10**9


def answering(*break_after: int) -> Callable[[decode_pb2.Submit, list[int]], Script]:
    """Attempt i cuts its Session after break_after[i - 1] steps; later ones finish."""

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        steps = break_after[submit.attempt - 1] if submit.attempt <= len(break_after) else NEVER
        return Script(tokens=[TOKENS], break_after=steps, score_chunk=random.randrange(1, 9))

    return script


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Harness]:
    async with gateway(tmp_path, answering()) as harness:
        yield harness


def some_text() -> str:
    """A piece of the corpus that may begin or end anywhere, within a word too."""
    line = "".join(random.sample(CORPUS, 2))
    start = random.randrange(len(line) // 2)
    return line[start : start + random.randrange(1, 60)]


def some_ids(count: int) -> list[int]:
    return [random.randrange(VOCABULARY_SIZE) for _ in range(count)]


def expected_scores(ids: list[int], num_top: int) -> list[common_pb2.TokenLogprob]:
    """What the fake worker says of a prompt."""
    return [
        prompt_score(position, token_id, num_top, VOCABULARY_SIZE)
        for position, token_id in enumerate(ids)
    ][1:]


def listed(vocabulary: Vocabulary, ids: list[int], num_top: int) -> list[Any]:
    """The same, in vLLM's form."""
    found: list[Any] = [None]
    for entry in expected_scores(ids, num_top):
        rank = next(
            (i for i, one in enumerate(entry.top, 1) if one.token_id == entry.token_id), None
        )
        of_position = {str(entry.token_id): (entry.logprob, rank, entry.token_id)}
        for other, one in enumerate(entry.top, 1):
            of_position[str(one.token_id)] = (one.logprob, other, one.token_id)
        found.append(
            {
                key: {
                    "logprob": logprob,
                    "rank": place,
                    "decoded_token": vocabulary.token_text(token_id),
                }
                for key, (logprob, place, token_id) in of_position.items()
            }
        )
    return found


async def completion(mesh: Harness, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a completion; checks the answer's form."""
    answer = await mesh.json("Completions", body)
    answers.CompletionAnswer.model_validate_json(json.dumps(answer))
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


async def refused(call: Any) -> WeftError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


# ---- echo with logprobs --------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
@pytest.mark.parametrize("num_top", [0, 1, 7])
async def test_echo_with_logprobs(mesh: Harness, form: str, num_top: int) -> None:
    """As evaluation harnesses use it: a prompt's tokens, then those of the answer."""
    texts = [some_text() for _ in range(3)]
    prompts: list[Any] = [mesh.ids(text) for text in texts] if "ids" in form else texts
    many = form in ("texts", "lists of ids")
    body = {"prompt": prompts if many else prompts[0], "max_tokens": 1, "temperature": 0}
    choices = await completion(mesh, {**body, "echo": True, "logprobs": num_top})
    assert [choice["index"] for choice in choices] == list(range(3 if many else 1))
    for choice, text in zip(choices, texts, strict=False):
        ids = mesh.ids(text)
        logprobs, entries = choice["logprobs"], expected_scores(ids, num_top)
        assert choice["text"].startswith(text)
        assert {len(values) for values in logprobs.values()} == {len(ids) + 1}
        assert logprobs["token_logprobs"][:-1] == [None, *(entry.logprob for entry in entries)]
        assert logprobs["top_logprobs"][0] is None
        # What is the most likely token is told by the alternatives.
        for token, best, entry in zip(
            logprobs["tokens"][1:-1], logprobs["top_logprobs"][1:-1], entries, strict=True
        ):
            assert best[token] == entry.logprob
            if num_top and best[token] < -0.5:
                assert max(best, key=best.get) != token
        offsets = [*logprobs["text_offset"], len(choice["text"])]
        whole = [name for name in logprobs["tokens"] if not name.startswith("bytes:")]
        pieces = [choice["text"][a:b] for a, b in itertools.pairwise(offsets)]
        if len(whole) == len(ids) + 1:
            assert pieces[:-1] == whole[:-1]
        assert offsets[len(ids)] == len(text)
    (plain,) = await completion(mesh, {**body, "prompt": texts[0], "echo": True})
    assert plain["logprobs"] is None
    assert plain["prompt_logprobs"] is None


@pytest.mark.parametrize("logprobs", [None, 0, 3])
async def test_an_echo_of_prompts_alone(mesh: Harness, logprobs: int | None) -> None:
    texts = [some_text() for _ in range(2)]
    body = {"prompt": texts, "echo": True, "max_tokens": 0}
    if logprobs is not None:
        body["logprobs"] = logprobs
    answer = await mesh.json("Completions", body)
    assert answer["usage"]["completion_tokens"] == 0
    num_prompt_tokens = sum(len(mesh.ids(text)) for text in texts)
    assert answer["usage"]["prompt_tokens"] == num_prompt_tokens
    assert answer["usage"]["total_tokens"] == num_prompt_tokens
    for choice, text in zip(answer["choices"], texts, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            scores = [entry.logprob for entry in expected_scores(mesh.ids(text), logprobs)]
            assert choice["logprobs"]["token_logprobs"] == [None, *scores]
            assert {len(values) for values in choice["logprobs"].values()} == {1 + len(scores)}
    for wrong in ({"stream": True}, {"echo": False}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.post("Completions", {**body, "logprobs": None, **wrong})
        assert from_rpc_error(caught.value).param == "max_tokens"


async def test_a_prompt_of_one_token_has_none(mesh: Harness) -> None:
    body = {"prompt": [7], "echo": True, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 2}
    (choice,) = await completion(mesh, body)
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["token_logprobs"]) == 3
    assert not mesh.workers[0].submits[0].HasField("prompt_logprobs")


@pytest.mark.parametrize("make", [byte_level_bpe, byte_fallback_bpe])
async def test_offsets_are_those_of_the_text(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    vocabulary = Vocabulary(tokenizer)
    for _ in range(200):
        text = some_text().strip() or "x"
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        offsets = text_offsets(vocabulary, ids, text)
        assert offsets == sorted(offsets)
        for number, offset in enumerate(offsets):
            before = tokenizer.decode(ids[:number], skip_special_tokens=False)
            if "\ufffd" not in before:  # else it begins within a character
                assert text[:offset] == before
    # Of any ids, whose text may have no valid characters.
    for _ in range(200):
        ids = [random.randrange(tokenizer.get_vocab_size()) for _ in range(20)]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        offsets = text_offsets(vocabulary, ids, text)
        assert offsets == sorted(offsets)
        assert all(0 <= offset <= len(text) for offset in offsets)


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_token_put_in_front_has_no_length(written: int) -> None:
    """Also where the client writes it as well."""
    tokenizer = byte_level_bpe()
    first = "<|im_start|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
    )
    text = first * written + "the fox"
    ids = tokenizer.encode(text).ids
    offsets = text_offsets(Vocabulary(tokenizer), ids, text)
    assert offsets[: 2 + written] == [0, *(i * len(first) for i in range(written + 1))]
    assert len(offsets) == len(ids)


# ---- prompt_logprobs -----------------------------------------------------------------------------


async def test_prompt_logprobs_of_completions(mesh: Harness) -> None:
    vocabulary = mesh.app.model.vocabulary
    num_top = random.randrange(21)
    lists = [some_ids(random.randrange(1, 40)) for _ in range(3)]
    body = {"prompt": lists, "prompt_logprobs": num_top, "max_tokens": 60}
    choices = await completion(mesh, body)
    for choice, ids in zip(choices, lists, strict=True):
        assert choice["prompt_logprobs"] == listed(vocabulary, ids, num_top)
        assert choice["logprobs"] is None
        assert choice["text"] == ANSWER


@pytest.mark.parametrize(("num_listed", "num_echoed"), [(2, 5), (5, 2), (0, 1)])
async def test_both_forms_at_once(mesh: Harness, num_listed: int, num_echoed: int) -> None:
    """The worker is asked for the larger number of alternatives; each form shows its own."""
    ids = some_ids(30)
    body = {"prompt": ids, "echo": True, "logprobs": num_echoed, "prompt_logprobs": num_listed}
    (choice,) = await completion(mesh, body)
    (submit,) = mesh.workers[0].submits
    assert submit.prompt_logprobs.top_logprobs == max(num_listed, num_echoed)
    assert submit.logprobs.top_logprobs == num_echoed
    entries = expected_scores(ids, 20)
    for of_token, top, entry in zip(
        choice["prompt_logprobs"][1:],
        choice["logprobs"]["top_logprobs"][1 : len(ids)],
        entries,
        strict=True,
    ):
        shown = {str(one.token_id) for one in entry.top[:num_listed]} | {str(entry.token_id)}
        assert set(of_token) == shown
        assert next(iter(of_token)) == str(entry.token_id)
        assert len(top) <= num_echoed + 1


async def test_prompt_logprobs_of_a_chat(mesh: Harness) -> None:
    body = {"messages": [{"role": "user", "content": some_text()}]}
    answer = await mesh.json("ChatCompletions", {**body, "prompt_logprobs": 3})
    answers.ChatAnswer.model_validate_json(json.dumps(answer))
    (ids,) = mesh.workers[0].prompts
    assert answer["prompt_logprobs"] == listed(mesh.app.model.vocabulary, ids, 3)
    assert answer["choices"][0]["message"]["content"] == ANSWER
    plain = await mesh.json("ChatCompletions", body)
    assert plain["prompt_logprobs"] is None
    assert not mesh.workers[0].submits[1].HasField("prompt_logprobs")


@pytest.mark.parametrize("num_top", [0, 4])
async def test_typed_face(mesh: Harness, num_top: int) -> None:
    options = common_pb2.LogprobOptions(top_logprobs=num_top)
    ids = some_ids(25)
    complete = gateway_pb2.CompleteRequest(
        token_ids=common_pb2.TokenIds(ids=ids), prompt_logprobs=options
    )
    (answer,) = [message async for message in mesh.typed.Complete(complete)]
    assert list(answer.choices[0].prompt_logprobs) == expected_scores(ids, num_top)
    chat = gateway_pb2.ChatRequest(
        messages=[gateway_pb2.ChatMessage(role="user", content="hi")], prompt_logprobs=options
    )
    (said,) = [message async for message in mesh.typed.Chat(chat)]
    prompt = mesh.workers[0].prompts[1]
    assert list(said.choices[0].prompt_logprobs) == expected_scores(prompt, num_top)
    for changed in ({"stream": True}, {"sampling": common_pb2.SamplingParams(n=2)}):
        complete.MergeFrom(gateway_pb2.CompleteRequest(**changed))  # type: ignore[arg-type]
        error = await refused(mesh.typed.Complete(complete))
        assert (error.grpc_code, error.param) == ("INVALID_ARGUMENT", "prompt_logprobs")
        complete.stream = False


async def test_too_many_are_refused(tmp_path: Path) -> None:
    num_top, num_prompts = 20, 4
    most = MAX_PROMPT_LOGPROBS // (1 + num_top) // num_prompts
    async with gateway(tmp_path, answering(), max_context_tokens=most + 100) as mesh:
        lists = [some_ids(most + 1) for _ in range(num_prompts)]
        body = {"prompt": lists, "prompt_logprobs": num_top, "max_tokens": 1}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.json("Completions", body)
        error = from_rpc_error(caught.value)
        assert (error.http_status, error.param) == (400, "prompt_logprobs")
        assert str(MAX_PROMPT_LOGPROBS) in error.message
        assert not mesh.workers[0].submits


async def test_all_requests_together_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "MAX_SCORES", 100)
    async with gateway(tmp_path, answering()) as mesh:
        body = {"prompt": some_ids(40), "prompt_logprobs": 1, "max_tokens": 1}
        for _ in range(3):  # What has ended takes no room.
            await mesh.json("Completions", body)
        found = await asyncio.gather(
            *(mesh.json("Completions", body) for _ in range(8)), return_exceptions=True
        )
        refused = [one for one in found if isinstance(one, grpc.aio.AioRpcError)]
        assert 0 < len(refused) < 8
        for one in refused:
            error = from_rpc_error(one)
            assert error.http_status == 429
            assert "log-probabilities of prompts" in error.message
        await mesh.json("Completions", body)


async def test_nobody_is_asked_to_fill_a_prompt_that_is_scored(tmp_path: Path) -> None:
    """Its owner computes all of it."""
    async with gateway(tmp_path, answering(), num_prefill=1) as mesh:
        body = {"prompt": some_ids(50), "max_tokens": 1}
        await mesh.json("Completions", {**body, "prompt_logprobs": 0})
        await mesh.json("Completions", body)
        fillers = [len(submit.prefill_candidates) for submit in mesh.workers[0].submits]
    assert fillers == [0, 1]


# ---- workers that are lost, and that err ---------------------------------------------------------


async def scored(mesh: Harness, ids: list[int]) -> gateway_pb2.CompleteResponse:
    """The answer to a prompt whose tokens are asked about; checks what it says of them."""
    request = gateway_pb2.CompleteRequest(
        token_ids=common_pb2.TokenIds(ids=ids),
        prompt_logprobs=common_pb2.LogprobOptions(top_logprobs=2),
    )
    (answer,) = [message async for message in mesh.typed.Complete(request)]
    assert answer.choices[0].text == ANSWER
    assert list(answer.choices[0].prompt_logprobs) == expected_scores(ids, 2)
    return answer


async def test_a_worker_lost_at_any_place(tmp_path: Path) -> None:
    """The next one is asked for all of them, but not where all had come."""
    chunk, place = 4, 0
    ids = some_ids(22)
    num_steps = math.ceil((len(ids) - 1) / chunk)
    """Steps with log-probabilities; the last of them has the first token, too."""

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        steps = place if submit.attempt == 1 else NEVER
        return Script(tokens=[TOKENS], break_after=steps, score_chunk=chunk)

    async with gateway(tmp_path, script, num_decode=2) as mesh:
        for place in range(num_steps + 3):
            for worker in mesh.workers:
                worker.submits.clear()
            answer = await scored(mesh, ids)
            submits = [submit for worker in mesh.workers for submit in worker.submits]
            asked = {one.attempt: one.HasField("prompt_logprobs") for one in submits}
            assert asked == {1: True, 2: place < num_steps}
            (lost,) = answer.timeline.lost_attempts
            assert lost.generated_tokens == max(0, place - num_steps + 1)


class Erring(FakeWorker):
    """Errs in a request's first attempt."""

    how: str

    def _send_scores(self, run, first, ids, event):  # type: ignore[no-untyped-def]
        send = super()._send_scores
        if run.submit.attempt > 1 or first == 1:
            send(run, first, ids, event)
        elif self.how == "wrong token":
            send(run, first, [*ids[:-1], (ids[-1] + 1) % VOCABULARY_SIZE], event)
        elif self.how == "gap":
            send(run, first + 1, ids[1:], event)
        elif self.how == "repeated":
            send(run, first, ids, event)
            send(run, 1, run.prompt[1 : first + 1], event)
        elif self.how == "repeated wrongly":
            send(run, first, ids, event)
            send(run, first, [(ids[0] + 1) % VOCABULARY_SIZE, *ids[1:]], event)
        elif self.how == "too many":
            send(run, first, [*run.prompt[first:], 5], event)
        elif self.how == "twice":
            send(run, first, ids, event)
            send(run, first, ids, event)


@pytest.mark.parametrize(
    "how", ["wrong token", "gap", "repeated wrongly", "too many", "tokens early"]
)
async def test_a_worker_that_errs_is_left(tmp_path: Path, how: str) -> None:
    async with gateway(tmp_path, answering(), num_decode=2) as mesh:
        for worker in mesh.workers:
            worker.__class__ = Erring
            worker.how = how  # type: ignore[attr-defined]
        answer = await scored(mesh, some_ids(40))
    (lost,) = answer.timeline.lost_attempts
    assert "log-probabilities of prompt tokens" in lost.message
    assert lost.generated_tokens == 0


@pytest.mark.parametrize("how", ["repeated", "twice"])
async def test_what_comes_twice_counts_once(tmp_path: Path, how: str) -> None:
    async with gateway(tmp_path, answering()) as mesh:
        mesh.workers[0].__class__ = Erring
        mesh.workers[0].how = how  # type: ignore[attr-defined]
        answer = await scored(mesh, some_ids(40))
    assert not answer.timeline.lost_attempts


async def test_a_worker_that_knows_none_of_it(tmp_path: Path) -> None:
    """One of an older release: the client hears of it, and gets no half answer."""

    class Old(FakeWorker):
        def _score(self, run, event):  # type: ignore[no-untyped-def]
            run.num_scored = len(run.prompt)

    async with gateway(tmp_path, answering(), max_attempts=2) as mesh:
        mesh.workers[0].__class__ = Old
        request = gateway_pb2.CompleteRequest(
            text="the fox", prompt_logprobs=common_pb2.LogprobOptions()
        )
        error = await refused(mesh.typed.Complete(request))
    assert isinstance(error, PeerUnavailable)
    assert "log-probabilities of prompt tokens" in error.message


async def test_cancelled_before_they_are_complete(tmp_path: Path) -> None:
    """The answer has those that came."""

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[TOKENS], score_chunk=3, hang_after=2)

    ids = some_ids(20)
    async with gateway(tmp_path, script) as mesh:
        body = {"prompt": ids, "echo": True, "logprobs": 1, "prompt_logprobs": 2}

        async def cancel() -> None:
            await mesh.wait(lambda: mesh.workers[0].submits)
            generation = mesh.app.pipeline._open[mesh.app.pipeline.running_ids[0]].generations
            await mesh.wait(lambda: len(generation[0].prompt_scores.entries) == 6)
            request = gateway_pb2.CancelRequest(request_id=mesh.app.pipeline.running_ids[0])
            assert (await mesh.typed.Cancel(request)).found

        (choice,), _ = await asyncio.gather(completion(mesh, body), cancel())
    assert choice["finish_reason"] == "abort"
    assert choice["prompt_logprobs"] == listed(mesh.app.model.vocabulary, ids, 2)[:7]
    assert len(choice["logprobs"]["tokens"]) == 7
