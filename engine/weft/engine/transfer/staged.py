"""A pool on a device, reached through a staging area."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np
from weft.contract import faults
from weft.contract.pages import StagingPages
from weft.engine.transfer.mover import DeviceMove, PageMover
from weft.engine.transfer.staging import StagingArea
from weft.pages.marks import WorkMark
from weft.pages.transfer.digester import (
    CLOSE_TIMEOUT_S,
    MAX_PUT_PAGES,
    MAX_QUEUED_PAGES,
    Digested,
    Tag,
)
from weft.pages.transfer.source import PageSource, Reading

logger = logging.getLogger(__name__)

MAX_MOVING = 8
"""Most copies that the engine thread has under way. Each takes a pinned buffer for page numbers."""


class StagedReading(Reading):
    def __init__(self, pages: Sequence[int], move: DeviceMove) -> None:
        super().__init__(pages)
        self._move = move

    def is_done(self) -> bool:
        return self._move.is_done()

    def digests(self) -> list[int]:
        return self._move.digests()

    def digest_s(self) -> float:
        return self._move.digest_s()


class StagedSource(PageSource):
    """A source of pages that are copied to a staging area."""

    def __init__(self, area: StagingArea, mover: PageMover, *, has_digests: bool) -> None:
        super().__init__(area.pages, has_digests=has_digests)
        self._area = area
        self._mover = mover
        self.reads_early = mover.is_direct

    @property
    def max_chunk_pages(self) -> int:
        return self._area.max_chunk_pages

    def begin(
        self,
        pages: Sequence[int],
        digests: Sequence[int] | None,
        after: WorkMark | None = None,
    ) -> StagedReading | None:
        keep = 0 if after is None else self._area.num_sending // 2
        staged = self._area.take_sending(len(pages), keep=keep)
        if staged is None:
            return None
        has_digests = self._has_digests
        try:
            move = self._mover.move_out(pages, staged, with_digests=has_digests, after=after)
        except BaseException:
            self._area.free_sending(staged)
            raise
        return StagedReading(staged, move)

    def end(self, reading: Reading) -> None:
        self._area.free_sending(reading.pages)


@dataclass(frozen=True, slots=True)
class _Job:
    tag: Tag
    pages: list[int]
    staged: list[int]
    after: WorkMark | None = None


class StagedPort:
    """Implements `PagePort`: moves landed pages into the pool, and pages for puts out of it.

    A thread enqueues the copies and waits for them. If a copy takes only microseconds, the engine
    thread enqueues copies into the pool itself, as long as few are under way, and looks whether
    they have ended: passing them to a thread and back would take longer.

    Args:
        wake: Called by any thread after a result was queued.
    """

    def __init__(
        self, area: StagingArea, mover: PageMover, wake: Callable[[], None], *, has_digests: bool
    ) -> None:
        self._area = area
        self._mover = mover
        self._wake = wake
        self._has_digests = has_digests
        self.before_digest: Callable[[StagingPages, Sequence[int]], None] | None = None
        """Test hook, called with the area and the landed pages before they are copied."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._out: deque[Digested] = deque()
        self._num_queued = 0
        """Jobs given to the thread whose results were not taken."""
        self._moving: deque[tuple[_Job, DeviceMove]] = deque()
        """Copies into the pool that the engine thread has enqueued, in order."""
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weft-landing", daemon=True)
        self._thread.start()

    @property
    def max_put_pages(self) -> int:
        return min(MAX_PUT_PAGES, self._area.max_chunk_pages)

    @property
    def max_queued_pages(self) -> int:
        return min(MAX_QUEUED_PAGES, 2 * self._area.num_sending)

    def mark(self) -> WorkMark:
        return self._mover.mark()

    def read(self, page: int) -> bytes:
        return bytes(self._area.pages[page])

    def write(self, page: int, offset: int, data: bytes) -> None:
        self._area.pages[page, offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def verify(
        self,
        tag: tuple[bytes, int],
        landed: Sequence[int],
        pages: Sequence[int],
        after: WorkMark | None,
    ) -> None:
        job = _Job(tag, list(pages), list(landed), after)
        if not self._moves_at_once:
            self._queue(job)
            return
        try:
            self._moving.append((job, self._begin(job)))
        except Exception as error:
            self._fail(error)

    @property
    def _moves_at_once(self) -> bool:
        """Whether the engine thread enqueues a copy itself. It must not wait for the lane, which
        the other thread may hold, or for a pinned buffer.
        """
        is_disturbed = self.before_digest is not None or faults.FILL_DIGEST.is_armed
        has_room = len(self._moving) < MAX_MOVING and not self._num_queued
        return self._mover.is_direct and has_room and not is_disturbed

    def _queue(self, job: _Job) -> None:
        self._num_queued += 1
        self._jobs.put(job)

    @property
    def is_moving(self) -> bool:
        return bool(self._moving)

    def has_moved(self) -> bool:
        if not self._moving:
            return False
        try:
            return self._moving[0][1].is_done()
        except RuntimeError:
            return True  # `take` raises it.

    def expose(self, number: int, pages: Sequence[int]) -> bool:
        staged = self._area.take_sending(len(pages), keep=self._area.num_sending // 2)
        if staged is None:
            return False
        self._queue(_Job(number, list(pages), staged))
        return True

    def conceal(self, exposed: Sequence[int]) -> None:
        self._area.free_sending(exposed)

    def take(self) -> list[Digested]:
        """Results since the last call. Raises RuntimeError if a copy failed; the content of the
        device's memory is then unknown.
        """
        taken = []
        try:
            if self._failure is not None:
                raise self._failure
            while self._moving and self._moving[0][1].is_done():
                job, move = self._moving.popleft()
                taken.append(Digested(job.tag, move.digests(), job.staged))
        except Exception as error:
            raise RuntimeError("copying pages to or from the device failed") from error
        while self._out:
            taken.append(self._out.popleft())
            self._num_queued -= 1
        return taken

    def sizes(self) -> dict[str, int]:
        """Approximate numbers of copies that were requested or not taken yet."""
        return {"digests": self._jobs.qsize() + len(self._out) + len(self._moving)}

    def close(self) -> None:
        """Stops the thread after all work, or when a copy does not end in time."""
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("copies of pages have not ended within %g s", CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            moving: deque[tuple[_Job, DeviceMove]] = deque()
            is_closing = False
            while moving or not is_closing:
                # The thread enqueues new work before it waits for the oldest copy.
                while not is_closing and (job := self._next(wait=not moving)) is not _NOTHING:
                    is_closing = job is None
                    if isinstance(job, _Job):
                        moving.append((job, self._begin(job)))
                if moving:
                    self._end(*moving.popleft())
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        logger.error("moving pages failed", exc_info=error)
        self._failure = error
        self._wake()

    def _next(self, *, wait: bool) -> _Job | object | None:
        try:
            return self._jobs.get(block=wait)
        except Empty:
            return _NOTHING

    def _begin(self, job: _Job) -> DeviceMove:
        if not isinstance(job.tag, tuple):
            return self._mover.move_out(job.pages, job.staged, with_digests=True)
        if self.before_digest is not None:
            self.before_digest(self._area.pages, job.staged)
        if faults.FILL_DIGEST.is_armed:
            faults.FILL_DIGEST.flip_bit(self._area.pages, job.staged)
        return self._mover.move_in(job.staged, job.pages, job.after, with_digests=self._has_digests)

    def _end(self, job: _Job, move: DeviceMove) -> None:
        move.wait()
        self._out.append(Digested(job.tag, move.digests(), job.staged))
        self._wake()


_NOTHING = object()
