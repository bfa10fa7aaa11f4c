"""Both faces over real sockets, with workers that answer by scripted tokens."""

from __future__ import annotations

import asyncio
import bisect
import gc
import itertools
import json
import random
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from weft.gateway.api.grpc import service
from weft.gateway.api.openai import answers
from weft.gateway.generation.answer import Answer
from weft.gateway.warnings import warn
from weft.testing.models.tiny_tokenizers import byte_fallback_bpe, byte_level_bpe
from weft.testing.services.fake_decode import FakeWorker, Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import common_pb2, decode_pb2, gateway_pb2, openai_pb2

TEXT = "Hello 你好, naïve 🎉👩‍👩‍👧 world! the end"
USER = [{"role": "user", "content": "hi"}]
RUN = 8
"""Tokens that may come at once."""


@pytest.fixture
async def mesh(tmp_path) -> AsyncIterator[Harness]:  # type: ignore[no-untyped-def]
    tokenizer = byte_level_bpe()
    end = tokenizer.token_to_id("<|im_end|>")

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        variants = [TEXT, "second " + TEXT, "third"]
        return Script(
            tokens=[
                [*tokenizer.encode(text, add_special_tokens=False).ids, end] for text in variants
            ]
        )

    async with gateway(tmp_path, script) as harness:
        yield harness


async def test_requests_that_have_ended_leave_memory_at_once(
    mesh: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when the garbage collector comes: prompts and media may be large."""
    kept, submit = list[weakref.ref[Answer]](), Answer.submit

    def submitted(answer: Answer, *given: Any) -> None:
        kept.append(weakref.ref(answer))
        submit(answer, *given)

    monkeypatch.setattr(Answer, "submit", submitted)
    body = {"model": MODEL, "messages": USER, "n": 3}
    gc.disable()
    try:
        await mesh.json("ChatCompletions", body)
        await mesh.events("ChatCompletions", body | {"stream": True})
        async with asyncio.timeout(60):
            while any(answer() is not None for answer in kept):
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
    assert len(kept) == 2


async def test_chat_whole_answer(mesh: Harness) -> None:
    body = {"model": MODEL, "messages": USER, "weft_timeline": True}
    answer = await mesh.json("ChatCompletions", body)
    answers.ChatAnswer.model_validate_json(json.dumps(answer))
    choice = answer["choices"][0]
    unasked = dict.fromkeys(("refusal", "reasoning", "reasoning_content"))
    assert choice["message"] == {"role": "assistant", "content": TEXT, **unasked}
    assert choice["finish_reason"] == "stop"
    prompt = mesh.ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert mesh.workers[0].prompts == [prompt]
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(mesh.ids(TEXT)) + 1,
        "total_tokens": len(prompt) + len(mesh.ids(TEXT)) + 1,
        "prompt_tokens_details": {"cached_tokens": len(prompt) // 2, "audio_tokens": 0},
    }
    assert answer["weft"]["request_id"] == answer["id"]
    assert answer["weft"]["timeline"]["worker_id"] == "decode-0"
    plain = await mesh.json("ChatCompletions", {"model": MODEL, "messages": USER})
    assert "weft" not in plain


async def test_chat_stream(mesh: Harness) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": USER,
        "n": 3,
        "stream_options": {"include_usage": True},
    }
    events = await mesh.events("ChatCompletions", body)
    for event in events:
        answers.ChatChunk.model_validate_json(json.dumps(event))
        assert "\ufffd" not in json.dumps(event, ensure_ascii=False)
    assert len({event["id"] for event in events}) == 1
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] > 0
    assert all(event["usage"] is None for event in events[:-1])
    for index, expected in enumerate([TEXT, "second " + TEXT, "third"]):
        mine = [c for event in events for c in event["choices"] if c["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert "".join(c["delta"].get("content") or "" for c in mine) == expected
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1]["delta"] == {}
    plain = await mesh.events("ChatCompletions", {"model": MODEL, "messages": USER})
    assert all("usage" not in event for event in plain)
    assert plain[-1]["choices"][0]["finish_reason"] == "stop"


async def test_sampling_reaches_the_worker_alike_from_both_faces(mesh: Harness) -> None:
    rng = random.Random(mesh.app.server.address)
    values: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": rng.uniform(0.1, 1),
        "top_k": rng.randrange(100),
        "min_p": rng.random(),
        "repetition_penalty": rng.uniform(0.5, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "seed": rng.randrange(2**63),
        "n": 2,
        "logit_bias": {str(rng.randrange(300)): rng.uniform(-100, 100) for _ in range(3)},
    }
    stop: dict[str, Any] = {"max_tokens": 7, "min_tokens": 2, "stop_token_ids": [11, 12]}
    body = {
        "model": MODEL,
        "messages": USER,
        **values,
        **stop,
        "logprobs": True,
        "top_logprobs": 0,
        "cache_salt": "tenant",
        "session_id": "chat",
        "end_session": True,
        "priority": -7,
        "stop": "never",
        "user": "someone",
        "metadata": {"a": [1]},
        "tools": None,
    }
    await mesh.json("ChatCompletions", body)
    bias = {int(k): v for k, v in values.pop("logit_bias").items()}
    request = gateway_pb2.ChatRequest(
        model=MODEL,
        messages=[gateway_pb2.ChatMessage(role="user", content="hi")],
        sampling=common_pb2.SamplingParams(**values, logit_bias=bias),
        stop=common_pb2.StopCriteria(**stop, stop=["never"]),
        logprobs=common_pb2.LogprobOptions(),
        cache_salt="tenant",
        session_id="chat",
        end_session=True,
        priority=-7,
    )
    async for _ in mesh.typed.Chat(request):
        pass
    rest, typed = mesh.workers[0].submits
    assert rest.HasField("logprobs")
    assert list(rest.stop.stop) == []
    assert sorted(rest.stop.stop_token_ids) == sorted([mesh.end, 11, 12])
    assert 500 < rest.total_timeout.ToSeconds() <= 600  # What is left of it.
    for submit in (rest, typed):
        for name in ("request_id", "stream", "first_token_timeout", "total_timeout", "traceparent"):
            submit.ClearField(name)  # type: ignore[arg-type]
    assert rest == typed
    assert rest.priority == -7
    assert (rest.session_id, rest.end_session) == ("chat", True)


@pytest.mark.parametrize("face", ["rest", "typed"])
async def test_the_end_of_a_session_reaches_every_decode_worker(mesh: Harness, face: str) -> None:
    async def end(session_id: str, cache_salt: str) -> int:
        fields = {"session_id": session_id, "cache_salt": cache_salt}
        if face == "rest":
            return int((await mesh.json("EndSession", fields))["workers"])
        ending = gateway_pb2.EndSessionRequest(**fields)
        return int((await mesh.typed.EndSession(ending)).workers)

    assert await end("chat", "tenant") == len(mesh.workers)
    await mesh.wait(lambda: all(worker.session_ends for worker in mesh.workers))
    (told,) = mesh.workers[0].session_ends
    assert (told.session_id, told.cache_salt) == ("chat", "tenant")
    for wrong, salt in (("", ""), ("x" * 129, ""), ("chat", "x" * (1 << 20))):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await end(wrong, salt)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_last_request_of_a_session_ends_it_on_all_workers(tmp_path: Path) -> None:
    """An earlier one may have been on any of them."""

    def plain(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[prompt[:1]])

    async with gateway(tmp_path, plain, num_decode=3) as mesh:
        chat = {"messages": USER, "session_id": "chat", "cache_salt": "tenant"}
        await mesh.json("ChatCompletions", chat)
        await mesh.json("ChatCompletions", {**chat, "end_session": True})
        last = [worker for worker in mesh.workers if any(s.end_session for s in worker.submits)]
        assert len(last) == 1
        others = [worker for worker in mesh.workers if worker is not last[0]]
        await mesh.wait(lambda: all(worker.session_ends for worker in others))
        told = [(end.session_id, end.cache_salt) for one in others for end in one.session_ends]
        assert told == [("chat", last[0].submits[-1].cache_salt)] * 2
        assert not last[0].session_ends


async def test_seed_is_drawn_when_absent(mesh: Harness) -> None:
    for _ in range(2):
        await mesh.json("ChatCompletions", {"messages": USER})
    await mesh.json("ChatCompletions", {"messages": USER, "seed": -2, "temperature": None})
    seeds = [submit.sampling.seed for submit in mesh.workers[0].submits]
    assert seeds[0] != seeds[1]
    assert seeds[2] == 2**64 - 2
    assert all(submit.sampling.HasField("seed") for submit in mesh.workers[0].submits)


async def test_prompts_of_a_request_draw_a_seed_each_unless_one_is_given(mesh: Harness) -> None:
    for given in (None, 11):
        body = {"prompt": ["the same"] * 4, "n": 2, "seed": given, "max_tokens": 2}
        await mesh.json("Completions", body)
    seeds = [submit.sampling.seed for submit in mesh.workers[0].submits]
    assert len(set(seeds[:4])) == 4
    assert seeds[4:] == [11] * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_are_never_shown(mesh: Harness, stream: bool) -> None:
    body = {"messages": USER, "stop": ["o wor", "🎉👩", "Hello there"]}
    expected = TEXT[: TEXT.index("🎉👩")]
    if stream:
        events = await mesh.events("ChatCompletions", body)
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        answer = await mesh.json("ChatCompletions", body)
        text = answer["choices"][0]["message"]["content"]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert 0 < answer["usage"]["completion_tokens"] < len(mesh.ids(TEXT))
    assert text == expected
    await mesh.wait(lambda: mesh.workers[0].cancels)
    assert mesh.workers[0].cancels[0].sample == 0
    kept = await mesh.json("ChatCompletions", {**body, "include_stop_str_in_output": True})
    assert kept["choices"][0]["message"]["content"] == expected + "🎉👩"


@pytest.mark.parametrize(
    ("method", "prompt"),
    [("ChatCompletions", {"messages": USER}), ("Completions", {"prompt": "x", "max_tokens": 60})],
)
async def test_what_stopped_a_text_is_told(
    mesh: Harness, method: str, prompt: dict[str, Any]
) -> None:
    first, *_, last = mesh.ids(TEXT)
    cases: list[tuple[dict[str, Any], str | int | None]] = [
        ({}, None),
        ({"max_tokens": 2}, None),
        ({"stop": ["never", "🎉👩"]}, "🎉👩"),
        ({"stop_token_ids": [last]}, last),
        ({"stop_token_ids": [first]}, first),
        ({"stop_token_ids": [mesh.end]}, None),
        ({"stop_token_ids": [mesh.end], "ignore_eos": True}, mesh.end),
    ]
    for fields, expected in cases:
        for more in ({}, {"return_token_ids": True}):
            body = {**prompt, **fields, **more}
            (choice,) = (await mesh.json(method, body))["choices"]
            assert choice["stop_reason"] == expected
            events = await mesh.events(method, body)
            *before, end = [event["choices"][0] for event in events]
            assert (end["stop_reason"], end["finish_reason"]) == (expected, choice["finish_reason"])
            assert not any("stop_reason" in one for one in before)


async def test_an_echo_alone_is_stopped_by_nothing(mesh: Harness) -> None:
    body = {"prompt": "x", "echo": True, "max_tokens": 0, "stop_token_ids": mesh.ids(TEXT)[:1]}
    (choice,) = (await mesh.json("Completions", body))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("x", "length", None)


@pytest.mark.parametrize("place", range(RUN))
async def test_a_stop_string_ends_a_run_of_tokens_where_it_is(tmp_path: Path, place: int) -> None:
    """As many come in one step where drafts were right; those behind the stop string never were."""
    tokenizer = byte_level_bpe()
    letters = "abcdefghijklmnopqrstuvwxyz"
    ids = [tokenizer.token_to_id(letter) for letter in letters]

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[ids], chunk=RUN, top_logprobs=0)

    at = 2 * RUN + place
    async with gateway(tmp_path, script) as mesh:
        body = {"messages": USER, "stop": [letters[at]], "logprobs": True}
        answer = await mesh.json("ChatCompletions", body)
        await mesh.wait(lambda: mesh.workers[0].cancels)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == letters[:at]
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == at + 1
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == list(letters[: at + 1])


async def test_length_and_ignored_eos(mesh: Harness) -> None:
    for older in ({}, {"max_tokens": 2}):
        body = {"messages": USER, "max_completion_tokens": 3, **older}
        answer = await mesh.json("ChatCompletions", body)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 3
    await mesh.json("ChatCompletions", {"messages": USER, "ignore_eos": True})
    assert list(mesh.workers[0].submits[-1].stop.stop_token_ids) == []
    body = {"messages": USER, "skip_special_tokens": False, "include_stop_str_in_output": True}
    answer = await mesh.json("ChatCompletions", body)
    assert answer["choices"][0]["message"]["content"] == TEXT + "<|im_end|>"


async def test_completions_prompts(mesh: Harness) -> None:
    ids = mesh.ids("the fox")
    for prompt, expected in [
        ("the fox", [ids]),
        (["the fox", "a"], [ids, mesh.ids("a")]),
        (ids, [ids]),
        ([ids, [5]], [ids, [5]]),
    ]:
        mesh.workers[0].prompts.clear()
        body = {"model": MODEL, "prompt": prompt, "n": 2, "max_tokens": 40, "echo": False}
        answer = await mesh.json("Completions", body)
        answers.CompletionAnswer.model_validate_json(json.dumps(answer))
        assert mesh.workers[0].prompts == expected
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [TEXT, "second " + TEXT] * len(expected)
        assert [c["index"] for c in answer["choices"]] == list(range(len(texts)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    default = await mesh.json("Completions", {"prompt": "x"})
    assert default["usage"]["completion_tokens"] == 16


async def test_completions_stream_and_echo(mesh: Harness) -> None:
    body = {"prompt": ["the fox", "a"], "echo": True, "max_tokens": 50}
    answer = await mesh.json("Completions", body)
    assert [c["text"] for c in answer["choices"]] == ["the fox" + TEXT, "a" + TEXT]
    events = await mesh.events("Completions", body)
    for event in events:
        answers.CompletionAnswer.model_validate_json(json.dumps(event))
    for index in range(2):
        mine = [c for event in events for c in event["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in mine) == answer["choices"][index]["text"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
    by_ids = await mesh.json("Completions", {**body, "prompt": mesh.ids("the fox")})
    assert by_ids["choices"][0]["text"] == "the fox" + TEXT


@pytest.mark.parametrize("top", [0, 2])
async def test_chat_logprobs(mesh: Harness, top: int) -> None:
    body = {"messages": USER, "logprobs": True, "top_logprobs": top}
    answer = await mesh.json("ChatCompletions", body)
    answers.ChatAnswer.model_validate_json(json.dumps(answer))
    content = answer["choices"][0]["logprobs"]["content"]
    ids = [*mesh.ids(TEXT), mesh.end]
    assert len(content) == len(ids)
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == TEXT
    assert [entry["logprob"] for entry in content] == [-0.5 - i % 3 for i in range(len(ids))]
    assert all(len(entry["top_logprobs"]) == top for entry in content)
    events = await mesh.events("ChatCompletions", body)
    streamed = [
        entry
        for event in events
        if event["choices"][0]["logprobs"]
        for entry in event["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == content


async def test_token_ids_beside_texts(mesh: Harness) -> None:
    """Each once, in whole answers and in streams; only where they are asked for."""
    prompt = mesh.ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = [[*mesh.ids(text), mesh.end] for text in (TEXT, "second " + TEXT)]
    body: dict[str, Any] = {"messages": USER, "n": 2, "return_token_ids": True}
    for more in ({}, {"logprobs": True}):
        answer = await mesh.json("ChatCompletions", body | more)
        answers.ChatAnswer.model_validate_json(json.dumps(answer))
        assert answer["prompt_token_ids"] == prompt
        assert [choice["token_ids"] for choice in answer["choices"]] == ids
        options = {"stream_options": {"include_usage": True}}
        events = await mesh.events("ChatCompletions", body | more | options)
        for event in events:
            answers.ChatChunk.model_validate_json(json.dumps(event))
        assert [event.get("prompt_token_ids") for event in events] == [
            prompt, *[None] * (len(events) - 1)
        ]  # fmt: skip
        assert streamed_ids(events, 2) == ids
    body = {"prompt": ["the fox", "a"], "max_tokens": 50, "return_token_ids": True}
    answer = await mesh.json("Completions", body)
    prompts = [mesh.ids(text) for text in body["prompt"]]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == prompts
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids[0]] * 2
    events = await mesh.events("Completions", body)
    for event in events:
        answers.CompletionAnswer.model_validate_json(json.dumps(event))
    assert streamed_ids(events, 2) == [ids[0]] * 2
    for index in range(2):
        mine = [c for event in events for c in event["choices"] if c["index"] == index]
        assert [c.get("prompt_token_ids") for c in mine] == [
            prompts[index], *[None] * (len(mine) - 1)
        ]  # fmt: skip
    plain = await mesh.json("ChatCompletions", {"messages": USER})
    assert plain["prompt_token_ids"] is plain["choices"][0]["token_ids"] is None
    assert "token_ids" not in json.dumps(await mesh.events("ChatCompletions", {"messages": USER}))


def streamed_ids(events: list[dict[str, Any]], count: int) -> list[list[int]]:
    choices = [choice for event in events for choice in event["choices"]]
    return [
        [one for c in choices if c["index"] == index for one in c.get("token_ids", [])]
        for index in range(count)
    ]


async def test_completion_logprobs(mesh: Harness) -> None:
    body = {"prompt": "x", "logprobs": 2, "max_tokens": 6}
    answer = await mesh.json("Completions", body)
    answers.CompletionAnswer.model_validate_json(json.dumps(answer))
    logprobs = answer["choices"][0]["logprobs"]
    tokens = [mesh.app.model.vocabulary.token_text(i) for i in mesh.ids(TEXT)[:6]]
    assert logprobs["tokens"] == tokens
    lengths = [0]
    for token in tokens[:-1]:
        lengths.append(lengths[-1] + len(token))
    assert logprobs["text_offset"] == lengths
    assert all(token in top for token, top in zip(tokens, logprobs["top_logprobs"], strict=True))
    events = await mesh.events("Completions", body)
    parts = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    assert [offset for part in parts for offset in part["text_offset"]] == lengths


async def test_completion_logprobs_of_parts_of_characters(mesh: Harness) -> None:
    body = {"prompt": "x", "logprobs": 20, "max_tokens": 500}
    choice = (await mesh.json("Completions", body))["choices"][0]
    logprobs, text = choice["logprobs"], choice["text"]
    vocabulary = mesh.app.model.vocabulary
    parts = [vocabulary.token_bytes(token_id) for token_id in mesh.ids(text)]
    ends = list(itertools.accumulate(map(len, parts), initial=0))
    starts = list(itertools.accumulate((len(char.encode()) for char in text), initial=0))
    expected = [bisect.bisect_right(starts, end) - 1 for end in ends[:-1]]
    assert any(start not in starts for start in ends)  # a token that begins within a character
    assert logprobs["text_offset"][: len(parts)] == expected
    halves = {name for name in logprobs["tokens"] if name.startswith("bytes:")}
    assert halves
    assert not any("\ufffd" in name for top in logprobs["top_logprobs"] for name in top)
    assert all(len(top) >= 20 for top in logprobs["top_logprobs"])


async def test_typed_face(mesh: Harness) -> None:
    request = gateway_pb2.CompleteRequest(
        text="the fox", stop=common_pb2.StopCriteria(max_tokens=40)
    )
    whole = [message async for message in mesh.typed.Complete(request)]
    request.stream = True
    parts = [message async for message in mesh.typed.Complete(request)]
    assert len(whole) == 1
    assert len(parts) > 2
    assert "".join(c.text for m in parts for c in m.choices) == TEXT == whole[0].choices[0].text
    ids = [*mesh.ids(TEXT), mesh.end]
    assert [i for m in parts for c in m.choices for i in c.token_ids] == ids
    assert list(whole[0].choices[0].token_ids) == ids
    for messages in (whole, parts):
        assert messages[-1].usage.completion_tokens == len(ids)
        assert messages[-1].timeline.worker_id == "decode-0"
    finishes = [c.finish_reason for m in parts for c in m.choices]
    assert finishes[-1] == common_pb2.FINISH_REASON_STOP
    assert set(finishes[:-1]) == {common_pb2.FINISH_REASON_UNSPECIFIED}


async def test_tokenize_and_detokenize(mesh: Harness) -> None:
    ids = mesh.ids(TEXT)
    answer = await mesh.json("TokenizeText", {"prompt": TEXT, "return_token_strs": True})
    answers.TokenizeAnswer.model_validate_json(json.dumps(answer))
    assert answer["tokens"] == ids
    assert (answer["count"], answer["max_model_len"]) == (len(ids), 512)
    chat = await mesh.json("TokenizeText", {"messages": USER, "add_generation_prompt": False})
    assert chat["tokens"] == mesh.ids("<|im_start|>user\nhi<|im_end|>\n")
    assert await mesh.json("DetokenizeTokens", {"tokens": ids}) == {"prompt": TEXT}
    typed = await mesh.typed.Tokenize(gateway_pb2.TokenizeRequest(text=TEXT))
    assert list(typed.tokens.ids) == ids
    back = await mesh.typed.Detokenize(gateway_pb2.DetokenizeRequest(tokens=typed.tokens))
    assert back.text == TEXT


async def test_models_ready_and_document(mesh: Harness) -> None:
    models = json.loads((await mesh.openai.Models(Empty())).data)
    answers.ModelListAnswer.model_validate_json(json.dumps(models))
    assert [model["id"] for model in models["data"]] == [MODEL]
    one = await mesh.openai.RetrieveModel(openai_pb2.RetrieveModelRequest(model=MODEL))
    assert json.loads(one.data) == models["data"][0]
    assert json.loads((await mesh.openai.Ready(Empty())).data) == {"status": "ready"}
    document = json.loads((await mesh.openai.OpenApi(Empty())).data)
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    references = _references(document)
    assert references
    assert {ref.rsplit("/", 1)[1] for ref in references} <= set(schemas)
    assert "messages" in schemas["ChatBody"]["properties"]
    fleet = await mesh.typed.GetFleet(gateway_pb2.GetFleetRequest())
    assert [(w.worker_id, w.role, w.healthy) for w in fleet.workers] == [
        ("decode-0", "decode", True)
    ]


def _references(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [ref for item in value.values() for ref in _references(item)]
    if isinstance(value, list):
        return [ref for item in value for ref in _references(item)]
    return []


async def test_content_parts_and_template_arguments(mesh: Harness) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    await mesh.json("ChatCompletions", {"messages": [{"role": "user", "content": parts}]})
    assert mesh.workers[0].prompts[0] == mesh.ids(
        "<|im_start|>user\nh\ni<|im_end|>\n<|im_start|>assistant\n"
    )
    body = {
        "messages": [*USER, {"role": "assistant", "content": "I am"}],
        "continue_final_message": True,
    }
    await mesh.json("ChatCompletions", body)
    assert mesh.workers[0].prompts[1] == mesh.ids(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nI am"
    )


async def test_what_sdks_send_without_meaning_it(mesh: Harness) -> None:
    conversation = [*USER, {"role": "assistant"}, {"role": "assistant", "content": None}, *USER]
    said = [*USER, *([{"role": "assistant", "content": ""}] * 2), *USER]
    plain = {"messages": said, "max_tokens": 5, "seed": 1}
    same = {
        **plain,
        "messages": conversation,
        "logprobs": False,
        "top_logprobs": 0,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "none",
        "echo": False,
        "no_stop_trim": False,
        "vllm_xargs": {},
    }
    for body in (plain, same, {**plain, "tools": [], "tool_choice": "auto", "functions": []}):
        await mesh.json("ChatCompletions", body)
    assert mesh.workers[0].prompts == [mesh.workers[0].prompts[0]] * 3
    assert not any(submit.HasField("logprobs") for submit in mesh.workers[0].submits)


async def test_byte_fallback_model_keeps_leading_space(tmp_path) -> None:  # type: ignore[no-untyped-def]
    tokenizer = byte_fallback_bpe()
    text = "the fox 你好 the"
    tokens = tokenizer.encode(text).ids  # begins with "▁the"

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[tokens], chunk=2)

    async with gateway(tmp_path, script, tokenizer=tokenizer) as mesh:
        answer = await mesh.json("Completions", {"prompt": "hello", "max_tokens": 60})
        assert answer["choices"][0]["text"] == " " + text


async def test_long_prompt_is_split_and_put_together(tmp_path) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(7)
    ids = [rng.randrange(3, 300) for _ in range(70_000)]

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[[70, 71]])

    async with gateway(tmp_path, script, max_context_tokens=80_000) as mesh:
        worker: FakeWorker = mesh.workers[0]
        await mesh.json("Completions", {"prompt": ids, "max_tokens": 2})
        assert worker.prompts == [ids]
        assert worker.submits[0].ByteSize() < 256 << 10


async def test_typed_answers_have_the_warnings(
    mesh: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def messages(given: Any) -> Any:
        warn("messages[0].name", "left out (a test)")
        return translate(given)

    translate = service._messages
    monkeypatch.setattr(service, "_messages", messages)
    hello = [gateway_pb2.ChatMessage(role="user", content="hi")]
    for stream in (False, True):
        call = mesh.typed.Chat(gateway_pb2.ChatRequest(messages=hello, stream=stream))
        *others, last = [message async for message in call]
        assert list(last.warnings) == ["messages[0].name: left out (a test)"]
        assert not any(one.warnings for one in others)
        told = dict(await call.initial_metadata())["x-weft-warnings"]
        assert told == last.warnings[0]
    counted = await mesh.typed.Tokenize(gateway_pb2.TokenizeRequest(messages=hello))
    assert list(counted.warnings) == ["messages[0].name: left out (a test)"]
