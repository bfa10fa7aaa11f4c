"""Pages that are read behind a step which is still under way, and shipped once it is committed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from weft.contract.fills import FillStart
from weft.contract.handle import FillEvent
from weft.engine.transfer.staged import StagedSource
from weft.engine.transfer.staging import StagingArea
from weft.pages.fills.filler import Filler
from weft.pages.memory.page_memory import PageMemory
from weft.pages.transfer.chunks import LeaseTerm, ShipChunk, ShipResult
from weft.pages.transfer.lanes import FillerLanes
from weft.pages.transfer.ship import MAX_EARLY, ShipThread
from weft.testing.services.fill_commands import fill_handle, nixl_target
from weft.testing.services.ready_prompts import ReadyPrompts

PAGE_BYTES = 8
NUM_LANDING, NUM_SENDING = 1, 8
LEASE, OTHER = bytes(16), bytes([1] * 16)
MARK: Any = object()


@dataclass
class Move:
    """A copy that ends when the test says so."""

    staged: Sequence[int]
    after: Any
    copy: Callable[[], None]
    ended: bool = False

    def end(self) -> None:
        self.copy()
        self.ended = True

    def is_done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        raise AssertionError("shipping polls")

    def digests(self) -> list[int]:
        return [0] * len(self.staged)

    def digest_s(self) -> float:
        return 0.0


@dataclass
class Mover:
    """Copies of a pool; those behind no mark end at once."""

    pool: np.ndarray
    area: StagingArea
    moves: list[Move] = field(default_factory=list)
    is_direct = True

    def move_out(
        self, pages: Sequence[int], staged: Sequence[int], *, with_digests: bool, after: Any = None
    ) -> Move:
        def copy() -> None:
            self.area.pages[list(staged)] = self.pool[list(pages)]

        self.moves.append(move := Move(staged, after, copy))
        if after is None:
            move.end()
        return move


class Shipping:
    """A shipping thread over a staging area, which sends bytes as events."""

    def __init__(self, num_sending: int = NUM_SENDING) -> None:
        self.pool = np.random.default_rng().integers(0, 256, (20, PAGE_BYTES), np.uint8)
        total = NUM_LANDING + num_sending
        self.area = StagingArea(np.zeros((total, PAGE_BYTES), np.uint8), NUM_LANDING)
        self.mover = Mover(self.pool, self.area)
        mover: Any = self.mover
        self.thread = ShipThread(
            StagedSource(self.area, mover, has_digests=True), None, lambda: None
        )
        self.taken: list[Any] = []

    def chunk(self, index: int, pages: list[int], lease_id: bytes = LEASE) -> ShipChunk:
        return ShipChunk(
            lease_id=lease_id,
            index=index,
            start_token=0,
            end_token=len(pages),
            local_pages=pages,
            remote_pages=pages,
            digests=None,
            target=None,
            owner_id="d",
            owner_epoch=1,
            term=LeaseTerm(600.0, time.monotonic),
        )

    def until(self, is_so: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < deadline
            self.taken += self.thread.take()
            time.sleep(1e-3)

    def results(self) -> list[ShipResult]:
        return [item for item in self.taken if isinstance(item, ShipResult)]

    def sent(self, lease_id: bytes) -> bytes:
        events = [item for item in self.taken if isinstance(item, tuple) and item[0] == lease_id]
        return b"".join(event.data for _, event in events)


@pytest.fixture
def shipping() -> Iterator[Shipping]:
    made = Shipping()
    yield made
    made.thread.close()


def test_a_chunk_read_early_is_shipped_from_that_copy(shipping: Shipping) -> None:
    pages = random.sample(range(20), 3)
    chunk = shipping.chunk(0, pages)
    shipping.thread.read_early(chunk, MARK)
    shipping.until(lambda: shipping.mover.moves)
    (move,) = shipping.mover.moves
    assert move.after is MARK
    shipping.pool[pages] ^= 255  # The step that the mark is behind.
    move.end()
    assert not shipping.taken, "nothing leaves before its step is committed"
    expected = shipping.pool[pages].tobytes()
    shipping.thread.ship(chunk)
    shipping.until(shipping.results)
    assert [result.error for result in shipping.results()] == [""]
    assert shipping.sent(LEASE) == expected
    assert shipping.mover.moves == [move], "it was read once"
    assert shipping.area.counts().used == 0
    assert not any(shipping.thread.sizes().values())


def test_pages_of_a_stopped_lease_are_taken_until_the_copy_ends(shipping: Shipping) -> None:
    shipping.thread.read_early(shipping.chunk(0, [4, 5]), MARK)
    shipping.thread.read_early(shipping.chunk(0, [6], OTHER), MARK)
    shipping.thread.stop(LEASE)
    shipping.thread.forget(LEASE)
    shipping.until(lambda: len(shipping.mover.moves) == 2)
    # Another chunk passes meanwhile, whatever waits for the device.
    shipping.thread.ship(shipping.chunk(1, [7], OTHER))
    shipping.until(shipping.results)
    assert shipping.sent(OTHER) == shipping.pool[7].tobytes()
    assert shipping.area.counts().used == 3
    shipping.mover.moves[0].end()
    shipping.until(lambda: shipping.area.counts().used == 1)
    shipping.mover.moves[1].end()
    shipping.thread.ship(shipping.chunk(0, [6], OTHER))
    shipping.until(lambda: len(shipping.results()) == 2)
    assert shipping.area.counts().used == 0


def test_early_readings_leave_room_for_others(shipping: Shipping) -> None:
    """Chunks for which there is no room are read when they are shipped."""
    chunks = [shipping.chunk(index, [index, index + 1]) for index in range(3)]
    for chunk in chunks:
        shipping.thread.read_early(chunk, MARK)
    shipping.until(lambda: len(shipping.mover.moves) == 2)
    assert shipping.area.counts().used == NUM_SENDING // 2
    for move in shipping.mover.moves:
        move.end()
    for chunk in chunks:
        shipping.thread.ship(chunk)
    shipping.until(lambda: len(shipping.results()) == 3)
    assert [move.after for move in shipping.mover.moves] == [MARK, MARK, None]
    expected = b"".join(shipping.pool[chunk.local_pages].tobytes() for chunk in chunks)
    assert shipping.sent(LEASE) == expected


class Shipper:
    """Notes what a filler asks of it."""

    holds_data = False

    def __init__(self) -> None:
        self.early: list[tuple[ShipChunk, Any]] = []
        self.shipped: list[ShipChunk] = []
        self.stopped: list[bytes] = []

    def prepare(self, *_: object) -> None:
        pass

    forget = prepare

    def read_early(self, chunk: ShipChunk, after: Any) -> None:
        self.early.append((chunk, after))

    def ship(self, chunk: ShipChunk) -> None:
        self.shipped.append(chunk)

    def stop(self, lease_id: bytes) -> None:
        self.stopped.append(lease_id)


class Filling:
    """A filler of four one-token pages, and some behind them, which ships two pages at a time."""

    def __init__(self, *, reads_early: bool, num_more: int = 0) -> None:
        self.memory, self.shipper = PageMemory(20, None), Shipper()
        self.pages = self.memory.allocate(4)
        self.events: list[FillEvent] = []
        self.jobs = ReadyPrompts(self.pages)
        jobs: Any = self.jobs
        more: Any = SimpleNamespace(
            num_pages_of=lambda handle: num_more,
            pack=lambda job, end_token: self.memory.allocate(num_more),
        )
        self.filler = Filler(
            1,
            5,
            PAGE_BYTES,
            self.memory,
            jobs,
            self.shipper,
            lambda reply: self.events.append(reply.event),
            time.monotonic,
            lanes=FillerLanes(nixl_version="1"),
            max_chunk_pages=2,
            pieces=more if num_more else None,
            early=self.shipper if reads_early else None,
        )
        handle = fill_handle(
            LEASE, page_size=1, filler_epoch=5, lease_s=600.0, nixl=nixl_target(PAGE_BYTES, 9)
        )
        handle.pages.extend(range(5, 5 + num_more))
        self.filler.on_start(FillStart(stream=1, request_id="r", traceparent="", handle=handle))

    def step(self, end: int) -> None:
        """A step that computes the pages before `end` is begun and committed."""
        job = self.jobs.jobs[LEASE]
        if self.filler.reads_early:
            self.filler.on_launched(job, end, MARK)
        job.num_computed = end
        self.filler.on_progress(job)


def test_early_reading_changes_no_chunk() -> None:
    ends = sorted(random.sample(range(1, 4), random.randint(0, 2)))
    plain, early = (Filling(reads_early=reads_early) for reads_early in (False, True))
    for end in [*ends, 4]:
        plain.step(end)
        early.step(end)
    assert [chunk for chunk, _ in early.shipper.early] == early.shipper.shipped
    assert {after for _, after in early.shipper.early} == {MARK}

    def told(filling: Filling) -> list[object]:
        return [
            (chunk.index, chunk.end_token, chunk.local_pages, chunk.remote_pages)
            for chunk in filling.shipper.shipped
        ]

    assert told(early) == told(plain)
    assert early.shipper.shipped[-1].computed_tokens == 4
    for chunk in early.shipper.shipped:
        early.filler.on_shipped(ShipResult(LEASE, chunk.index, [0] * len(chunk.local_pages)))
    assert early.events[-1].kind == "done"
    early.memory.release(early.pages)
    assert early.memory.counts().used == 0


def test_what_lies_behind_pages_read_early_follows_them() -> None:
    filling = Filling(reads_early=True, num_more=3)
    ends = sorted(random.sample(range(1, 4), random.randint(0, 2)))
    for end in [*ends, 4]:
        filling.step(end)
    early, shipped = filling.shipper.early, filling.shipper.shipped
    assert [chunk for chunk, _ in early] == shipped[: len(early)]
    assert [chunk.index for chunk in shipped] == list(range(len(shipped)))
    pages = [page for chunk in shipped for page in chunk.local_pages]
    assert pages[:4] == filling.pages
    assert len(set(pages)) == 7
    assert [page for chunk in shipped for page in chunk.remote_pages] == list(range(1, 8))
    for chunk in shipped:
        filling.filler.on_shipped(ShipResult(LEASE, chunk.index, [0] * len(chunk.local_pages)))
    assert filling.events[-1].kind == "done"
    filling.memory.release(filling.pages)
    assert filling.memory.counts().used == 0


def test_a_job_that_begins_again_waits_for_the_chunks_read_early() -> None:
    """After a preemption steps are cut in other places."""
    filling = Filling(reads_early=True)
    job = filling.jobs.jobs[LEASE]
    filling.filler.on_launched(job, 2, MARK)
    job.num_computed = 1
    filling.filler.on_progress(job)
    assert not filling.shipper.shipped
    filling.step(3)
    ends = [(chunk.start_token, chunk.end_token) for chunk in filling.shipper.shipped]
    assert ends == [(0, 2), (2, 3)]


def test_a_stopped_lease_gives_up_what_was_read_early() -> None:
    filling = Filling(reads_early=True)
    filling.filler.on_launched(filling.jobs.jobs[LEASE], 4, MARK)
    filling.filler.on_stop(LEASE)
    assert filling.shipper.stopped == [LEASE]
    assert not filling.shipper.shipped
    assert filling.events[-1].kind == "stopped"
    filling.memory.release(filling.pages)
    assert filling.memory.counts().used == 0


def test_few_chunks_are_read_early_at_once() -> None:
    """Each takes a pinned buffer until its step has ended."""
    shipping = Shipping(num_sending=4 * MAX_EARLY)
    for index in range(MAX_EARLY + 3):
        shipping.thread.read_early(shipping.chunk(index, [index]), MARK)
    shipping.thread.ship(shipping.chunk(0, [9], OTHER))
    shipping.until(shipping.results)
    assert sum(move.after is MARK for move in shipping.mover.moves) == MAX_EARLY
    shipping.thread.close()
