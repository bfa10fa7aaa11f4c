"""Ranks on several hosts: frames of rank 0 over TCP to the first rank of each host.

frame      count of numbers, then the numbers, int64 each; of rank 0
ended      frames that the rank has done, int64; of the others
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np
from weft.contract.arrays import Int32Array, Int64Array
from weft.contract.errors import RanksLost
from weft.engine.parallel.host_sockets import end_when_lost, receive_exactly
from weft.engine.parallel.shared import SharedGroup

_COUNT = struct.Struct("<q")
_MOST_NUMBERS = 1 << 27
"""Of a frame."""
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class HostGroup:
    """The view that the first rank of a host has of the group, as
    `weft.engine.parallel.shared.SharedGroup` is that of ranks of one host. One thread uses it; any
    thread may call `stop`.

    Args:
        ends: Connections to the other hosts by their first ranks, of rank 0; to rank 0, of the
            others.
        limit_s: Longest wait for another rank in a step.
    """

    def __init__(self, ends: Mapping[int, socket.socket], limit_s: float) -> None:
        self._ends = ends
        self.local: SharedGroup | None = None
        """The ranks of this host, which get all frames from this one; None: there is one."""
        self._num_ended = dict.fromkeys(ends, 0)
        self.num_frames = 0
        """Frames that this rank has posted or taken."""
        self._num_done = 0
        self._has_done = threading.Condition()
        self.why: Callable[[], str] = lambda: "the group was stopped"
        """Returns the reason why the group has ended, for error messages."""
        self.has_ended = False
        """Whether this process has ended the group."""
        self.limit_s = limit_s
        self.limit(limit_s)

    def limit(self, seconds: float) -> None:
        self.limit_s = seconds
        if self.local is not None:
            self.local.limit(seconds)
        for end in self._ends.values():
            end_when_lost(end, seconds)

    @property
    def is_stopped(self) -> bool:
        return self.has_ended or (self.local is not None and self.local.is_stopped)

    @property
    def reason(self) -> str:
        if not self.has_ended and self.local is not None and self.local.is_stopped:
            return self.local.reason  # A GPU of this host has waited for too long.
        return self.why()

    def post(self, parts: Sequence[Int64Array | Int32Array]) -> None:
        """Sends a frame, the concatenation of its parts, to all other ranks. Raises RanksLost."""
        frame = np.concatenate(parts, dtype=np.int64)
        sent = _COUNT.pack(len(frame)) + frame.tobytes()
        self.num_frames += 1
        if self.local is not None:
            self.local.post([frame])
        for rank, end in self._ends.items():
            self._check()
            try:
                end.settimeout(self.limit_s)
                end.sendall(sent)
            except OSError as error:
                self._lose(rank, f"step {self.num_frames}", error)

    def take(self, *, spins: bool = False) -> Int64Array:
        """The next frame of rank 0. Waits for it without a limit. Raises RanksLost if the host of
        rank 0 is gone.
        """
        (end,) = self._ends.values()
        head = bytearray(_COUNT.size)
        try:
            end.settimeout(None)
            receive_exactly(end, memoryview(head))
            end.settimeout(self.limit_s)
            (count,) = _COUNT.unpack(head)
            if not 0 <= count <= _MOST_NUMBERS:
                raise ConnectionError(f"no frame has {count} numbers")
            body = bytearray(8 * count)
            receive_exactly(end, memoryview(body))
        except OSError as error:
            self._lose(0, "a step", error)
        self.num_frames += 1
        frame = np.frombuffer(body, np.int64)
        if self.local is not None:
            self.local.post([frame])
        return frame

    def end(self) -> None:
        """Announces that this host has done all frames that it has taken, once its other ranks
        have. Raises RanksLost.
        """
        if self.local is not None:
            self.local.await_ended()
        with self._has_done:
            self._num_done = self.num_frames
            self._has_done.notify_all()
        (end,) = self._ends.values()
        try:
            end.sendall(_COUNT.pack(self.num_frames))
        except OSError as error:
            self._lose(0, "a step", error)

    def await_done(self, num_frames: int) -> None:
        """Waits in another thread until this host has done so many frames. Raises RanksLost if the
        group ends, or they are not done in time.
        """
        with self._has_done:
            is_done = self._has_done.wait_for(
                lambda: self.is_stopped or self._num_done >= num_frames, self.limit_s
            )
        self._check()
        if not is_done:
            raise RanksLost(f"step {num_frames} has not ended within {self.limit_s:g} s")

    def await_ended(self) -> None:
        """Waits until all other ranks have done all frames. Raises RanksLost if a rank is gone, or
        has not done them in time.
        """
        self.await_ended_by(self.num_frames)

    def await_ended_by(self, num_frames: int) -> None:
        """Waits until all other ranks have done so many frames. Raises as `await_ended` does."""
        deadline, head = time.monotonic() + self.limit_s, bytearray(_COUNT.size)
        for rank, end in self._ends.items():
            while self._num_ended[rank] < num_frames:
                self._check()
                try:
                    end.settimeout(max(1e-3, deadline - time.monotonic()))
                    receive_exactly(end, memoryview(head))
                except OSError as error:
                    self._lose(rank, f"the end of step {num_frames}", error)
                (self._num_ended[rank],) = _COUNT.unpack(head)
        if self.local is not None:
            self.local.await_ended_by(range(1, self.local.size), num_frames)

    def stop(self) -> None:
        """Ends the group: from now on every wait of every rank fails. Any thread may call this."""
        self.has_ended = True
        with self._has_done:
            self._has_done.notify_all()
        if self.local is not None:
            self.local.stop()
        for end in self._ends.values():
            with contextlib.suppress(OSError):
                socket.socket.shutdown(end, socket.SHUT_RDWR)

    def lose(self, why: str, wake: Callable[[], None]) -> None:
        """Ends the group for this reason and calls `wake`, unless it has ended."""
        if not self.has_ended:
            self._end(why)
            wake()

    def fail(self, why: str) -> NoReturn:
        """Ends the group for this reason. Raises RanksLost."""
        if not self.has_ended:
            self._end(why)
        raise RanksLost(why)

    def _end(self, why: str) -> None:
        if self.local is not None and self.local.is_stopped:
            why = self.local.reason
        self.why = lambda: why
        self.stop()

    def await_loss(self, limit_s: float) -> Sequence[int]:
        """Waits in another thread until the connection of some rank is lost, and returns these
        ranks; empty after `limit_s`.
        """
        poll, ranks = select.poll(), {}
        for rank, end in self._ends.items():
            poll.register(end.fileno(), _GONE)
            ranks[end.fileno()] = rank
        return [ranks[number] for number, _ in poll.poll(limit_s * 1000)]

    def close(self) -> None:
        self.stop()
        for end in self._ends.values():
            end.close()

    def _check(self) -> None:
        if self.is_stopped:
            raise RanksLost(self.reason)

    def _lose(self, rank: int, what: str, error: OSError) -> NoReturn:
        self._check()
        if isinstance(error, TimeoutError) and error.errno is None:
            self.fail(f"rank {rank} has not come to {what} within {self.limit_s:g} s")
        self.fail(f"the host of rank {rank} is gone before {what}: {error}")
