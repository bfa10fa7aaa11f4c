"""Bad requests at a real mesh: clear refusals, and nobody beside them notices."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import httpx
import pytest
from weft.common.rpc.errors import from_rpc_error
from weft.testing.meshes.local_mesh import MODEL, LocalMesh
from weft.testing.meshes.mesh_calls import Ask, Caller, check_way, new_salt
from weft.testing.meshes.mesh_kinds import NUM_TOKENS, on
from weft.testing.meshes.mesh_prompts import BY_NAME
from weft.testing.meshes.text_reference import TextReference
from weft.v1 import common_pb2, gateway_pb2

pytestmark = [pytest.mark.needs("go", "nixl"), pytest.mark.timeout(600), on("nixl")]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
JSON_TYPE = {"content-type": "application/json"}


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


# (path, body, status, field that is named; empty: the body as a whole)
FIELDS: list[tuple[str, dict[str, Any], int, str]] = [
    (CHAT, {"temperature": -0.5}, 400, "temperature"),
    (CHAT, {"temperature": "warm"}, 400, "temperature"),
    (CHAT, {"temperature": 1e308}, 400, "temperature"),
    (CHAT, {"temperature": math.nan}, 400, "temperature"),
    (CHAT, {"top_p": -1}, 400, "top_p"),
    (CHAT, {"top_p": math.inf}, 400, "top_p"),
    (CHAT, {"top_k": -7}, 400, "top_k"),
    (CHAT, {"min_p": -math.inf}, 400, "min_p"),
    (CHAT, {"presence_penalty": math.nan}, 400, "presence_penalty"),
    (CHAT, {"frequency_penalty": -99}, 400, "frequency_penalty"),
    (CHAT, {"repetition_penalty": -1}, 400, "repetition_penalty"),
    (CHAT, {"repetition_penalty": 1e-4}, 400, "repetition_penalty"),
    (CHAT, {"n": 10**40}, 400, "n"),
    (CHAT, {"n": -1}, 400, "n"),
    (CHAT, {"seed": 10**30}, 400, "seed"),
    (CHAT, {"max_tokens": -1}, 400, "max_tokens"),
    (CHAT, {"max_tokens": 10**9}, 400, "max_tokens"),
    (CHAT, {"max_completion_tokens": "many"}, 400, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHAT, {"stop": [f"stop {i}" for i in range(1000)]}, 400, "stop"),
    (CHAT, {"stop": {"a": 1}}, 400, "stop"),
    (CHAT, {"stop_token_ids": [-1]}, 400, "stop_token_ids"),
    (CHAT, {"logit_bias": {"5": math.nan}}, 400, "logit_bias"),
    (CHAT, {"logit_bias": {"50000000": 1}}, 400, "logit_bias"),
    (CHAT, {"top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"stream": 1}, 400, "stream"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": user(None)}, 400, "messages[0].content"),
    (CHAT, {"messages": user([{"type": "image_url"}])}, 400, "messages[0].content[0].type"),
    (CHAT, {"messages": user("word " * 9000)}, 400, "messages"),
    (CHAT, {"model": "gpt-17"}, 404, "model"),
    (CHAT, {"model": 17}, 400, "model"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": [[]]}, 400, "prompt"),
    (TEXT, {"prompt": [49152]}, 400, "prompt"),
    (TEXT, {"prompt": [-1]}, 400, "prompt"),
    (TEXT, {"prompt": [1.5]}, 400, "prompt"),
    (TEXT, {"prompt": [7] * 9000}, 400, "prompt"),
    (TEXT, {"prompt": "x" * 300_000}, 400, "prompt"),
    (TEXT, {"prompt": {"text": "x"}}, 400, "prompt"),
    (TEXT, {"prompt": "x", "logprobs": 99}, 400, "logprobs"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
]

BODIES: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"hello", 400),
    (b"[1, 2]", 400),
    (b"null", 400),
    (b'{"messages": [{"role": "user", "content": "\xff\xfe\xfd"}]}', 400),
    (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', 400),
    (b'{"messages": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", 400),
    (b'{"messages": ' + b'{"a": ' * 100_000 + b"1" + b"}" * 100_000 + b"}", 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 100_000 + b"}", 400),
    (b'{"messages": [{"role": "user", "content": "' + b"y" * (10 << 20) + b'"}]}', 413),
]


class Beside:
    """Good requests that run as long as bad ones come, over both faces."""

    def __init__(self, mesh: LocalMesh, reference: TextReference) -> None:
        self._mesh = mesh
        self._reference = reference

    async def __aenter__(self) -> None:
        self._is_over = False
        self._num_done = 0
        self._tasks = [asyncio.create_task(self._run(face)) for face in ("rest", "grpc")]

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)
        assert self._num_done >= 2

    async def _run(self, face: str) -> None:
        prompt = BY_NAME["turns"]
        expected = self._reference.text(self._reference.of(prompt, NUM_TOKENS).token_ids)
        async with Caller(self._mesh) as caller:
            while not self._is_over:
                ask = Ask(prompt, NUM_TOKENS, new_salt(), is_streamed=True)
                answer = await caller.ask(face, ask)
                assert answer.text == expected
                check_way("nixl", answer)
                self._num_done += 1


@pytest.fixture
async def http(mesh: LocalMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60, trust_env=False) as client:
        yield client


def check_refusal(answer: httpx.Response, status: int, param: str | None) -> None:
    """An error in OpenAI's shape that a person can act on."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 10 < len(error["message"]) < 500
    if param is not None:
        # What a union of types is wrong about may be named more precisely.
        assert error["param"] is not None, error
        assert error["param"].startswith(param), error
        is_length = error["code"] == "context_length_exceeded"
        assert ("8192" if is_length else param.split("[")[0]) in error["message"]


async def test_bad_fields_over_rest(
    mesh: LocalMesh, reference: TextReference, http: httpx.AsyncClient
) -> None:
    async with Beside(mesh, reference):
        for path, change, status, param in FIELDS:
            base = {CHAT: {"messages": USER, "max_tokens": 4}, TEXT: {"max_tokens": 4}}
            body = json.dumps({**base.get(path, {}), **change}).encode()
            answer = await http.post(path, content=body, headers=JSON_TYPE)
            check_refusal(answer, status, param)


async def test_bad_bodies_over_rest(
    mesh: LocalMesh, reference: TextReference, http: httpx.AsyncClient
) -> None:
    async with Beside(mesh, reference):
        for body, status in BODIES:
            for path in (CHAT, TEXT) if len(body) < 1 << 20 else (CHAT,):
                answer = await http.post(path, content=body, headers=JSON_TYPE)
                check_refusal(answer, status, None)
        many = [http.post(CHAT, content=body, headers=JSON_TYPE) for body, _ in BODIES[:-1] * 8]
        assert {answer.status_code for answer in await asyncio.gather(*many)} == {400}


async def test_bad_calls_over_rest(mesh: LocalMesh, http: httpx.AsyncClient) -> None:
    kinds = ("application/x-www-form-urlencoded", "multipart/form-data; boundary=b", "text/plain")
    for kind in kinds:
        answer = await http.post(CHAT, content=b"messages=hi", headers={"content-type": kind})
        check_refusal(answer, 400, None)
    for method, path, status in (
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/no/such", 404),
        ("POST", "/v1/images/generations", 404),
        ("GET", "/no/such", 404),
    ):
        answer = await http.request(method, path)
        check_refusal(answer, status, None)


# ---- gRPC --------------------------------------------------------------------------------------

Change = Callable[[gateway_pb2.ChatRequest], object]
TYPED: list[tuple[Change, str]] = [
    (lambda r: setattr(r.sampling, "temperature", math.nan), "temperature"),
    (lambda r: setattr(r.sampling, "temperature", -1.0), "temperature"),
    (lambda r: setattr(r.sampling, "top_p", math.inf), "top_p"),
    (lambda r: setattr(r.sampling, "min_p", math.nan), "min_p"),
    (lambda r: setattr(r.sampling, "top_k", 2**32 - 1), "top_k"),
    (lambda r: setattr(r.sampling, "n", 2**32 - 1), "n"),
    (lambda r: setattr(r.sampling, "presence_penalty", -math.inf), "presence_penalty"),
    (lambda r: setattr(r.sampling, "repetition_penalty", -3.0), "repetition_penalty"),
    (lambda r: r.sampling.logit_bias.update({3: math.nan}), "logit_bias"),
    (lambda r: r.sampling.logit_bias.update({2**31: 1.0}), "logit_bias"),
    (lambda r: r.stop.stop.extend(["s"] * 1000), "stop"),
    (lambda r: r.stop.stop.append("s" * 10_000), "stop"),
    (lambda r: r.stop.stop_token_ids.append(2**32 - 1), "stop_token_ids"),
    (lambda r: setattr(r.stop, "max_tokens", 2**32 - 1), "max_tokens"),
    (lambda r: setattr(r.logprobs, "top_logprobs", 2**32 - 1), "top_logprobs"),
    (lambda r: r.timeout.FromSeconds(-5), "timeout"),
    (lambda r: setattr(r, "cache_salt", "s" * 1000), "cache_salt"),
    (lambda r: r.ClearField("messages"), "messages"),
    (lambda r: r.messages.add(role="", content="x"), "messages[1].role"),
    (lambda r: r.messages.add(role="user", content="word " * 9000), "messages"),
    (lambda r: r.messages.add(role="user", content="z" * (10 << 20)), "request"),
]


async def refused(call: grpc.aio.UnaryStreamCall[Any, Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def test_bad_fields_over_grpc(mesh: LocalMesh, reference: TextReference) -> None:
    async with Beside(mesh, reference), Caller(mesh) as caller:
        for change, param in TYPED:
            message = gateway_pb2.ChatMessage(role="user", content="hi")
            request = gateway_pb2.ChatRequest(model=MODEL, messages=[message])
            request.stop.max_tokens = 4
            change(request)
            error = await refused(caller.stub.Chat(request))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
            typed = from_rpc_error(error)
            assert typed.param == param
            named = "8192" if typed.reason == "CONTEXT_LENGTH_EXCEEDED" else param
            assert named in (error.details() or "")
        prompts = (common_pb2.TokenIds(), common_pb2.TokenIds(ids=[2**32 - 1]))
        for prompt in prompts:
            error = await refused(
                caller.stub.Complete(gateway_pb2.CompleteRequest(token_ids=prompt))
            )
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert from_rpc_error(error).param == "prompt"
        error = await refused(caller.stub.Complete(gateway_pb2.CompleteRequest()))
        assert from_rpc_error(error).param == "prompt"
        error = await refused(
            caller.stub.Complete(gateway_pb2.CompleteRequest(model="gpt-17", text="x"))
        )
        assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_messages_that_are_none_over_grpc(mesh: LocalMesh) -> None:
    good = gateway_pb2.CompleteRequest(text="abcdef").SerializeToString()
    bodies = {
        b"\xff\xff\xff\xff": None,
        b"\x0a\x7f": None,
        good.replace(b"abcdef", b"ab\xff\xfeef"): None,
        b"": "prompt",
    }
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        method = channel.unary_stream("/weft.v1.GatewayService/Complete")
        for body, param in bodies.items():
            error = await refused(method(body))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
            assert from_rpc_error(error).param == param
        error = await refused(channel.unary_stream("/weft.v1.GatewayService/NoSuch")(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
