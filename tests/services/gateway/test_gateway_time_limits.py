"""Requests that a client ends: by id, by a time limit, by a time limit for the first token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api.httpbody_pb2 import HttpBody
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import Cancelled, DeadlineExceeded, InvalidRequest, RequestNotFound
from weft.gateway.admission.keys import new_key, write_keys
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2, dialects_pb2_grpc, gateway_pb2, openai_pb2

USER = [{"role": "user", "content": "hi"}]
Metadata = tuple[tuple[str, str], ...]


def endless(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[7] * 400])


def silent(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[7] * 400], hang_after=0)


def ask(mesh: Harness, metadata: Metadata = (), **fields: Any) -> Any:
    body = {"messages": USER, "max_tokens": 400, **fields}
    return mesh.openai.ChatCompletions(HttpBody(data=json.dumps(body).encode()), metadata=metadata)


async def cancel(mesh: Harness, request_id: str, metadata: Metadata = ()) -> Any:
    request = openai_pb2.CancelRequestByIdRequest(request_id=request_id)
    answer = await mesh.openai.CancelRequestById(request, metadata=metadata)
    return json.loads(answer.data)


async def failure(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return from_rpc_error(error.value)


async def read(call: Any) -> bytes:
    """The rest of an answer."""
    data = b""
    while (message := await call.read()) is not grpc.aio.EOF:
        data += message.data
    return data


@pytest.mark.parametrize("named_by", ["gateway", "client", "body", "header"])
async def test_a_request_ends_by_its_id(tmp_path: Path, named_by: str) -> None:
    async with gateway(tmp_path, endless, step_s=0.01) as mesh:
        own: dict[str, Any] = {"request_id": "mine"} if named_by in ("body", "header") else {}
        # The REST edge gives an id to every request.
        given = "req-of-the-edge" if own else "mine"
        call = ask(mesh, (("x-request-id", given),), stream=True, **own)
        event = (await call.read()).data.split(b"\n\n")[0].removeprefix(b"data: ")
        name = {"gateway": json.loads(event)["id"], "header": given}.get(named_by, "mine")
        assert await cancel(mesh, name) == {"id": name, "status": "cancelled"}
        assert b'"finish_reason":"abort"' in await read(call)
        await mesh.wait(lambda: mesh.workers[0].cancels)
        error = await failure(cancel(mesh, name))
        assert isinstance(error, RequestNotFound)
        assert name in error.message


async def test_a_whole_answer_and_all_requests_of_one_name_end(tmp_path: Path) -> None:
    async with gateway(tmp_path, endless, step_s=0.01) as mesh:
        calls = [asyncio.create_task(read(ask(mesh, (("x-request-id", "job"),)))) for _ in range(3)]
        await mesh.wait(lambda: len(mesh.workers[0].submits) == 3)
        await cancel(mesh, "job")
        for data in await asyncio.gather(*calls):
            assert json.loads(data)["choices"][0]["finish_reason"] == "abort"


async def test_a_request_that_waits_ends_too(tmp_path: Path) -> None:
    async with gateway(tmp_path, endless, step_s=0.01, max_running_requests=1) as mesh:
        first = ask(mesh, stream=True)
        await first.read()
        waiting = asyncio.create_task(read(ask(mesh, (("x-request-id", "later"),))))
        await mesh.wait(lambda: mesh.app._admission.num_queued)
        await cancel(mesh, "later")
        assert isinstance(await failure(waiting), Cancelled)
        assert not mesh.app._admission.num_queued
        assert len(mesh.workers[0].submits) == 1
        first.cancel()
        await mesh.wait(lambda: not mesh.app.pipeline._open)


async def test_tenants_end_their_own_requests_only(tmp_path: Path) -> None:
    made = [new_key(name) for name in ("one", "two")]
    write_keys(tmp_path / "keys.json", [entry for _, entry in made])
    one, two = ((("authorization", f"Bearer {key}"),) for key, _ in made)
    async with gateway(
        tmp_path, endless, step_s=0.01, api_keys_file=tmp_path / "keys.json"
    ) as mesh:
        call = ask(mesh, (*one, ("x-request-id", "mine")), stream=True)
        await call.read()
        assert isinstance(await failure(cancel(mesh, "mine", two)), RequestNotFound)
        await cancel(mesh, "mine", one)
        assert b"abort" in await read(call)


@pytest.mark.parametrize("by_header", [True, False])
async def test_time_for_all_of_a_request(tmp_path: Path, by_header: bool) -> None:
    async with gateway(tmp_path, endless, step_s=0.01) as mesh:
        call = ask(mesh, (("x-request-timeout-ms", "2000"),)) if by_header else ask(mesh, timeout=2)
        error = await failure(read(call))
        assert isinstance(error, DeadlineExceeded)
        assert " 2 s" in error.message
        await mesh.wait(lambda: mesh.workers[0].cancels)


@pytest.mark.parametrize("by_header", [True, False])
async def test_time_for_the_first_token(tmp_path: Path, by_header: bool) -> None:
    given: Any = {"metadata": (("x-first-token-timeout-ms", "2000"),)}
    given = given if by_header else {"ttft_timeout": 2}
    async with gateway(tmp_path, silent, step_s=0.01) as mesh:
        error = await failure(read(ask(mesh, **given)))
        assert isinstance(error, DeadlineExceeded)
        assert "no token after 2 s" in error.message
        (submit,) = mesh.workers[0].submits
        assert submit.first_token_timeout.ToNanoseconds() <= 2_000_000_000
        assert submit.total_timeout.ToNanoseconds() > 100_000_000_000


async def test_an_answer_may_take_longer_than_its_first_token_may(tmp_path: Path) -> None:
    async with gateway(tmp_path, endless, step_s=0.006) as mesh:
        answer = json.loads(await read(ask(mesh, ttft_timeout=2)))
        assert answer["usage"]["completion_tokens"] == 400


async def test_waiting_counts_as_time_to_the_first_token(tmp_path: Path) -> None:
    async with gateway(tmp_path, endless, step_s=0.01, max_running_requests=1) as mesh:
        first = ask(mesh, stream=True)
        await first.read()
        error = await failure(read(ask(mesh, ttft_timeout=0.1)))
        assert isinstance(error, DeadlineExceeded)
        assert len(mesh.workers[0].submits) == 1
        first.cancel()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"ttft_timeout": 0.0}, "ttft_timeout"),
        ({"metadata": (("x-request-timeout-ms", "soon"),)}, "x-request-timeout-ms"),
        ({"metadata": (("x-first-token-timeout-ms", "-1"),)}, "x-first-token-timeout-ms"),
    ],
)
async def test_limits_that_are_none(tmp_path: Path, given: Any, param: str) -> None:
    async with gateway(tmp_path, endless) as mesh:
        error = await failure(read(ask(mesh, **given)))
        assert isinstance(error, InvalidRequest)
        assert error.param == param


async def test_vectors_have_no_first_token(tmp_path: Path) -> None:
    """A batch that is half done would end in a 504: dialects and the typed API refuse the limit."""
    given = (("x-first-token-timeout-ms", "60000"),)
    body = HttpBody(data=json.dumps({"model": "tiny", "input": ["a", "b"]}).encode())
    inputs = [gateway_pb2.EmbedInput(text="a")]
    async with gateway(tmp_path, endless) as mesh:
        embeddings = dialects_pb2_grpc.PoolingServiceStub(mesh.channel).CreateEmbeddings
        typed = mesh.typed.Embed(gateway_pb2.EmbedRequest(inputs=inputs), metadata=given)
        for call in (read(embeddings(body, metadata=given)), typed):
            error = await failure(call)
            assert isinstance(error, InvalidRequest)
            assert error.param == "x-first-token-timeout-ms"
            assert "x-request-timeout-ms" in error.message
