"""Nothing waits without a bound for a peer that says nothing."""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from weft.common.rpc import streams
from weft.common.rpc.errors import from_rpc_error
from weft.common.rpc.interceptors import ErrorInterceptor
from weft.common.settings import ServiceSettings
from weft.common.telemetry.tracing import make_tracer
from weft.common.worker import fill_client
from weft.common.worker.fill_client import FillClient
from weft.contract.errors import PeerUnavailable
from weft.contract.messages import Inbox
from weft.decode import session as decode_session
from weft.decode.service import DecodeService
from weft.testing.services.fill_commands import fill_command
from weft.testing.services.kv_chain import StoreCaller
from weft.testing.services.silent_prefill import silent_prefill
from weft.testing.services.store_server import store_here
from weft.v1 import common_pb2, decode_pb2, decode_pb2_grpc, kvstore_pb2


class Thing:
    """Stands for what a service holds and does not use here."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class FakeEngine:
    """Takes what a service has to say."""

    loop_age_s = 0.0

    def __init__(self) -> None:
        self.said: list[Inbox] = []
        self.is_gone = False

    def require(self) -> None:
        if self.is_gone:
            raise PeerUnavailable("the engine is gone")

    def send(self, inbox: Inbox) -> None:
        self.said.append(inbox)


@asynccontextmanager
async def decode_service(*, is_gone: bool = False) -> AsyncIterator[Any]:
    """A stub of a decode service without an engine, or whose engine is gone."""
    engine = FakeEngine()
    engine.is_gone = is_gone
    context: Any = Thing(
        settings=Thing(crash_dir=None),
        engine=engine,
        info=Thing(epoch=1),
        worker_id="decode-here",
        tracer=make_tracer(ServiceSettings(), "decode-here"),
    )
    server = grpc.aio.server(interceptors=(ErrorInterceptor(),))
    DecodeService(context).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield decode_pb2_grpc.DecodeServiceStub(channel)
    finally:
        await server.stop(0)


@asynccontextmanager
async def session_of(stub: Any) -> AsyncIterator[Any]:
    """An open Session."""
    session = stub.Session(timeout=120)
    hello = decode_pb2.SessionRequest.Hello(gateway_id="g", gateway_epoch=1)
    await session.write(decode_pb2.SessionRequest(hello=hello))
    assert (await session.read()).welcome.worker_id == "decode-here"
    try:
        yield session
    finally:
        session.cancel()


async def check_refused(call: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), 60)
    error = from_rpc_error(caught.value)
    assert error.reason == "DEADLINE_EXCEEDED"
    assert "first message" in error.message


async def test_a_worker_without_its_engine_welcomes_nobody() -> None:
    """A gateway would send it requests, and lose them again and again."""
    async with decode_service(is_gone=True) as stub:
        session = stub.Session(timeout=60)
        await session.write(decode_pb2.SessionRequest(hello=decode_pb2.SessionRequest.Hello()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(session.read(), 60)
        assert from_rpc_error(caught.value).reason == "PEER_UNAVAILABLE"


async def test_a_session_without_a_hello_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FIRST_MESSAGE_TIMEOUT_S", 1.0)
    async with decode_service() as stub:
        await check_refused(stub.Session(timeout=120))
        # One that says hello is welcome, however long it takes for the rest.
        async with session_of(stub) as session:
            reading = asyncio.create_task(session.read())
            await asyncio.sleep(1.5)
            assert not reading.done()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_message_that_came_while_its_reader_stood_still_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "FIRST_MESSAGE_TIMEOUT_S", 0.05)

    async def requests() -> AsyncIterator[str]:
        time.sleep(0.2)  # noqa: ASYNC251 - As on a machine that is too busy.
        for _ in range(20):  # What has come takes some turns of the loop.
            await asyncio.sleep(0)
        yield "first"

    assert await streams.first_message(requests()) == "first"


def submit_of(request_id: str, announced: int, ids: list[int]) -> decode_pb2.SessionRequest:
    submit = decode_pb2.Submit(request_id=request_id, attempt=1, prompt_length=announced)
    submit.prompt.ids.extend(ids)
    return decode_pb2.SessionRequest(submit=submit)


async def test_a_submit_whose_parts_do_not_come_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_session, "PARTS_TIMEOUT_S", 0.3)
    async with decode_service() as stub, session_of(stub) as session:
        await session.write(submit_of("whole", 2, [5, 6]))
        await session.write(submit_of("parts", 3, [5, 6]))
        ping = decode_pb2.SessionRequest.Ping(nonce=1)
        reading = asyncio.create_task(session.read())
        async with asyncio.timeout(60):
            while not reading.done():  # The time is looked at when a message comes.
                await session.write(decode_pb2.SessionRequest(ping=ping))
                await asyncio.sleep(0.1)
        (failed,) = (await reading).failed
        assert (failed.request_id, failed.error.code) == ("parts", "DEADLINE_EXCEEDED")


@pytest.mark.parametrize("kind", ["prompt", "sample", "unknown sample"])
async def test_parts_beyond_what_was_announced_fail_their_request(kind: str) -> None:
    """Also while something else of it is missing."""
    ids = list(range(random.randrange(2, 9)))
    async with decode_service() as stub, session_of(stub) as session:
        request = submit_of("much", 5, [1, 2])
        request.submit.progress.add(sample=1, num_tokens=2)
        await session.write(request)
        key = {"request_id": "much", "attempt": 1}
        tokens = common_pb2.TokenIds(ids=[*ids, 1, 2])
        if kind == "prompt":
            part = decode_pb2.PromptPart(**key, tokens=tokens)
            await session.write(decode_pb2.SessionRequest(prompt_part=part))
        else:
            sample = 1 if kind == "sample" else 2
            part = decode_pb2.GeneratedPart(**key, sample=sample, tokens=tokens)
            await session.write(decode_pb2.SessionRequest(generated_part=part))
        (failed,) = (await asyncio.wait_for(session.read(), 60)).failed
        assert (failed.request_id, failed.error.code) == ("much", "INVALID_REQUEST")
        assert failed.error.param == ("prompt" if kind == "prompt" else "progress")
        # The Session goes on, and what comes later for that request is nobody's.
        for part_ids in ([3, 4, 5], [3]):
            part = decode_pb2.PromptPart(**key, tokens=common_pb2.TokenIds(ids=part_ids))
            await session.write(decode_pb2.SessionRequest(prompt_part=part))
        await session.write(submit_of("over", 1, [1, 2]))
        (failed,) = (await asyncio.wait_for(session.read(), 60)).failed
        assert failed.request_id == "over"
        await session.write(submit_of("x" * 65, 1, [1, 2]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(session.read(), 60)
        assert from_rpc_error(caught.value).reason == "INVALID_REQUEST"


async def test_a_fill_without_a_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FIRST_MESSAGE_TIMEOUT_S", 0.3)
    async with store_here() as (_, address), StoreCaller(address) as caller:
        await check_refused(caller.stub.Fill(timeout=120))
        with pytest.raises(grpc.aio.AioRpcError, match="first message"):
            await asyncio.wait_for(_answer(caller.stub.PutData(timeout=120)), 60)


async def _answer(call: Any) -> kvstore_pb2.PutDataResponse:
    answer = await call
    assert isinstance(answer, kvstore_pb2.PutDataResponse)
    return answer


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_filler_that_does_not_answer_a_stop_is_left(
    monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    monkeypatch.setattr(fill_client, "STOP_TIMEOUT_S", 0.3)
    engine: Any = FakeEngine()
    client = FillClient(engine)
    lease_id = secrets.token_bytes(16)
    async with silent_prefill() as (filler, address):
        client.run(fill_command("start", lease_id, address))
        if is_open:
            async with asyncio.timeout(60):
                while not filler.num_fills:
                    await asyncio.sleep(0.02)
        client.run(fill_command("stop", lease_id, address))
        async with asyncio.timeout(60):
            while client.sizes()["fill_calls"]:
                await asyncio.sleep(0.02)
        (said,) = engine.said
        assert said.filler_events[0].lease_id == lease_id
        assert said.filler_events[0].event.kind == "broken"
        assert "stop" in said.filler_events[0].event.message
        await client.close()


class Calls:
    """Channels whose calls take `num_writes` messages, and then end with `error` on a write."""

    def __init__(self, num_writes: int, error: type[Exception]) -> None:
        self.num_left = num_writes
        self.error = error
        self.has_ended = asyncio.Event()

    def stream_stream(self, *_: object, **__: object) -> Any:
        return lambda: self

    async def write(self, _: object) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            self.has_ended.set()
            raise self.error("no more")

    async def read(self) -> object:
        await self.has_ended.wait()
        return grpc.aio.EOF

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.mark.parametrize("num_writes", [0, 1])
@pytest.mark.parametrize("error", [grpc.aio.UsageError, asyncio.InvalidStateError, KeyError])
async def test_a_write_to_a_fill_that_has_ended_is_its_end(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_writes: int,
    error: type[Exception],
) -> None:
    """The first write or a renewal; what is no end of a stream is logged beside it."""
    calls = Calls(num_writes, error)
    monkeypatch.setattr(fill_client, "open_channel", lambda *_: calls)
    engine: Any = FakeEngine()
    client = FillClient(engine)
    lease_id = secrets.token_bytes(16)
    client.run(fill_command("start", lease_id, "nowhere:1"))
    client.run(fill_command("renew", lease_id, "nowhere:1"))
    async with asyncio.timeout(60):
        while client.sizes()["fill_tasks"]:
            await asyncio.sleep(0.01)
    (said,) = engine.said
    assert said.filler_events[0].event.kind == "broken"
    gc.collect()  # asyncio tells then of what nobody took
    told = [record.exc_info for record in caplog.records if record.exc_info]
    # Leftovers of other tests may be told of, too.
    logged = [kind for kind, raised, _ in told if "no more" in str(raised)]
    assert logged == ([error] if error is KeyError else [])
