"""A thread that moves bytes for one purpose, in order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

logger = logging.getLogger(__name__)


class Move(Protocol):
    """One job: run in the thread, ended on the owner's."""

    def run(self) -> None:
        """Moves bytes."""
        ...

    def end(self) -> None:
        """Takes note, whatever became of `run`."""
        ...


class Mover:
    """Runs moves one after the other.

    Args:
        name: Of the thread.
        wake: Called after a move was run (any thread).
    """

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: SimpleQueue[Move | None] = SimpleQueue()
        self._done: deque[Move] = deque()
        self._is_closing = False
        self.num_open = 0
        """Moves that were given and have not been ended."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def give(self, move: Move) -> None:
        """Queues a move."""
        self.num_open += 1
        self._jobs.put(move)

    def take(self) -> bool:
        """Ends moves that were run; whether there were any."""
        has_any = bool(self._done)
        while self._done:
            move = self._done.popleft()
            self.num_open -= 1
            move.end()
        return has_any

    def close(self) -> None:
        """Ends the thread after the move that it is at."""
        self._is_closing = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (move := self._jobs.get()) is not None and not self._is_closing:
            try:
                move.run()
            except Exception:
                logger.exception("a page was not moved")
            self._done.append(move)
            self._wake()
