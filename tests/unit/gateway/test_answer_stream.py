"""Deltas of several answers are sent together; each outlet gets all of its own, in order."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from weft.contract.errors import PeerUnavailable, WeftError
from weft.gateway.generation.answer import Answer, Deliveries, Delta
from weft.gateway.generation.generation import STOP, SampleOutput

RENDERER: Any = SimpleNamespace(stop_reason=None)


class SlowOutlet:
    """Takes nothing more after some of its data until it is let."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._may_go = asyncio.Event()
        self._may_go.set()
        self.texts: list[str] = []
        self.is_broken = False

    def send(self, data: bytes) -> bool:
        assert self._may_go.is_set(), "sent before it was ready"
        if self.is_broken:
            return False
        self.texts.append(data.decode())
        if self._rng.random() < 0.3:
            self._may_go.clear()
        return self._may_go.is_set()

    def let(self) -> None:
        self._may_go.set()

    async def ready(self) -> None:
        await self._may_go.wait()
        if self.is_broken:
            raise PeerUnavailable("it broke")


class Stream:
    """An answer of some samples, whose texts the test writes."""

    def __init__(self, deliveries: Deliveries, rng: random.Random, num_samples: int = 1) -> None:
        raw: Any = SimpleNamespace(model="m")
        self.answer = Answer(raw, cast("Any", None), 1 << 20, deliveries)
        self.samples = [SampleOutput(index, RENDERER) for index in range(num_samples)]
        generation: Any = SimpleNamespace(samples=self.samples, start=lambda: None)
        self.answer.submit([generation])
        self.outlet = SlowOutlet(rng)
        self.told = ["" for _ in self.samples]
        self.task = asyncio.create_task(self.answer.stream(self._encode, self.outlet))

    def _encode(self, deltas: list[Delta]) -> bytes:
        if any("!" in delta.text for delta in deltas):
            raise ValueError("no such text")
        for delta in deltas:
            self.told[delta.sample] += delta.text
        return "".join(delta.text for delta in deltas).encode()

    def write(self, index: int, text: str, *, is_last: bool = False) -> None:
        sample = self.samples[index]
        sample.text += text
        if is_last:
            sample.finish_reason = STOP
        self.answer.on_sample(sample, len(text))


async def test_each_outlet_gets_all_of_its_answer_in_order() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, deliveries = random.Random(seed), Deliveries()
    streams = [Stream(deliveries, rng, rng.randint(1, 3)) for _ in range(20)]
    written = [["" for _ in stream.samples] for stream in streams]
    for _ in range(60):
        for number, stream in enumerate(streams):
            for index in range(len(stream.samples)):
                if rng.random() < 0.5:
                    text = rng.choice(("", "a", "bc", "é"))
                    written[number][index] += text
                    stream.write(index, text)
            if rng.random() < 0.3:
                stream.outlet.let()
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
    for stream in streams:
        for index in range(len(stream.samples)):
            stream.write(index, ".", is_last=True)
    while not all(stream.task.done() for stream in streams):
        for stream in streams:
            stream.outlet.let()
        await asyncio.sleep(0)
    for stream, texts in zip(streams, written, strict=True):
        await stream.task
        assert stream.told == [text + "." for text in texts]
        assert len("".join(stream.outlet.texts)) == len("".join(stream.told))
        assert "" not in stream.outlet.texts


async def test_deltas_do_not_wake_the_task_of_an_outlet_that_takes_them() -> None:
    stream = Stream(Deliveries(), random.Random(1))
    stream.outlet._rng = cast("Any", SimpleNamespace(random=lambda: 1.0))
    while stream.answer._reader is None:
        await asyncio.sleep(0)
    waiting = stream.answer._reader
    for text in "abc":
        stream.write(0, text)
        await asyncio.sleep(0)
        assert stream.outlet.texts[-1] == text
        assert stream.answer._reader is waiting
        assert not waiting.done()
    stream.write(0, "", is_last=True)
    await stream.task


async def test_a_text_that_cannot_be_written_fails_its_answer_alone() -> None:
    deliveries = Deliveries()
    streams = [Stream(deliveries, random.Random(2)) for _ in range(3)]
    for stream in streams:
        stream.outlet._rng = cast("Any", SimpleNamespace(random=lambda: 1.0))
        while stream.answer._reader is None:
            await asyncio.sleep(0)
    for stream, text in zip(streams, ("a", "!", "b"), strict=True):
        stream.write(0, text)
    with pytest.raises(ValueError, match="no such text"):
        await streams[1].task
    for stream in (streams[0], streams[2]):
        stream.write(0, "z", is_last=True)
        await stream.task
    assert [stream.told[0] for stream in streams] == ["az", "", "bz"]


@pytest.mark.parametrize("breaks", [True, False])
async def test_a_failure_reaches_the_task(breaks: bool) -> None:
    stream = Stream(Deliveries(), random.Random(3))
    stream.outlet._rng = cast("Any", SimpleNamespace(random=lambda: 1.0))
    while stream.answer._reader is None:
        await asyncio.sleep(0)
    if breaks:
        stream.outlet.is_broken = True
        stream.write(0, "a")
    else:
        stream.answer.generations = []
        stream.answer.fail(WeftError("the client has gone"))
    with pytest.raises(WeftError):
        await stream.task
