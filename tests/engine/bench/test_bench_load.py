"""The load tool against a server of a few lines, which answers what it is asked."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))

from open_loop import clients
from open_loop.report import Goal, summarize
from open_loop.workload import Turn, Visit, arrivals, sessions, single_requests

VOCABULARY = 500


class Server:
    """Streams each completion as events of two tokens; token i of an answer is i."""

    def __init__(self, fails: bool = False) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.fails = fails
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            body = json.dumps({"data": [{"id": "m"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            (length,) = (
                int(line.split(":")[1])
                for line in head.splitlines()
                if line.lower().startswith("content-length")
            )
            await self._complete(json.loads(await reader.readexactly(length)), writer)
        await writer.drain()
        writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        if self.fails:
            writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"9\r\n: quiet\n\n\r\n")
        count = body["max_tokens"]
        events: list[Any] = [
            {"id": "x", "choices": [{"text": "", "token_ids": list(range(at, min(at + 2, count)))}]}
            for at in range(0, count, 2)
        ]
        details = {"cached_tokens": 8}
        events.append(
            {"choices": [], "usage": {"completion_tokens": count, "prompt_tokens_details": details}}
        )
        for event in [*map(json.dumps, events), "[DONE]"]:
            data = f"data: {event}\n\n".encode()
            writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(b"0\r\n\r\n")


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Runs it in a thread of its own."""
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def serve() -> None:
        listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        started.set()
        async with listening:
            await listening.serve_forever()

    task = loop.create_task(serve())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    thread.start()
    assert started.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
        loop.close()


def run(server: Server, visits: list[Visit]) -> list[clients.Outcome]:
    target = clients.Target(server.url, VOCABULARY, 20.0)
    return clients._run_share(visits, target, time.monotonic() + 0.1)


def test_every_request_is_sent_and_counted() -> None:
    rng = random.Random(1)
    visits = single_requests([0.0, 0.0, 0.05], (5, 20), (1, 9), rng)
    with serving(Server()) as server:
        outcomes = run(server, visits)
    assert not [outcome.error for outcome in outcomes if outcome.error]
    sent = sorted(len(body["prompt"]) for body in server.bodies)
    assert sent == sorted(visit.turns[0].new_tokens for visit in visits)
    for outcome in outcomes:
        assert outcome.sent_s >= outcome.due_s
        assert outcome.ttft_s > 0.0
        assert len(outcome.events_s) == -(-outcome.output_tokens // 2)
    row = summarize("x", outcomes, Goal(60.0, 60.0))
    assert (row.requests, row.failed) == (3, 0)
    assert row.goodput_per_s == pytest.approx(row.requests_per_s)
    assert row.tokens_per_s * row.seconds == pytest.approx(
        sum(visit.turns[0].output_tokens for visit in visits)
    )
    assert row.cached_share * sum(sent) == pytest.approx(8 * len(visits))


def test_a_session_sends_what_was_said_before() -> None:
    (visit,) = sessions([0.0], (30, 30), 3, (4, 6), (5, 5), 0.0, random.Random(2))
    with serving(Server()) as server:
        outcomes = run(server, [visit])
    prompts = [body["prompt"] for body in server.bodies]
    assert [outcome.turn for outcome in outcomes] == [0, 1, 2]
    for before, after, turn in zip(prompts, prompts[1:], visit.turns[1:], strict=False):
        assert after[: len(before) + 5] == [*before, *range(5)]
        assert len(after) == len(before) + 5 + turn.new_tokens


def test_a_refusal_fails_its_request_and_no_goal_is_met() -> None:
    with serving(Server(fails=True)) as server:
        outcomes = run(server, [Visit(0.0, (Turn(1, 5, 5), Turn(2, 5, 5)))])
    (outcome,) = outcomes
    assert "503" in outcome.error
    row = summarize("x", outcomes, Goal(60.0, 60.0))
    assert (row.failed, len(row.errors)) == (1, 1)


def test_arrivals_have_their_rate() -> None:
    times_s = list(arrivals(50.0, 5_000, "poisson", random.Random(3)))
    assert times_s == sorted(times_s)
    assert times_s[-1] == pytest.approx(100.0, rel=0.1)
    assert set(arrivals(0.0, 5, "burst", random.Random(3))) == {0.0}
    assert list(arrivals(4.0, 3, "uniform", random.Random(3))) == [0.0, 0.25, 0.5]
