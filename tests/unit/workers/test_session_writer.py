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
from weft.contract.submits import GatewayBatch, TokenColumns, Tokens
from weft.decode.session import Session
from weft.v1 import decode_pb2

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
