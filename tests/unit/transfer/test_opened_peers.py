"""A filler does not know at first whether it reaches an owner's GPU memory."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from weft.contract.fills import FillReply, FillStart
from weft.contract.handle import SharedTargetInfo
from weft.pages.fills.filler import MAX_DATA_CHUNK_BYTES, Filler
from weft.pages.memory.page_memory import PageMemory
from weft.pages.transfer.chunks import PeerOpened, ShipChunk
from weft.pages.transfer.lanes import FillerLanes
from weft.testing.services.fill_commands import fill_handle
from weft.testing.services.ready_prompts import ReadyPrompts

LEASE = bytes(16)
TARGET = SharedTargetInfo(
    socket="s", secret=bytes(32), page_bytes=MAX_DATA_CHUNK_BYTES, num_pages=9, memory_type="VRAM"
)


class Shipper:
    """Keeps what it is to ship."""

    holds_data = False

    def __init__(self) -> None:
        self.chunks: list[ShipChunk] = []

    def prepare(self, *_: object) -> None: ...

    def ship(self, chunk: ShipChunk) -> None:
        self.chunks.append(chunk)


@pytest.mark.parametrize("digests", [None, [11, 12, 13, 14]])
@pytest.mark.parametrize(("is_open", "sizes"), [(True, [3, 1]), (False, [1])])
def test_chunks_are_as_large_as_the_way_to_the_owner_asks(
    is_open: bool, sizes: list[int], digests: list[int] | None
) -> None:
    """A page is as large as data may be; three of them are as much as a write may be."""
    memory, shipper, replies = PageMemory(20, None), Shipper(), list[FillReply]()
    pages = memory.allocate(4)
    jobs = ReadyPrompts(pages)
    parts: Any = jobs, shipper
    filler = Filler(
        1,
        5,
        MAX_DATA_CHUNK_BYTES,
        memory,
        *parts,
        replies.append,
        time.monotonic,
        lanes=FillerLanes(shares=True, memory_type="VRAM"),
        max_chunk_bytes=3 * MAX_DATA_CHUNK_BYTES,
    )
    handle = fill_handle(LEASE, page_size=1, filler_epoch=5, lease_s=600.0)
    handle = replace(handle, shared=TARGET)
    filler.on_start(FillStart(stream=1, handle=handle))
    job = jobs.jobs[LEASE]
    job.digests = digests
    for job.num_computed in (2, 4):
        filler.on_progress(job)
    assert not shipper.chunks
    assert not replies

    filler.on_opened(PeerOpened((handle.owner_id, handle.owner_epoch), is_open))
    assert [len(chunk.local_pages) for chunk in shipper.chunks] == sizes
    assert [chunk.index for chunk in shipper.chunks] == list(range(len(sizes)))
    assert {chunk.target for chunk in shipper.chunks} == {TARGET if is_open else None}
    ends = [0, *(chunk.end_token for chunk in shipper.chunks)]
    for begin, chunk in zip(ends, shipper.chunks, strict=False):
        of_tokens = slice(begin, chunk.end_token)
        assert chunk.start_token == begin
        assert chunk.local_pages == pages[of_tokens]
        assert chunk.remote_pages == handle.pages[of_tokens]
        assert chunk.digests == (digests and digests[of_tokens])
        assert (chunk.computed_tokens is not None) == (chunk.end_token == 4)
