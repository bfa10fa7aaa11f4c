"""The built Go edge between the real `openai` SDK and a gateway made for tests."""

import asyncio
import gzip
import json
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import grpc
import httpx
import openai
import pytest
from weft.testing.services.fake_openai import FakeOpenAI
from weft.testing.services.processes import ServiceProcess
from weft.v1 import openai_pb2_grpc

pytestmark = pytest.mark.needs("go")


class Rest(NamedTuple):
    """One edge, the fake behind it, and the SDK in front of it."""

    url: str
    fake: FakeOpenAI
    client: openai.AsyncOpenAI
    process: ServiceProcess
    ready: dict[str, str]
    server: grpc.aio.Server


@pytest.fixture
async def rest(rest_binary: Path, tmp_path: Path) -> AsyncIterator[Rest]:
    fake = FakeOpenAI()
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 16 << 20)])
    openai_pb2_grpc.add_OpenAIServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    flags = ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    flags += ["--comment-after", "50ms"]
    command = [str(rest_binary), *flags, "--backend", f"127.0.0.1:{port}"]
    with ServiceProcess("rest", command, tmp_path) as process:
        ready = await process.ready()
        url = f"http://{ready['address']}"
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            yield Rest(url, fake, client, process, ready, server)
    await server.stop(0)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def sentence() -> str:
    return " ".join(secrets.token_hex(3) for _ in range(12)) + " <&> é 漢字 🙂"


async def test_chat_answers_whole_and_streamed(rest: Rest) -> None:
    text = sentence()
    whole = await rest.client.chat.completions.create(model="echo", messages=user(text))
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    assert whole.usage.total_tokens == 2

    stream = await rest.client.chat.completions.create(
        model="echo", messages=user(text), stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert " ".join(c.choices[0].delta.content for c in chunks[:-1]) == text
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]


class Wire(httpx.AsyncHTTPTransport):
    """Counts the comments that reach a client, and lets the fake go on after each."""

    def __init__(self, fake: FakeOpenAI) -> None:
        super().__init__()
        self._fake = fake
        self.num_comments = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        lines = response.aiter_lines()

        async def body() -> AsyncIterator[bytes]:
            async for line in lines:
                if line.startswith(":"):
                    self.num_comments += 1
                    self._fake.may_go_on.set()
                yield f"{line}\n".encode()

        return httpx.Response(response.status_code, headers=response.headers, content=body())


async def test_the_sdk_passes_over_comments_in_pauses(rest: Rest) -> None:
    wire = Wire(rest.fake)
    async with openai.AsyncOpenAI(
        base_url=f"{rest.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=wire, timeout=60),
    ) as client:
        stream = await client.chat.completions.create(
            model="slow", messages=user("one two three"), stream=True
        )
        assert stream.response.headers["x-weft-request-id"] == "chatcmpl-1"
        chunks = [chunk async for chunk in stream]
    assert [c.choices[0].delta.content for c in chunks] == ["one", "two", "three", None]
    assert wire.num_comments >= len(chunks)


async def test_models(rest: Rest) -> None:
    assert [model.id async for model in rest.client.models.list()] == ["echo"]
    assert (await rest.client.models.retrieve("org/name")).id == "org/name"


async def test_bodies_reach_the_gateway_byte_for_byte(rest: Rest) -> None:
    body = b'{"model" :"echo",  "messages":[{"role":"user","content":"x"}], "unknown": [1.0, null]}'
    async with httpx.AsyncClient(timeout=60) as http:
        got = await http.post(f"{rest.url}/v1/chat/completions", content=body)
    assert got.status_code == 200
    assert rest.fake.bodies == [body]


@pytest.mark.parametrize(
    ("model", "error", "status", "param", "code"),
    [
        ("bad", openai.BadRequestError, 400, "n", "invalid_request"),
        ("missing", openai.NotFoundError, 404, "model", "model_not_found"),
        ("odd", openai.UnprocessableEntityError, 422, "messages", "invalid_request"),
        ("busy", openai.RateLimitError, 429, None, "overloaded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_are_the_sdks_own_errors(
    rest: Rest,
    model: str,
    error: type[openai.APIStatusError],
    status: int,
    param: str | None,
    code: str,
    stream: bool,
) -> None:
    with pytest.raises(error) as caught:
        await rest.client.chat.completions.create(model=model, messages=user("x"), stream=stream)
    failure = caught.value
    assert (failure.status_code, failure.param, failure.code) == (status, param, code)
    assert failure.response.headers.get("retry-after") == ("1" if model == "busy" else None)


async def test_a_failure_in_mid_stream_raises(rest: Rest) -> None:
    stream = await rest.client.chat.completions.create(
        model="breaks", messages=user("one two"), stream=True
    )
    first = await anext(stream)
    assert first.choices[0].delta.content == "one"
    with pytest.raises(openai.APIError, match="the worker died"):
        await anext(stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_cancels_the_call(rest: Rest, stream: bool) -> None:
    async def call() -> None:
        answer = await rest.client.chat.completions.create(
            model="hang", messages=user("x y"), stream=stream
        )
        async for _ in answer:
            pass

    task = asyncio.create_task(call())
    await asyncio.wait_for(rest.fake.started.wait(), 60)
    task.cancel()
    await asyncio.wait_for(rest.fake.cancelled.wait(), 60)


async def test_bad_requests_of_plain_http(rest: Rest) -> None:
    chat = f"{rest.url}/v1/chat/completions"
    async with httpx.AsyncClient(timeout=60) as http:
        answers = [
            (400, await http.post(chat, content=b"{not json")),
            (400, await http.post(chat, content=b"")),
            (413, await http.post(chat, content=bytes(10 << 20))),
            (404, await http.post(f"{rest.url}/v1/nowhere", json={})),
            (405, await http.get(chat)),
            (405, await http.delete(f"{rest.url}/v1/models")),
        ]
        good = await http.post(chat, json={"model": "echo", "messages": user("fine")})
    for status, answer in answers:
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert answer.headers["x-request-id"].startswith("req-")
    assert good.status_code == 200


async def test_raw_garbage_is_refused_and_harms_nobody(rest: Rest) -> None:
    host, port = rest.ready["address"].split(":")
    for garbage in (
        b"\x16\x03\x01\x02",
        b"GET /\r\n\r\n",
        b"POST /v1/chat/completions HTTP/9\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer == b"" or b" 400 " in answer or b" 505 " in answer
        writer.close()
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.get(f"{rest.url}/healthz")).json() == {"status": "ok"}


async def test_probes_of_other_servers_work(rest: Rest) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.get(f"{rest.url}/health")).json() == {"status": "ok"}
        for path in ("health", "healthz"):
            assert (await http.head(f"{rest.url}/{path}")).status_code == 200


async def test_an_encoded_body_is_refused_as_such(rest: Rest) -> None:
    body, headers = gzip.compress(b'{"prompt": "x"}'), {"Content-Encoding": "gzip"}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{rest.url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_encoding"
    assert '"gzip"' in answer.json()["error"]["message"]


async def test_a_page_of_another_site_loads_no_adapters(rest: Rest) -> None:
    """Its browser would send it without asking: the body says that it is plain text."""
    headers = {"Content-Type": "text/plain", "Origin": "https://evil.example.org"}
    headers["Sec-Fetch-Site"] = "cross-site"
    path, body = f"{rest.url}/v1/unload_lora_adapter", '{"lora_name": "x"}'
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(path, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_origin")
    with pytest.raises(openai.InternalServerError):
        # Without a browser's headers it reaches the gateway, which here cannot do it.
        await rest.client.post("/unload_lora_adapter", body={"lora_name": "x"}, cast_to=object)


async def test_a_lost_gateway_is_a_503_without_addresses(rest: Rest) -> None:
    await rest.server.stop(0)
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.get(f"{rest.url}/readyz")
        assert (await http.get(f"{rest.url}/healthz")).status_code == 200
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "127.0.0.1" not in answer.text


async def test_metrics_count_by_route(rest: Rest) -> None:
    await rest.client.chat.completions.create(model="echo", messages=user("x"))
    async with httpx.AsyncClient(timeout=60) as http:
        await http.get(f"{rest.url}/nowhere/{secrets.token_hex(8)}")
        wanted = {
            'weft_rest_requests_total{code="200",route="/v1/chat/completions"} 1',
            'weft_rest_requests_total{code="404",route="none"} 1',
        }
        async with asyncio.timeout(60):
            while True:
                text = (await http.get(f"http://{rest.ready['metrics_address']}/metrics")).text
                if wanted <= set(text.splitlines()):
                    break
                await asyncio.sleep(0.01)


async def test_sigterm_lets_streams_finish(rest: Rest) -> None:
    stream = await rest.client.chat.completions.create(
        model="echo", messages=user(sentence()), stream=True
    )
    rest.process.send(signal.SIGTERM)
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert await asyncio.to_thread(rest.process.wait) == 0


async def test_a_second_sigterm_ends_it_at_once(rest: Rest) -> None:
    """But not one that comes right behind the first, from another sender."""
    stream = await rest.client.chat.completions.create(
        model="hang", messages=user("x y"), stream=True
    )
    for _ in range(2):
        rest.process.send(signal.SIGTERM)
        await asyncio.sleep(0.01)
    await asyncio.sleep(1.5)
    assert rest.process.is_running
    rest.process.send(signal.SIGTERM)
    assert await asyncio.to_thread(rest.process.wait) == -signal.SIGTERM
    await stream.close()


async def test_a_second_edge_on_the_port_says_which_flag(
    rest: Rest, rest_binary: Path, tmp_path: Path
) -> None:
    command = [str(rest_binary), "--listen", rest.ready["address"]]
    with ServiceProcess("second", command, tmp_path) as second:
        assert await asyncio.to_thread(second.wait) == 1
        assert "--listen" in json.loads(second.log.splitlines()[-1])["error"]
