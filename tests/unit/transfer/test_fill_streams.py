"""The gRPC side of a filler beside the filler itself: every chunk of a fill is shipped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from weft.common.telemetry.spans import Tracer
from weft.common.worker.fill_streams import FillStreams
from weft.contract.codec.pairs import HANDLE
from weft.contract.fills import FillStart
from weft.contract.handle import FillEvent, KvHandle
from weft.pages.fills.filler import Filler
from weft.pages.memory.page_memory import PageMemory
from weft.pages.transfer.chunks import ShipResult
from weft.pages.transfer.lanes import FillerLanes
from weft.testing.services.fill_commands import fill_handle, nixl_target
from weft.testing.services.ready_prompts import ReadyPrompts
from weft.v1 import common_pb2, kv_pb2

LEASE = bytes(16)
DATA, NIXL = common_pb2.TRANSPORT_KIND_DATA, common_pb2.TRANSPORT_KIND_NIXL
PAGE_BYTES = 8


class Shipper:
    """Sends a chunk's bytes over the stream, or says that they were written."""

    holds_data = False

    def __init__(self) -> None:
        self.shipped: list[int] = []
        self.filler: Any = None

    def prepare(self, *_: object) -> None:
        pass

    stop = forget = prepare

    def ship(self, chunk: Any) -> None:
        self.shipped.append(chunk.index)
        asyncio.get_running_loop().call_soon(self._end, chunk)

    def _end(self, chunk: Any) -> None:
        data = FillEvent(kind="data", chunk=chunk.index, start_token=chunk.start_token, data=b"x")
        self.filler.on_data(chunk.lease_id, data)
        self.filler.on_shipped(
            ShipResult(chunk.lease_id, chunk.index, [1] * len(chunk.local_pages))
        )


class Port:
    """A filler whose prompt is computed in two chunks."""

    def __init__(self, filler: Any, jobs: ReadyPrompts) -> None:
        self._filler = filler
        self._jobs = jobs

    async def start(self, start: FillStart) -> None:
        self._filler.on_start(start)
        for num_computed in (2, 4):
            job = self._jobs.jobs[start.handle.lease_id]
            job.num_computed = num_computed
            self._filler.on_progress(job)

    def renew(self, lease_id: bytes) -> None:
        self._filler.on_renew(lease_id)

    def stop(self, lease_id: bytes) -> None:
        self._filler.on_stop(lease_id)

    def ended(self, stream: int) -> None:
        self._filler.on_stream_broken(stream)

    def taken(self, stream: int, num_events: int) -> None:
        self._filler.on_taken(stream, num_events)


def handle_of(memory_type: str) -> KvHandle:
    target = nixl_target(PAGE_BYTES, 9, memory_type=memory_type) if memory_type else None
    return fill_handle(LEASE, page_size=1, filler_epoch=5, lease_s=600.0, nixl=target)


@pytest.mark.parametrize(
    ("memory_type", "transport"),
    [
        ("", DATA),
        ("DRAM", NIXL),
        ("VRAM", DATA),
    ],
)
async def test_all_chunks_are_shipped(memory_type: str, transport: int) -> None:
    """Also where the owner offers memory of a kind that this filler cannot write to."""
    memory, shipper = PageMemory(20, None), Shipper()
    jobs = ReadyPrompts(memory.allocate(4))
    port: Any = None

    class Late:
        """The port of a filler that needs the streams to be there."""

        def __getattr__(self, name: str) -> Any:
            return getattr(port, name)

    late: Any = Late()
    streams = FillStreams(late, Tracer("prefill", is_on=False))
    jobs_and_shipper: Any = jobs, shipper
    filler = Filler(
        1,
        5,
        PAGE_BYTES,
        memory,
        *jobs_and_shipper,
        streams.deliver,
        time.monotonic,
        lanes=FillerLanes(nixl_version="1"),
    )
    shipper.filler, port = filler, Port(filler, jobs)
    said: list[kv_pb2.FillEvent] = []

    async def requests() -> AsyncIterator[kv_pb2.FillControl]:
        yield kv_pb2.FillControl(start={"handle": HANDLE.plain(handle_of(memory_type))})
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        async for event in streams.serve(requests()):
            said.append(event)
            if event.WhichOneof("event") == "data":
                await asyncio.sleep(0)
    assert shipper.shipped == [0, 1]
    assert said[0].accepted.transport == transport
    assert said[-1].WhichOneof("event") == "done"
