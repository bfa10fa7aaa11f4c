"""Copies pages between a pool on a device and a staging area, outside the steps.

Each direction has a separate stream and a buffer on the device, through which pages pass in
pieces:

    out    pool --gather--> buffer --copy--> staging pages, and digests of the pool's pages
    in     staging pages --copy--> buffer --scatter--> pool, and digests of the pool's pages

Copies to and from the host run on the device's copy engines; gathering and scattering take a small
share of the device's bandwidth. If staging pages are memory of the device, pages are gathered into
them and scattered from them, without the buffer.

Pages go out after the step that computed them is committed, when the device has finished with them.
They may also go out while that step is under way: a third stream then waits for the step's mark.
Copies of incoming pages wait on the device for a mark, which the engine thread took after the last
use of the destination (a wipe, or poison). The engine's own stream never waits: a page counts as
present once the host has seen the event after its copy.

On a CPU, for tests, the same calls do everything at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from weft.contract.errors import ConfigError
from weft.engine.base.device_copies import DeviceCopies, Mark, on_stream
from weft.engine.transfer.device_pages import DevicePages, Pages
from weft.engine.transfer.staging import StagingArea
from weft.engine.transfer.staging_memory import StagingMemory
from weft.pages.marks import WorkMark
from weft.pages.transfer.digest import digest_pages

MAX_PIECE_BYTES = 32 << 20
"""Largest device buffer of one direction, bytes."""


class Lanes:
    """Streams and buffers of both directions, allocated before the pool takes all other memory."""

    def __init__(self, device: torch.device, page_bytes: int) -> None:
        piece_pages = max(1, MAX_PIECE_BYTES // page_bytes)
        self.out = _Lane(device, piece_pages, page_bytes)
        self.early = _Lane(device, 1, page_bytes)
        """Copies pages that a step under way computes. Other copies must not wait for that step."""
        self.into = _Lane(device, piece_pages, page_bytes)


class DeviceMove:
    """Copies enqueued on a device: the events after the copies and after the digests, and the host
    memory that will hold the digests.
    """

    def __init__(
        self,
        copied: torch.cuda.Event | None,
        event: torch.cuda.Event | None,
        digests: torch.Tensor,
        staged: Sequence[int],
    ) -> None:
        self._copied = copied
        self._event = event
        self._digests = digests
        self._staged = staged

    def is_done(self) -> bool:
        """Whether the copies have ended. Raises the error that made them fail."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def digests(self) -> list[int]:
        """Digests of the pages as they are in the pool, once done; 0 each if not requested."""
        found: list[int] = self._digests.numpy()[list(self._staged)].view(np.uint64).tolist()
        return found

    def digest_s(self) -> float:
        """Seconds that the device took for the digests, once done."""
        if self._copied is None or self._event is None:
            return 0.0
        took_ms: float = self._copied.elapsed_time(self._event)
        return took_ms / 1e3


class PageMover:
    """Copies between pool and staging area. Thread-safe. Every call may take some tens of
    microseconds.

    Args:
        pool: `[num_pages, ...]`, contiguous, or its pages.
        mark: Marks the engine's work so far; None: that of the pool's device.

    Raises:
        ConfigError: In a trial, bytes or digests differed from those that the host computed.
    """

    def __init__(
        self,
        pool: Pages,
        area: StagingArea,
        memory: StagingMemory,
        lanes: Lanes,
        mark: Callable[[], WorkMark] | None = None,
    ) -> None:
        self._pages = DevicePages.of(pool)
        self._mark = partial(Mark, pool.device) if mark is None else mark
        self._memory = memory
        self._staged = memory.tensor
        self._is_direct = memory.is_of_device
        self._lanes = lanes
        is_cuda = pool.device.type == "cuda"
        self._digests = torch.zeros(len(area.pages), dtype=torch.int64, pin_memory=is_cuda)
        """Digest of the content of each staging page, written by the move that uses the page."""
        self._try(area)

    def mark(self) -> WorkMark:
        """A mark after the work that the engine has enqueued so far. The engine thread calls it."""
        return self._mark()

    @property
    def is_direct(self) -> bool:
        """Whether the staging pages are memory of the pool's GPU. `move_out` then takes a mark."""
        return self._is_direct and self._pages.is_whole and self._pages.device.type == "cuda"

    def move_out(
        self,
        pages: Sequence[int],
        staged: Sequence[int],
        *,
        with_digests: bool,
        after: WorkMark | None = None,
    ) -> DeviceMove:
        """Starts copying pages of the pool to staging pages, and computing digests if wanted. The
        pages are published, or written by work before the mark.
        """
        lanes = self._lanes
        with (lanes.out if after is None else lanes.early).begin(after) as lane:
            numbers = lane.send(pages)
            if self._is_direct:
                for at, page, count in _runs(staged, 0, len(staged)):
                    gathered = self._staged[page : page + count]
                    self._pages.gather(numbers[at : at + count], gathered)
            else:
                self._copy_out(lane, numbers, staged)
            return self._finish(lane, numbers, staged, with_digests)

    def move_in(
        self,
        staged: Sequence[int],
        pages: Sequence[int],
        after: WorkMark | None,
        *,
        with_digests: bool,
    ) -> DeviceMove:
        """Starts copying staging pages to pages of the pool after a mark, and computing digests of
        the pool's pages.
        """
        with self._lanes.into.begin(after) as lane:
            numbers = lane.send(pages)
            if self._is_direct:
                for at, page, count in _runs(staged, 0, len(staged)):
                    arrived = self._staged[page : page + count]
                    self._pages.scatter(arrived, numbers[at : at + count])
            else:
                self._copy_in(lane, numbers, staged)
            return self._finish(lane, numbers, staged, with_digests)

    def close(self) -> None:
        """Waits for the copies under way and releases the staging area. The caller must start no
        more copies.
        """
        for lane in (self._lanes.out, self._lanes.early, self._lanes.into):
            lane.wait()
        self._memory.close()

    def _copy_out(self, lane: _Lane, numbers: torch.Tensor, staged: Sequence[int]) -> None:
        for begin, end in lane.pieces(len(staged)):
            self._pages.gather(numbers[begin:end], lane.buffer)
            for at, page, count in _runs(staged, begin, end):
                piece = lane.buffer[at - begin : at - begin + count]
                self._staged[page : page + count].copy_(piece, non_blocking=True)

    def _copy_in(self, lane: _Lane, numbers: torch.Tensor, staged: Sequence[int]) -> None:
        for begin, end in lane.pieces(len(staged)):
            for at, page, count in _runs(staged, begin, end):
                piece = lane.buffer[at - begin : at - begin + count]
                piece.copy_(self._staged[page : page + count], non_blocking=True)
            self._pages.scatter(lane.buffer, numbers[begin:end])

    def _finish(
        self, lane: _Lane, numbers: torch.Tensor, staged: Sequence[int], with_digests: bool
    ) -> DeviceMove:
        copied = lane.event()
        if with_digests:
            digests = self._pages.digests(numbers)
            for at, page, count in _runs(staged, 0, len(staged)):
                self._digests[page : page + count].copy_(
                    digests[at : at + count], non_blocking=True
                )
        else:
            self._digests[list(staged)] = 0
        return DeviceMove(copied, lane.event(), self._digests, staged)

    def _try(self, area: StagingArea) -> None:
        """Sends random bytes into the null page and back, and compares bytes and digests."""
        first, last = 0, len(area.pages) - 1
        sent = np.random.default_rng().integers(0, 256, area.pages.shape[1], dtype=np.uint8)
        area.pages[first] = sent
        into = self.move_in([first], [0], self.mark(), with_digests=True)
        into.wait()
        out = self.move_out([0], [last], with_digests=True)
        out.wait()
        came = np.stack([area.pages[first], area.pages[last]])
        digests = digest_pages(came, [0, 1]).tolist()
        if [*into.digests(), *out.digests()] != digests or (came != sent).any():
            raise ConfigError(
                f"pages do not come back from {self._pages.device} as they went there: they cannot "
                "be shipped",
                param="device",
            )
        area.pages[first] = area.pages[last] = np.zeros_like(sent)
        self.move_in([first], [0], self.mark(), with_digests=False).wait()


class _Lane:
    def __init__(self, device: torch.device, piece_pages: int, page_bytes: int) -> None:
        self._piece_pages = piece_pages
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # Higher priority than steps: the copies are short, and a peer or a request waits.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        with on_stream(self._stream):
            self.buffer = torch.empty((piece_pages, page_bytes), dtype=torch.uint8, device=device)
            self._copies = DeviceCopies(device)

    @contextmanager
    def begin(self, after: WorkMark | None) -> Iterator[_Lane]:
        """Context in which enqueued work follows the mark and earlier work of the lane."""
        with self._lock, on_stream(self._stream):
            if after is not None:
                after.hold(self._stream)
            yield self

    def send(self, pages: Sequence[int]) -> torch.Tensor:
        (numbers,) = self._copies.send([np.array(pages, np.int64)])
        return numbers

    def pieces(self, count: int) -> Iterator[tuple[int, int]]:
        """Splits `count` pages into parts that fit the buffer, in order."""
        for begin in range(0, count, self._piece_pages):
            yield begin, min(count, begin + self._piece_pages)

    def event(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        # A blocking event lets a waiting thread sleep.
        event = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=True, blocking=True
        )
        event.record(self._stream)
        return event

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _runs(pages: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (index, page, count) for neighbouring pages of `pages[begin:end]`: one copy each."""
    at = begin
    while at < end:
        count = 1
        while at + count < end and pages[at + count] == pages[at] + count:
            count += 1
        yield at, pages[at], count
        at += count
