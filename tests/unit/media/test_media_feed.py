"""Media on their way to a worker: each is sent once, whoever asks for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata
from weft.contract.errors import DeadlineExceeded, WeftError
from weft.contract.spans import Media
from weft.gateway.fleet.media_feed import MediaFeed
from weft.v1 import worker_pb2


class Worker:
    """Takes media once it may; then it fails or has them."""

    def __init__(self) -> None:
        self.calls = list[list[bytes]]()
        self.may_end = asyncio.Event()
        self.num_cancelled = 0
        self.fails = False

    async def PutMedia(self, parts: Iterator[worker_pb2.PutMediaRequest], timeout: float) -> None:
        self.calls.append([part.head.digest for part in parts if part.HasField("head")])
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.fails:
            raise AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), "gone")


def feed_of(worker: Worker) -> MediaFeed:
    return MediaFeed(cast("Any", worker))


def medium() -> Media:
    return Media.of("image", "p", (1, 4, 3), random.randbytes(12))


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_two_requests_wait_for_one_call() -> None:
    worker, (first, second, third) = Worker(), (medium() for _ in range(3))
    feed = feed_of(worker)
    one = asyncio.create_task(feed.bring([first, second], 1, 60.0))
    await turns()
    assert feed.num_coming_bytes == 24
    other = asyncio.create_task(feed.bring([second, third], 1, 60.0))
    await turns()
    assert worker.calls == [[first.digest, second.digest], [third.digest]]
    assert not one.done()
    assert not other.done()
    worker.may_end.set()
    await asyncio.gather(one, other)
    assert feed.num_coming_bytes == 0
    await feed.bring([first, second, third], 1, 60.0)
    assert len(worker.calls) == 2
    feed.forget([second])
    await feed.bring([first, second, third], 1, 60.0)
    await feed.bring([first], 2, 60.0)  # Another incarnation has nothing.
    assert worker.calls[2:] == [[second.digest], [first.digest]]


async def test_a_call_ends_once_all_have_left() -> None:
    worker, one = Worker(), medium()
    feed = feed_of(worker)
    requests = [asyncio.create_task(feed.bring([one], 1, 60.0)) for _ in range(2)]
    await turns()
    requests[0].cancel()
    await turns()
    assert worker.num_cancelled == 0
    requests[1].cancel()
    again = asyncio.create_task(feed.bring([one], 1, 60.0))
    await turns()
    assert (worker.num_cancelled, len(worker.calls)) == (1, 2)
    worker.may_end.set()
    await again


async def test_all_that_wait_learn_of_a_failure_and_may_try_again() -> None:
    worker, one = Worker(), medium()
    worker.fails = True
    feed = feed_of(worker)
    requests = [asyncio.create_task(feed.bring([one], 1, 60.0)) for _ in range(2)]
    await turns()
    worker.may_end.set()
    for request in requests:
        with pytest.raises(WeftError, match="gone"):
            await request
    worker.fails = False
    await feed.bring([one], 1, 60.0)
    assert len(worker.calls) == 2


async def test_a_wait_for_another_requests_call_has_its_own_end() -> None:
    worker, one = Worker(), medium()
    feed = feed_of(worker)
    first = asyncio.create_task(feed.bring([one], 1, 60.0))
    await turns()
    with pytest.raises(DeadlineExceeded, match="did not take the prompt's media"):
        await feed.bring([one], 1, 0.0)
    worker.may_end.set()
    await first
