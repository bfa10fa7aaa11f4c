"""A Session sends what it gets at once; what a slow gateway could not take goes out merged."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest
from weft.contract.errors import PeerUnavailable
from weft.contract.submits import (
    Failed,
    Failure,
    Finished,
    GatewayBatch,
    TokenColumns,
    Tokens,
)
from weft.contract.timeline import Timeline
from weft.decode.session import Session
from weft.v1 import common_pb2, decode_pb2

IDS = [f"r{number}" for number in range(5)]


class Bench:
    """A Session's writer, and the messages that the gateway got."""

    loop_age_s = 0.0

    def __init__(self) -> None:
        self.session = Session(1, cast("Any", self), "w", lambda *_: None, 1.0)
        self.got: list[decode_pb2.SessionEvent] = []
        self.room = asyncio.Event()
        self.room.set()
        self.drawn: dict[str, list[int]] = defaultdict(list)

    def send(self, inbox: Any) -> None:
        """The engine's side."""

    async def write(self, event: decode_pb2.SessionEvent) -> None:
        """The gateway's side."""
        await self.room.wait()
        self.got.append(event)

    def step(self, of: list[str]) -> None:
        """Each of these requests draws a token; some are told as columns, some by themselves."""
        rows = [(name, len(self.drawn[name]), random.randrange(2**20)) for name in of]
        for name, _, token in rows:
            self.drawn[name].append(token)
        cut = random.randint(0, len(rows))
        batch = GatewayBatch(gateway=1)
        batch.tokens += [Tokens(name, 1, 0, at, [token], []) for name, at, token in rows[:cut]]
        if rest := rows[cut:]:
            names, indices, tokens = (list(column) for column in zip(*rest, strict=True))
            ones, zeros = [1] * len(rest), [0] * len(rest)
            batch.columns.append(
                TokenColumns(names, ones, zeros, indices, tokens, {})  # type: ignore[arg-type]
            )
        self.session.push(batch)

    def received(self) -> dict[str, list[int]]:
        """Tokens by request, each of which follows those before it."""
        found: dict[str, list[int]] = defaultdict(list)
        for event in self.got:
            for tokens in event.tokens:
                assert tokens.first_index == len(found[tokens.request_id])
                found[tokens.request_id] += tokens.ids
        return found


@asynccontextmanager
async def writing() -> AsyncIterator[Bench]:
    bench = Bench()
    task = asyncio.create_task(bench.session.write(cast("Any", bench)))
    try:
        yield bench
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_batches_go_out_at_once_and_a_slow_gateway_gets_them_merged() -> None:
    async with writing() as bench:
        for number in range(3):
            bench.step(IDS)
            await settle()
            assert len(bench.got) == 1 + number
        bench.room.clear()
        for _ in range(4):
            bench.step(IDS)
            await settle()
        bench.room.set()
        await settle()
        assert len(bench.got) == 5
        assert bench.received() == bench.drawn


async def test_the_end_of_a_session_does_not_wait() -> None:
    bench = Bench()
    task = asyncio.create_task(bench.session.write(cast("Any", bench)))
    bench.step(IDS)
    await settle()
    bench.step(IDS)
    bench.session.end(PeerUnavailable("the engine died", stage="decode"))
    with pytest.raises(PeerUnavailable, match="the engine died"):
        await task
    assert bench.received() == bench.drawn


async def test_streams_are_named_until_their_attempts_have_ended() -> None:
    async def submits() -> AsyncIterator[decode_pb2.SessionRequest]:
        for number, name in enumerate(IDS[:4]):
            submit = decode_pb2.Submit(
                request_id=name,
                attempt=1,
                prompt=common_pb2.TokenIds(ids=[1]),
                prompt_length=1,
                sampling=common_pb2.SamplingParams(n=2, temperature=1.0, top_p=1.0),
                stop=common_pb2.StopCriteria(max_tokens=9),
                stream=10 * number,
            )
            yield decode_pb2.SessionRequest(submit=submit)

    def ends(name: str, sample: int) -> Finished:
        return Finished(
            request_id=name,
            attempt=1,
            sample=sample,
            reason="length",
            stop_token_id=None,
            completion_tokens=1,
            cached_prompt_tokens=0,
            timeline=Timeline(submitted_at=0.0),
        )

    async with writing() as bench:
        await bench.session.read(submits())
        names, samples = [*IDS[:4], IDS[1], IDS[2]], [0, 0, 0, 0, 1, 1]
        columns = TokenColumns(names, [1] * 6, samples, [0] * 6, [7] * 6, {})
        failed = Failed(
            request_id=IDS[3], attempt=1, failure=Failure(reason="INTERNAL", message="")
        )
        finished = [ends(IDS[1], 0), ends(IDS[2], 0), ends(IDS[2], 1)]
        first = GatewayBatch(gateway=1, columns=[columns], finished=finished, failed=[failed])
        bench.session.push(first)
        await settle()
        bench.session.push(GatewayBatch(gateway=1, columns=[columns]))
        await settle()
    before, after = bench.got
    # 0 is no number.
    assert [tokens.request_id for tokens in before.tokens] == [IDS[0]]
    assert [*before.columns.streams] == [10, 20, 30, 11, 21]
    assert [tokens.request_id for tokens in after.tokens] == [IDS[0], IDS[2], IDS[3], IDS[2]]
    assert [*after.columns.streams] == [10, 11]
