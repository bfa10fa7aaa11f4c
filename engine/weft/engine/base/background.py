"""A thread that runs jobs of one purpose, in order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from weft.contract.errors import RanksLost
from weft.contract.give_way import HostPriority

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0


class BackgroundJob(Protocol):
    """A job that runs in the background thread and ends on the owner's thread."""

    def run(self) -> None:
        """Does the work, such as copying bytes."""
        ...

    def end(self) -> None:
        """Completes the job, whether `run` succeeded, failed or was never called."""
        ...


class BackgroundThread:
    """Runs jobs one after the other in a thread.

    Args:
        wake: Called by any thread after a job has run.
        host: Priority of the engine thread, to which jobs that call `give_way` yield; None: jobs do
            not yield.
    """

    def __init__(
        self, name: str, wake: Callable[[], None], host: HostPriority | None = None
    ) -> None:
        self.name = name
        self._host = host
        self._wake = wake
        self._jobs: SimpleQueue[BackgroundJob | None] = SimpleQueue()
        self._done: deque[BackgroundJob] = deque()
        self._is_closing = False
        self.num_open = 0
        """Number of jobs that were queued and have not ended."""
        self._num_begun = self._num_run = 0
        self.current: BackgroundJob | None = None
        """The job being run; None: the thread is idle."""
        self._seen, self._seen_at = 0, 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def give(self, move: BackgroundJob) -> None:
        self.num_open += 1
        self._jobs.put(move)

    def take(self) -> bool:
        """Ends the jobs that have run. Returns whether there were any."""
        has_any = bool(self._done)
        while self._done:
            move = self._done.popleft()
            self.num_open -= 1
            move.end()
        return has_any

    def stuck_s(self, now: float) -> float:
        """Seconds that the current job has been running, as observed by calls of this method.

        Args:
            now: Monotonic seconds, always of the same clock.
        """
        begun = self._num_begun
        if begun == self._num_run or begun != self._seen:
            self._seen, self._seen_at = begun, now
            return 0.0
        return now - self._seen_at

    def take_back(self) -> list[BackgroundJob]:
        """Takes back the jobs that have not begun; the caller must end them. The thread stops after
        its current job.
        """
        self._is_closing = True
        moves: list[BackgroundJob] = []
        while True:
            try:
                move = self._jobs.get_nowait()
            except Empty:
                break
            if move is not None:
                moves.append(move)
        self._jobs.put(None)
        self.num_open -= len(moves)
        return moves

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Stops the thread after its current job, for which it waits a limited time. Returns
        whether the thread has ended.
        """
        self._is_closing = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "%s: a job has not ended within %g s and is abandoned", self.name, timeout_s
            )
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._host is not None:
            self._host.enter_thread()
        while (move := self._jobs.get()) is not None:
            if self._is_closing:
                # The thread took this job before `take_back` could: the job ends without a run.
                self._done.append(move)
                self._wake()
                return
            self.current = move
            self._num_begun += 1
            try:
                move.run()
            except RanksLost:
                return  # The engine ends, and says why.
            except Exception:
                logger.exception("a page was not moved")
            self.current = None
            self._num_run += 1
            self._done.append(move)
            self._wake()
