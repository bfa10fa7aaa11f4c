"""Next tokens of several steps go out in one message; first tokens, ends and the like at once."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest
from weft.decode.session import Session
from weft.engine.base.errors import PeerUnavailable
from weft.engine.protocol.submits import (
    Accepted,
    Failed,
    Failure,
    Finished,
    GatewayBatch,
    Pong,
    Preempted,
    TokenColumns,
    Tokens,
)
from weft.engine.protocol.timeline import Timeline
from weft.v1 import decode_pb2

NEVER_S = 1e6
IDS = [f"r{number}" for number in range(5)]


class Bench:
    """A Session's writer, and the messages that the gateway got."""

    loop_age_s = 0.0

    def __init__(self, interval_s: float) -> None:
        self.session = Session(1, cast("Any", self), "w", lambda *_: None, 1.0, interval_s)
        self.got: list[decode_pb2.SessionEvent] = []
        self.room = asyncio.Event()
        self.room.set()
        self.drawn: dict[str, list[int]] = defaultdict(list)

    async def write(self, event: decode_pb2.SessionEvent) -> None:
        """The gateway's side."""
        await self.room.wait()
        self.got.append(event)

    def step(self, of: list[str], has_first_tokens: bool = False) -> None:
        """Each of these requests draws a token; some are told as columns, some by themselves."""
        rows = [(name, len(self.drawn[name]), random.randrange(2**20)) for name in of]
        for name, _, token in rows:
            self.drawn[name].append(token)
        cut = random.randint(0, len(rows))
        batch = GatewayBatch(gateway=1, has_first_tokens=has_first_tokens)
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
async def writing(interval_s: float) -> AsyncIterator[Bench]:
    bench = Bench(interval_s)
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


def finished(name: str) -> GatewayBatch:
    end = Finished(
        request_id=name,
        attempt=1,
        sample=0,
        reason="stop",
        stop_token_id=None,
        completion_tokens=1,
        cached_prompt_tokens=0,
        timeline=Timeline(submitted_at=0.0),
    )
    return GatewayBatch(gateway=1, finished=[end])


URGENT: dict[str, Callable[[], GatewayBatch]] = {
    "accepted": lambda: GatewayBatch(gateway=1, accepted=[Accepted(request_id="n", attempt=1)]),
    "preempted": lambda: GatewayBatch(
        gateway=1, preempted=[Preempted(request_id="n", attempt=1, sample=0)]
    ),
    "finished": lambda: finished("r0"),
    "failed": lambda: GatewayBatch(
        gateway=1,
        failed=[
            Failed(request_id="n", attempt=1, failure=Failure(reason="INTERNAL", message="why"))
        ],
    ),
    "pong": lambda: GatewayBatch(gateway=1, pongs=[Pong(nonce=3, unknown=[])]),
}


@pytest.mark.parametrize("kind", [*URGENT, "first token", "first token behind a pause"])
async def test_what_must_not_wait_takes_the_gathered_tokens_along(kind: str) -> None:
    async with writing(NEVER_S) as bench:
        bench.step(IDS)
        await settle()
        assert len(bench.got) == 1
        for _ in range(random.randint(1, 9)):
            bench.step(random.sample(IDS, random.randint(1, len(IDS))))
            await settle()
        assert len(bench.got) == 1
        if kind.startswith("first token"):
            bench.step(["late" if kind == "first token" else "r0"], has_first_tokens=True)
        else:
            bench.session.push(URGENT[kind]())
        await settle()
        assert len(bench.got) == 2
        assert bench.received() == bench.drawn
        bench.step(IDS)
        await settle()
        assert len(bench.got) == 2, "what comes later gathers again"


async def test_tokens_come_in_time_without_anything_else() -> None:
    async with writing(1e-3) as bench:
        for _ in range(random.randint(5, 30)):
            bench.step(random.sample(IDS, random.randint(1, len(IDS))))
            await asyncio.sleep(random.choice([0.0, 1e-3]))
        async with asyncio.timeout(30):
            while bench.received() != bench.drawn:
                await asyncio.sleep(1e-3)


async def test_by_default_each_step_goes_out_at_once_and_a_slow_gateway_gets_them_merged() -> None:
    async with writing(0.0) as bench:
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
    bench = Bench(NEVER_S)
    task = asyncio.create_task(bench.session.write(cast("Any", bench)))
    bench.step(IDS)
    await settle()
    bench.step(IDS)
    await settle()
    bench.session.end(PeerUnavailable("the engine died", stage="decode"))
    with pytest.raises(PeerUnavailable, match="the engine died"):
        await task
    assert bench.received() == bench.drawn
