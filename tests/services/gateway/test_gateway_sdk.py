"""The `openai` SDK, unmodified, through the Go edge to the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest
from weft.testing.models.tiny_tokenizers import byte_level_bpe
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.testing.services.processes import ServiceProcess
from weft.v1 import decode_pb2

pytestmark = pytest.mark.needs("go")

TEXT = "Weft answers: déjà vu 你好 🎉 done"
USER: list[Any] = [{"role": "user", "content": "hi"}]


class Edge(NamedTuple):
    """Everything from the SDK down to the scripted worker."""

    mesh: Harness
    client: openai.AsyncOpenAI
    url: str


@pytest.fixture
async def edge(rest_binary: Path, tmp_path: Path) -> AsyncIterator[Edge]:
    tokenizer = byte_level_bpe()
    tokens = [*tokenizer.encode(TEXT).ids, tokenizer.token_to_id("<|im_end|>")]

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        if submit.cache_salt == "endless":
            return Script(tokens=[[tokens[0]] * submit.stop.max_tokens])
        if submit.cache_salt == "silent":
            return Script(tokens=[tokens], hang_after=0)
        return Script(tokens=[tokens], break_after=4 if submit.cache_salt == "cut" else 10**9)

    async with gateway(tmp_path, script) as mesh:
        command = [str(rest_binary), "--listen", "127.0.0.1:0"]
        command += ["--backend", mesh.app.server.address, "--comment-after", "100ms"]
        with ServiceProcess("rest", command, tmp_path) as process:
            url = f"http://{(await process.ready())['address']}"
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60
            ) as client:
                yield Edge(mesh, client, url)


async def test_a_stream_is_kept_alive_before_its_first_token(edge: Edge) -> None:
    body = {"messages": USER, "stream": True, "cache_salt": "silent"}
    async with (
        httpx.AsyncClient(timeout=60, trust_env=False) as http,
        http.stream("POST", f"{edge.url}/v1/chat/completions", json=body) as answer,
    ):
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-weft-request-id"].startswith("chatcmpl-")
        assert await anext(answer.aiter_lines()) == ": waiting"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_half_closed_client_gets_its_answer(edge: Edge, is_streamed: bool) -> None:
    for salt, text in (("plain", TEXT), ("silent", "")):
        address = httpx.URL(edge.url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        body = {"messages": USER, "stream": is_streamed, "cache_salt": salt}
        data = json.dumps(body).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        writer.write(b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(data), data))
        await writer.drain()
        writer.write_eof()
        if text:
            async with asyncio.timeout(60):
                answer = await reader.read()
            assert b"HTTP/1.1 200 OK" in answer
            assert (b"[DONE]" if is_streamed else text.encode()) in answer
        else:
            # It is still there, and then gone.
            await edge.mesh.wait(lambda: len(edge.mesh.workers[0].submits) == 2)
            await asyncio.sleep(0.3)
            assert not edge.mesh.workers[0].cancels
            writer.transport.abort()
            await edge.mesh.wait(lambda: edge.mesh.workers[0].cancels)
        writer.close()


async def test_chat(edge: Edge) -> None:
    create = edge.client.chat.completions.create
    whole = await create(
        model=MODEL,
        messages=USER,
        n=2,
        seed=7,
        temperature=0.5,
        top_p=0.9,
        max_completion_tokens=100,
        logprobs=True,
        top_logprobs=2,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": 1},
        user="u",
        extra_body={"top_k": 3, "min_p": 0.1, "min_tokens": 1, "ignore_eos": False},
    )
    assert [choice.message.content for choice in whole.choices] == [TEXT, TEXT]
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    sent = edge.mesh.workers[0].submits[0]
    assert (sent.sampling.top_k, sent.sampling.seed, sent.stop.min_tokens) == (3, 7, 1)
    stream = await create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == "stop"
    raw = await edge.client.chat.completions.with_raw_response.create(
        model=MODEL, messages=USER, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["x-weft-request-id"] == raw.parse().id
    stopped = await create(model=MODEL, messages=USER, stop=["déjà"])
    assert stopped.choices[0].message.content == TEXT[: TEXT.index("déjà")]


async def test_a_chat_is_ended_by_a_call(edge: Edge) -> None:
    worker = edge.mesh.workers[0]
    extra = {"session_id": "chat", "cache_salt": "mine"}
    await edge.client.chat.completions.create(model=MODEL, messages=USER, extra_body=extra)
    assert worker.submits[0].session_id == "chat"
    async with httpx.AsyncClient(base_url=edge.url, timeout=60, trust_env=False) as http:
        answer = await http.post("/v1/end_session", json=extra)
        assert (answer.status_code, answer.json()) == (200, {"status": "success", "workers": 1})
        for wrong in ({}, {"session_id": ""}, {"session_id": "x" * 129}, {"session_id": 7}):
            refused = await http.post("/v1/end_session", json=wrong)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == "session_id"
    await edge.mesh.wait(lambda: worker.session_ends)
    (told,) = worker.session_ends
    assert (told.session_id, told.cache_salt) == ("chat", "mine")


async def test_completions(edge: Edge) -> None:
    create = edge.client.completions.create
    for prompt in ("a", ["a", "b"], [5, 6], [[5], [6, 7]]):
        answer = await create(model=MODEL, prompt=prompt, max_tokens=90)  # type: ignore[call-overload]
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        assert [choice.text for choice in answer.choices] == [TEXT] * (2 if several else 1)
    stream = await create(model=MODEL, prompt="a", max_tokens=90, stream=True, logprobs=1)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT


async def test_models_and_extras(edge: Edge) -> None:
    assert [model.id async for model in edge.client.models.list()] == [MODEL]
    assert (await edge.client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        await edge.client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"
    async with httpx.AsyncClient(base_url=edge.url, timeout=60) as http:
        tokens = (await http.post("/tokenize", json={"prompt": TEXT})).json()["tokens"]
        assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": TEXT}
        assert (await http.get("/readyz")).status_code == 200
        assert (await http.get("/openapi.json")).json()["openapi"].startswith("3.1")


async def test_anthropics_client_lists_models(edge: Edge) -> None:
    async with anthropic.AsyncAnthropic(base_url=edge.url, api_key="none") as client:
        (listed,) = [model async for model in client.models.list()]
        retrieved = await client.models.retrieve(MODEL)
    own = await edge.client.models.retrieve(MODEL)
    for model in (listed, retrieved):
        assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
        assert model.created_at.timestamp() == own.created


async def test_errors_have_openai_shape(edge: Edge) -> None:
    create = edge.client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model=MODEL, messages=USER, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        await create(model=MODEL, messages=[{"role": "user", "content": "word " * 3000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        await create(model="other", messages=USER)
    assert unknown.value.code == "model_not_found"
    stream = await create(model=MODEL, messages=USER, stream=True, extra_body={"cache_salt": "cut"})
    with pytest.raises(openai.APIError) as cut:
        async for _ in stream:
            pass
    assert "decode-0" in str(cut.value)
    async with httpx.AsyncClient(base_url=edge.url, timeout=60) as http:
        for body in (b"{", b"\xff", b"[" * 10_000, json.dumps({"messages": []}).encode()):
            answer = await http.post("/v1/chat/completions", content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"
        answer = await http.post("/v1/chat/completions", content=b"x" * (10 << 20))
        assert answer.status_code == 413


async def test_disconnect_reaches_the_worker(edge: Edge) -> None:
    stream = await edge.client.chat.completions.create(
        model=MODEL, messages=USER, stream=True, extra_body={"cache_salt": "endless"}
    )
    async for _ in stream:
        break
    await stream.close()
    worker = edge.mesh.workers[0]
    await edge.mesh.wait(lambda: worker.cancels)
    await edge.mesh.wait(lambda: not edge.mesh.app._admission.num_running)


async def test_many_at_once(edge: Edge) -> None:
    async def one(number: int) -> str:
        stream = await edge.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": str(number)}], stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert await asyncio.gather(*(one(number) for number in range(16))) == [TEXT] * 16
