"""Pages that many fills send as messages at once: what waits in streams is bounded over all."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

from weft.contract.fills import FillReply, FillStart
from weft.contract.handle import FillEvent
from weft.pages.fills import filler
from weft.pages.fills.data_budget import DataBudget
from weft.pages.fills.filler import Filler
from weft.pages.memory.page_memory import PageMemory
from weft.pages.transfer.chunks import ShipChunk, ShipResult
from weft.pages.transfer.lanes import FillerLanes
from weft.testing.services.fill_commands import fill_handle
from weft.testing.services.ready_prompts import ReadyPrompts

NUM_FILLS, NUM_PAGES, PAGE_BYTES = 40, 4, 100
MOST = 350
"""Three chunks."""


class Streams:
    """A shipper and the streams behind it, which pass on when they are told to."""

    holds_data = False

    def __init__(self) -> None:
        self.filler: Any = None
        self.queued: list[ShipChunk] = []
        self.said: Counter[int] = Counter()
        self.waiting: Counter[int] = Counter()
        """Bytes that each stream was given and has not passed on."""
        self.ends: dict[int, str] = {}

    def prepare(self, *_: object) -> None:
        pass

    stop = forget = prepare

    def ship(self, chunk: ShipChunk) -> None:
        self.queued.append(chunk)

    def reply(self, reply: FillReply) -> None:
        self.said[reply.stream] += 1
        self.waiting[reply.stream] += len(reply.event.data)
        if reply.event.kind in ("done", "failed", "stopped"):
            self.ends[reply.stream] = reply.event.kind

    def send(self, chunk: ShipChunk) -> None:
        data = bytes(PAGE_BYTES * len(chunk.local_pages))
        event = FillEvent(kind="data", chunk=chunk.index, data=data)
        self.filler.on_data(chunk.lease_id, event)
        digests = [1] * len(chunk.local_pages)
        self.filler.on_shipped(ShipResult(chunk.lease_id, chunk.index, digests))

    def pass_on(self, stream: int) -> None:
        self.waiting[stream] = 0
        self.filler.on_taken(stream, self.said[stream])
        if stream in self.ends:
            self.filler.on_stream_broken(stream)

    @property
    def num_bytes(self) -> int:
        queued = sum(PAGE_BYTES * len(chunk.local_pages) for chunk in self.queued)
        return queued + sum(self.waiting.values())


def lease_of(stream: int) -> bytes:
    return stream.to_bytes(16, "big")


def test_what_many_fills_send_is_bounded_and_all_end(monkeypatch: Any) -> None:
    monkeypatch.setattr(filler, "MAX_DATA_CHUNK_BYTES", PAGE_BYTES)
    monkeypatch.setattr(filler, "DataBudget", lambda: DataBudget(MOST))
    memory, streams = PageMemory(20, None), Streams()
    prompts = ReadyPrompts(memory.allocate(NUM_PAGES))
    parts: Any = (prompts, streams)
    tested = streams.filler = Filler(
        1, 5, PAGE_BYTES, memory, *parts, streams.reply, time.monotonic, lanes=FillerLanes()
    )
    for stream in range(NUM_FILLS):
        handle = fill_handle(lease_of(stream), page_size=1, filler_epoch=5, lease_s=600.0)
        tested.on_start(FillStart(stream=stream, handle=handle, request_id="", traceparent=""))
        job = prompts.jobs[handle.lease_id]
        job.num_computed = NUM_PAGES
        tested.on_progress(job)
    left = set(range(0, NUM_FILLS, 5))
    """Of owners that leave in the middle."""
    for _ in range(100_000):
        assert streams.num_bytes <= MOST
        if streams.queued and random.random() < 0.5:
            streams.send(streams.queued.pop(random.randrange(len(streams.queued))))
        else:
            stream = random.randrange(NUM_FILLS)
            if stream in left and streams.waiting[stream] and random.random() < 0.3:
                left.discard(stream)
                streams.waiting[stream] = 0
                tested.on_stream_broken(stream)
                streams.ends[stream] = "broken"
            elif streams.ends.get(stream) != "broken":
                streams.pass_on(stream)
        if len(streams.ends) == NUM_FILLS and not streams.queued:
            break
    assert len(streams.ends) == NUM_FILLS
    assert Counter(streams.ends.values())["done"] >= NUM_FILLS - NUM_FILLS // 5
    assert not streams.filler.num_active
