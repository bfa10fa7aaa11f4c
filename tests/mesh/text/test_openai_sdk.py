"""The unmodified `openai` SDK against the whole mesh: parameters, answers, errors, disconnects."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from weft.testing.meshes.local_mesh import MODEL, LocalMesh, wait_until
from weft.testing.meshes.mesh_calls import new_salt
from weft.testing.meshes.mesh_kinds import NUM_TOKENS, on
from weft.testing.meshes.mesh_prompts import BY_NAME, MeshPrompt, prose
from weft.testing.meshes.text_reference import Reference, TextReference

pytestmark = [pytest.mark.needs("go", "nixl"), pytest.mark.timeout(600), on("nixl")]

CHAT = BY_NAME["system"]
SHORT_CHAT = BY_NAME["capital"]
RAW = BY_NAME["english"]
LOGPROB_TOLERANCE = 1e-3


@pytest.fixture
async def client(mesh: LocalMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made


def greedy(case: MeshPrompt = CHAT, **more: Any) -> dict[str, Any]:
    """Arguments of a request that the reference knows the answer to."""
    content = {"messages": case.as_messages()} if case.is_chat else {"prompt": case.text}
    return {"model": MODEL, "temperature": 0, "max_tokens": NUM_TOKENS, **content, **more}


async def chat_text(client: openai.AsyncOpenAI, **arguments: Any) -> str:
    answer = await client.chat.completions.create(**arguments)
    content = answer.choices[0].message.content
    assert content is not None
    return str(content)


# ---- answers, whole and streamed ---------------------------------------------------------------


async def test_chat_whole_and_streamed(
    client: openai.AsyncOpenAI, reference: TextReference
) -> None:
    for prompt in (CHAT, SHORT_CHAT):
        expected = reference.of(prompt, NUM_TOKENS)
        text, num_tokens = reference.text(expected.token_ids), len(expected.token_ids)
        reason = "stop" if num_tokens < NUM_TOKENS else "length"
        whole = await client.chat.completions.create(**greedy(prompt))
        assert whole.object == "chat.completion"
        (choice,) = whole.choices
        assert (choice.message.role, choice.message.content) == ("assistant", text)
        assert choice.finish_reason == reason
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == len(expected.prompt_ids)
        assert whole.usage.completion_tokens == num_tokens
        assert whole.usage.total_tokens == len(expected.prompt_ids) + num_tokens

        stream = await client.chat.completions.create(**greedy(prompt, stream=True))
        chunks = [chunk async for chunk in stream]
        assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + [reason]
        assert len({chunk.id for chunk in chunks}) == 1


async def test_completions_whole_and_streamed(
    client: openai.AsyncOpenAI, reference: TextReference
) -> None:
    text = reference.text(reference.of(RAW, NUM_TOKENS).token_ids)
    whole = await client.completions.create(**greedy(RAW))
    assert (whole.object, whole.choices[0].text) == ("text_completion", text)
    assert whole.choices[0].finish_reason == "length"
    stream = await client.completions.create(**greedy(RAW, stream=True))
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_include_usage_adds_one_last_chunk(client: openai.AsyncOpenAI) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for stream in (
        await client.chat.completions.create(**greedy(**options)),
        await client.completions.create(**greedy(RAW, **options)),
    ):
        chunks: list[Any] = [chunk async for chunk in stream]
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == NUM_TOKENS


async def test_content_parts_are_text(client: openai.AsyncOpenAI) -> None:
    parts = [{"type": "text", "text": "What is the capital of Italy?"}]
    one = await chat_text(client, **greedy(messages=[{"role": "user", "content": parts}]))
    other = await chat_text(
        client, **greedy(messages=[{"role": "user", "content": parts[0]["text"]}])
    )
    assert one == other


async def test_prompts_as_texts_and_as_tokens(
    client: openai.AsyncOpenAI, reference: TextReference
) -> None:
    prompts = [BY_NAME[name] for name in ("english", "chinese", "json")]
    ids = [reference.prompt_ids(prompt) for prompt in prompts]
    texts = [reference.text(reference.of(prompt, NUM_TOKENS).token_ids) for prompt in prompts]
    for given in ([prompt.text for prompt in prompts], ids):
        answer = await client.completions.create(**greedy(RAW, prompt=given))
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.text for choice in answer.choices] == texts
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    alone = await client.completions.create(**greedy(RAW, prompt=ids[1]))
    assert [choice.text for choice in alone.choices] == texts[1:2]
    several = await client.completions.create(**greedy(RAW, prompt=ids, n=2))
    assert [choice.text for choice in several.choices] == [text for text in texts for _ in "12"]


async def test_echo(client: openai.AsyncOpenAI, reference: TextReference) -> None:
    text = RAW.text + reference.text(reference.of(RAW, NUM_TOKENS).token_ids)
    ids = reference.prompt_ids(RAW)
    for prompt in (RAW.text, ids):
        whole = await client.completions.create(**greedy(RAW, prompt=prompt, echo=True))
        assert whole.choices[0].text == text
        stream = await client.completions.create(
            **greedy(RAW, prompt=prompt, echo=True, stream=True)
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == text


async def test_a_text_is_scored_as_evaluations_ask_for_it(
    client: openai.AsyncOpenAI, reference: TextReference
) -> None:
    """Log-probabilities of given tokens, however much of them is cached and wherever the prefix
    was computed before; the sum of a continuation's, and whether it is the greedy one.
    """
    expected = reference.of(RAW, NUM_TOKENS)
    context, likely = expected.prompt_ids, expected.token_ids
    unlikely = [likely[-1], *likely[:-1]]
    prompts = [context + likely, context + unlikely]
    arguments = {"model": MODEL, "temperature": 0, "max_tokens": 1, "echo": True, "logprobs": 1}
    await client.completions.create(model=MODEL, prompt=prompts[0], max_tokens=1)
    answer = await client.completions.create(prompt=prompts, **arguments)
    sums = []
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        found = choice.logprobs
        assert found is not None
        assert found.tokens is not None
        assert found.token_logprobs is not None
        assert found.top_logprobs is not None
        assert len(found.tokens) == len(prompt) + 1
        assert found.token_logprobs[0] is None
        assert "".join(found.tokens) == choice.text
        sums.append(sum(found.token_logprobs[len(context) : -1]))
        best = [max(top, key=top.__getitem__) for top in found.top_logprobs[len(context) : -1]]
        assert (found.tokens[len(context) : -1] == best) == (prompt is prompts[0])
        if prompt is prompts[0]:
            values = found.token_logprobs[len(context) : -1]
            for place, (token, value) in enumerate(zip(likely, values, strict=True)):
                wanted = expected.logprob(place, token)
                assert wanted is not None
                assert abs(value - wanted) < LOGPROB_TOLERANCE
    assert sums[0] > sums[1]


# ---- lengths and ends --------------------------------------------------------------------------


async def test_lengths(client: openai.AsyncOpenAI, reference: TextReference) -> None:
    arguments = greedy()
    del arguments["max_tokens"]
    ids = reference.of(CHAT, NUM_TOKENS).token_ids
    assert await chat_text(client, **arguments, max_tokens=5) == reference.text(ids[:5])
    newer = await chat_text(client, **arguments, max_completion_tokens=6)
    assert newer == reference.text(ids[:6])


async def test_ends_can_be_put_off(client: openai.AsyncOpenAI, reference: TextReference) -> None:
    expected = reference.of(SHORT_CHAT, NUM_TOKENS)
    assert expected.token_ids[-1] == reference.eos_token_id
    num_tokens = len(expected.token_ids)
    for extra, least in (({"min_tokens": num_tokens + 5}, num_tokens + 5), ({}, num_tokens)):
        answer = await client.chat.completions.create(**greedy(SHORT_CHAT), extra_body=extra)
        assert answer.usage is not None
        assert answer.usage.completion_tokens >= least
    ignored = await client.chat.completions.create(
        **greedy(SHORT_CHAT), extra_body={"ignore_eos": True}
    )
    assert ignored.choices[0].finish_reason == "length"
    assert ignored.usage is not None
    assert ignored.usage.completion_tokens == NUM_TOKENS
    content = ignored.choices[0].message.content
    assert content is not None
    assert content.startswith(reference.text(expected.token_ids))


def stops_across_tokens(reference: TextReference, expected: Reference) -> list[tuple[str, str]]:
    """Strings that begin within one token and end within a later one; the text before each."""
    ids = expected.token_ids
    text = reference.text(ids)
    found = []
    for position in range(3, len(ids) - 2):
        start = len(reference.text(ids[:position])) - 1
        end = len(reference.text(ids[: position + 1])) + 1
        stop = text[start:end]
        if text.index(stop) == start and end - start > 2:
            found.append((stop, text[:start]))
    return found


async def test_stop_strings_across_tokens_are_never_seen(
    client: openai.AsyncOpenAI, reference: TextReference
) -> None:
    stops = stops_across_tokens(reference, reference.of(CHAT, NUM_TOKENS))
    assert len(stops) >= 3
    for stop, before in (stops[0], stops[len(stops) // 2], stops[-1]):
        whole = await client.chat.completions.create(**greedy(stop=stop))
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (
            before,
            "stop",
        )
        stream = await client.chat.completions.create(**greedy(stop=["§§", stop], stream=True))
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == before
        assert chunks[-1].choices[0].finish_reason == "stop"
    stop, before = stops[0]
    kept = await chat_text(
        client, **greedy(stop=stop), extra_body={"include_stop_str_in_output": True}
    )
    assert kept == before + stop


async def test_stop_token_ids(client: openai.AsyncOpenAI, reference: TextReference) -> None:
    ids = reference.of(CHAT, NUM_TOKENS).token_ids
    position = next(i for i in range(4, len(ids)) if ids[i] not in ids[:i])
    answer = await client.chat.completions.create(
        **greedy(), extra_body={"stop_token_ids": [ids[position]]}
    )
    assert answer.choices[0].message.content == reference.text(ids[:position])
    assert answer.choices[0].finish_reason == "stop"


# ---- sampling ----------------------------------------------------------------------------------


async def test_filters_that_leave_one_token_are_greedy(
    client: openai.AsyncOpenAI, reference: TextReference
) -> None:
    text = reference.text(reference.of(CHAT, NUM_TOKENS).token_ids)
    hot = {**greedy(), "temperature": 1.5}
    assert await chat_text(client, **hot, top_p=1e-6) == text
    assert await chat_text(client, **hot, extra_body={"top_k": 1}) == text
    assert await chat_text(client, **hot, extra_body={"min_p": 1.0}) == text
    assert await chat_text(client, **hot, seed=1) != text


async def test_seed_and_samples(client: openai.AsyncOpenAI) -> None:
    arguments = {**greedy(), "temperature": 1.0, "n": 3, "seed": 77, "user": "somebody"}

    async def texts() -> list[str | None]:
        answer = await client.chat.completions.create(**arguments)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 3 * NUM_TOKENS
        return [choice.message.content for choice in answer.choices]

    first = await texts()
    assert len(set(first)) == 3
    assert await texts() == first
    stream = await client.chat.completions.create(**arguments, stream=True)
    streamed: dict[int, str] = dict.fromkeys(range(3), "")
    async for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == first


async def test_logit_bias(client: openai.AsyncOpenAI, reference: TextReference) -> None:
    ids = reference.of(CHAT, NUM_TOKENS).token_ids
    forced = reference.prompt_ids(MeshPrompt("word", text=" lamp"))
    assert len(forced) == 1
    text = await chat_text(client, **{**greedy(), "max_tokens": 4, "logit_bias": {forced[0]: 100}})
    assert text == " lamp" * 4
    without = await chat_text(client, **greedy(logit_bias={str(ids[0]): -100}))
    assert not without.startswith(reference.text(ids[:1]))


async def test_penalties(client: openai.AsyncOpenAI) -> None:
    """Each token is the best one after its penalties, by the log-probabilities themselves."""
    prompt = "one two one two one two one two one two one two"
    for presence, frequency in ((2.0, 0.0), (0.0, 2.0), (1.0, 0.7), (-1.0, -0.5)):
        answer = await client.completions.create(
            **greedy(RAW, prompt=prompt, logprobs=20),
            presence_penalty=presence,
            frequency_penalty=frequency,
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.top_logprobs is not None
        seen: Counter[str] = Counter()
        for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
            penalised = {
                other: value - frequency * seen[other] - presence * (seen[other] > 0)
                for other, value in top.items()
            }
            assert penalised[token] == pytest.approx(max(penalised.values()), abs=1e-4)
            seen[token] += 1


async def test_fields_without_effect_are_ignored(
    client: openai.AsyncOpenAI, reference: TextReference
) -> None:
    extra = {"no_such_field": None, "metadata": {"k": "v"}, "store": False}
    expected = reference.text(reference.of(CHAT, NUM_TOKENS).token_ids)
    assert await chat_text(client, **greedy(), extra_body=extra) == expected


# ---- log-probabilities -------------------------------------------------------------------------


async def test_chat_logprobs_are_transformers(
    client: openai.AsyncOpenAI, reference: TextReference
) -> None:
    expected = reference.of(CHAT, NUM_TOKENS)
    answer = await client.chat.completions.create(**greedy(logprobs=True, top_logprobs=5))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == len(expected.token_ids)
    for position, entry in enumerate(logprobs.content):
        right = [(i, expected.logprob(position, i)) for i, _ in expected.top[position][:5]]
        assert entry.logprob == pytest.approx(right[0][1], abs=LOGPROB_TOLERANCE)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
            [value for _, value in right], abs=LOGPROB_TOLERANCE
        )
        assert entry.bytes == list(reference.text([expected.token_ids[position]]).encode())
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content


async def test_completion_logprobs_are_transformers(
    client: openai.AsyncOpenAI, reference: TextReference
) -> None:
    expected = reference.of(RAW, NUM_TOKENS)
    right = [expected.logprob(i, token_id) for i, token_id in enumerate(expected.token_ids)]
    whole = await client.completions.create(**greedy(RAW, logprobs=3))
    stream = await client.completions.create(**greedy(RAW, logprobs=3, stream=True))
    streamed = [
        chunk.choices[0].logprobs async for chunk in stream if chunk.choices[0].logprobs is not None
    ]
    assert whole.choices[0].logprobs is not None
    for parts in ([whole.choices[0].logprobs], streamed):
        values = list(itertools.chain.from_iterable(part.token_logprobs or () for part in parts))
        assert values == pytest.approx(right, abs=LOGPROB_TOLERANCE)
        tokens = list(itertools.chain.from_iterable(part.tokens or () for part in parts))
        assert "".join(tokens) == whole.choices[0].text
        offsets = list(itertools.chain.from_iterable(part.text_offset or () for part in parts))
        assert offsets == list(itertools.accumulate(map(len, tokens), initial=0))[:-1]
        for part in parts:
            assert all(len(top) == 3 for top in part.top_logprobs or ())


async def test_sampled_logprobs_are_of_the_unchanged_distribution(
    client: openai.AsyncOpenAI, reference: TextReference
) -> None:
    expected = reference.of(CHAT, NUM_TOKENS)
    hot = {**greedy(logprobs=True, top_logprobs=20), "temperature": 3.0, "max_tokens": 1}
    answer = await client.chat.completions.create(**hot, seed=5, n=8)
    best = [expected.logprob(0, token_id) for token_id, _ in expected.top[0][:20]]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        (entry,) = choice.logprobs.content
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
            best, abs=LOGPROB_TOLERANCE
        )
        assert math.exp(entry.logprob) <= math.exp(best[0] or 0) + LOGPROB_TOLERANCE


# ---- models and errors -------------------------------------------------------------------------


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [(model.id, model.object) for model in models] == [(MODEL, "model")]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_errors_have_the_sdk_s_classes(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nope") as missing:
        await client.chat.completions.create(**greedy(model="nope"))
    assert missing.value.code == "model_not_found"
    for arguments, param in (
        ({"temperature": -1}, "temperature"),
        ({"n": 1000}, "n"),
        ({"top_p": 7}, "top_p"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**greedy(**arguments), stream=stream)
            assert refused.value.param == param
            assert refused.value.type == "invalid_request_error"
            assert param in refused.value.message
    with pytest.raises(openai.BadRequestError, match="8192") as too_long:
        await client.completions.create(**greedy(RAW, prompt=[5] * 9000))
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.3).completions.create(
            **{**greedy(RAW), "max_tokens": 4000}, extra_body={"ignore_eos": True}
        )


def test_the_blocking_client(mesh: LocalMesh, reference: TextReference) -> None:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(**greedy(stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == reference.text(reference.of(CHAT, NUM_TOKENS).token_ids)


# ---- disconnects -------------------------------------------------------------------------------


async def until(condition: Callable[[], bool]) -> None:
    """Waits beside the event loop."""
    await asyncio.to_thread(wait_until, condition, 60)


def requests(mesh: LocalMesh, name: str) -> int:
    load = mesh.load(name)
    return load.running_requests + load.waiting_requests + load.filling_requests


async def test_a_disconnect_ends_the_request_everywhere(
    mesh: LocalMesh, client: openai.AsyncOpenAI
) -> None:
    for n in (1, 3):
        stream = await client.chat.completions.create(
            **{**greedy(stream=True, n=n), "max_tokens": 4000}, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            if requests(mesh, "decode-0") == n:
                break
        await stream.close()
        await until(lambda: requests(mesh, "decode-0") == 0)


async def test_a_disconnect_while_a_prompt_is_filled_ends_the_fill(
    mesh: LocalMesh, client: openai.AsyncOpenAI
) -> None:
    before = mesh.counters("prefill-0")
    call = asyncio.create_task(
        client.completions.create(
            **greedy(RAW, prompt=prose(9, 400)), extra_body={"cache_salt": new_salt()}
        )
    )
    await until(lambda: mesh.load("decode-0").filling_requests == 1)
    await until(lambda: mesh.counters("prefill-0")["shipped_pages"] > before["shipped_pages"])
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: requests(mesh, "decode-0") == 0)
    await until(lambda: mesh.is_idle("prefill-0") and mesh.is_idle("decode-0"))
    after = mesh.counters("prefill-0")
    assert after["leases_stopped"] == before["leases_stopped"] + 1
    assert after["computed_tokens"] == before["computed_tokens"]
