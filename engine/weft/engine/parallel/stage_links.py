"""How stages on CPUs hand over the residual stream, within a host and between hosts."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from weft.contract.errors import RanksLost

_T = TypeVar("_T")
_HEADER = struct.Struct("<qqq")
"""Header: number of the step's stream, rows, columns. Before the rows follow the nanoseconds for
which each stage up to the sender has computed, int64.
"""
_THREAD_BYTES = 1 << 16
"""Rows of this size or more are sent by a thread, and the next ones read by one, so that the link
works while the stages compute. Fewer rows fit into the buffers of a connection.
"""
_SEEN_S = 2.0
"""A stage whose neighbour closed the connection waits so long for the reason before it fails."""


class StageGroup(Protocol):
    """The ranks as a stage sees them (`weft.engine.parallel.shared.SharedGroup`)."""

    limit_s: float
    num_frames: int

    @property
    def is_stopped(self) -> bool: ...

    @property
    def reason(self) -> str: ...

    def fail(self, why: str) -> NoReturn:
        """Ends the group. Raises RanksLost."""


class StageEnds(NamedTuple):
    """Connected stream sockets to the stages before and after one stage; None: there is none."""

    before: socket.socket | None
    after: socket.socket | None

    def close(self) -> None:
        for end in self:
            if end is not None:
                end.close()


class _Received(NamedTuple):
    head: bytes
    """The header and the nanoseconds after it, as they came."""
    stream: torch.Tensor


class SocketStages:
    """Implements `weft.engine.model.stage.Neighbours` on a CPU, over stream sockets.

    Args:
        stage: Number of this stage.
        names: Names of the stages before and after, for messages.
        most_rows: Most rows that come or go in a step.
        copies: Connections to the other ranks of this stage, which get the rows from this one,
            since the stage before is on another host.
    """

    def __init__(
        self,
        ends: StageEnds,
        group: StageGroup,
        stage: int,
        names: tuple[str, str],
        most_rows: int,
        copies: Sequence[socket.socket] = (),
    ) -> None:
        self.ends, self._group, self._copies = ends, group, copies
        self._most_rows = most_rows
        self._busy = np.zeros(stage + 1, np.int64)
        self._blocked_ns = 0
        self._before, self._after = names
        self._num_received = self._num_sent = 0
        self._sending: Future[None] | None = None
        self._coming: Future[_Received] | None = None

    @property
    def busy_ns(self) -> NDArray[np.int64]:
        """Nanoseconds for which each stage up to this one has computed, as far as is known here."""
        return self._busy

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A block in which this stage computes a step; waits for neighbours do not count."""
        began, blocked = time.perf_counter_ns(), self._blocked_ns
        yield
        self._busy[-1] += time.perf_counter_ns() - began - (self._blocked_ns - blocked)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        began = time.perf_counter_ns()
        stream = self._receive(shape, dtype)
        self._blocked_ns += time.perf_counter_ns() - began
        return stream

    def send(self, stream: torch.Tensor) -> None:
        began = time.perf_counter_ns()
        self._send(stream)
        self._blocked_ns += time.perf_counter_ns() - began

    def _receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if self._coming is None:
            deadline = time.monotonic() + self._group.limit_s
            received = self._read_rows(shape, dtype, deadline)
        else:
            received = self._await(self._coming)
            self._coming = None
        self._num_received += 1
        told = _HEADER.unpack_from(received.head)
        if told != (self._num_received, *shape):
            self._refuse(told, shape)
        self._busy[:-1] = np.frombuffer(received.head, np.int64, offset=_HEADER.size)
        for copy in self._copies:
            self._write(copy, received.head, received.stream, "another rank of this stage")
        if received.stream.nbytes >= _THREAD_BYTES:
            most = (self._most_rows, *shape[1:])
            self._coming = _in_thread(partial(self._read_rows, most, dtype))
        return received.stream

    def _await(self, coming: Future[_Received]) -> _Received:
        try:
            return coming.result(self._group.limit_s)
        except TimeoutError:
            self._group.fail(self._late())

    def _read_rows(
        self, most: Sequence[int], dtype: torch.dtype, deadline: float | None = None
    ) -> _Received:
        """The next rows, at most so many and of that width; `deadline` None: whenever they come."""
        assert self.ends.before is not None
        head = bytearray(_HEADER.size + self._busy[:-1].nbytes)
        self._read(self.ends.before, memoryview(head), deadline)
        told = _HEADER.unpack_from(head)
        _, *rows = told
        if not 0 <= rows[0] <= most[0] or rows[1:] != list(most[1:]):
            self._refuse(told, most)
        stream = torch.empty(rows, dtype=dtype)
        if stream.numel():
            self._read(self.ends.before, _bytes_of(stream), deadline)
        return _Received(bytes(head), stream)

    def _refuse(self, told: Sequence[int], shape: Sequence[int]) -> NoReturn:
        """Raises RanksLost."""
        number, *rows = told
        self._group.fail(
            f"{self._before} has sent rows {tuple(rows)} of its step {number}, where "
            f"{tuple(shape)} are due"
        )

    def _send(self, stream: torch.Tensor) -> None:
        if self.ends.after is None:
            return  # The first rank of a host sends for the others.
        self._num_sent += 1
        header = _HEADER.pack(self._num_sent, *stream.shape) + self._busy.tobytes()
        if self._sending is not None:
            self._sending.result()
            self._sending = None
        rows = (self.ends.after, header, stream.contiguous(), self._after)
        if stream.nbytes < _THREAD_BYTES:
            self._write(*rows)
        else:
            self._sending = _in_thread(partial(self._write, *rows))

    def _write(self, end: socket.socket, header: bytes, stream: torch.Tensor, name: str) -> None:
        try:
            end.settimeout(self._group.limit_s)
            end.sendall(header)
            if stream.numel():
                end.sendall(_bytes_of(stream))
        except TimeoutError:
            limit_s = self._group.limit_s
            self._group.fail(f"{name} has not taken rows within {limit_s:g} s")
        except OSError:
            self._lose(f"{name} is gone")

    def close(self) -> None:
        for end in self.ends:
            if end is not None:
                # Ends what a thread waits for, which closing alone would not.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(end, socket.SHUT_RDWR)
        jobs: list[Future[Any]] = [one for one in (self._sending, self._coming) if one is not None]
        wait(jobs, 2 * _SEEN_S)
        self.ends.close()

    def _read(self, end: socket.socket, into: memoryview, deadline: float | None) -> None:
        try:
            while into:
                wait_s = None if deadline is None else max(1e-3, deadline - time.monotonic())
                end.settimeout(wait_s)
                count = end.recv_into(into)
                if not count:
                    self._lose(f"{self._before} is gone")
                into = into[count:]
        except TimeoutError:
            self._group.fail(self._late())
        except OSError:
            self._lose(f"{self._before} is gone")

    def _late(self) -> str:
        return f"the rows of {self._before} have not come within {self._group.limit_s:g} s"

    def _lose(self, why: str) -> NoReturn:
        """Raises RanksLost with what the group knows, usually more than this stage does."""
        if _comes(lambda: self._group.is_stopped, _SEEN_S):
            raise RanksLost(f"{self._group.reason}, before step {self._group.num_frames} has ended")
        self._group.fail(why)


def _in_thread(job: Callable[[], _T]) -> Future[_T]:
    """Runs a job in a thread that does not keep the process alive."""
    done = Future[_T]()

    def run() -> None:
        try:
            done.set_result(job())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="rows", daemon=True).start()
    return done


def _comes(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def _bytes_of(stream: torch.Tensor) -> memoryview:
    numbers: Any = stream.view(torch.uint8).numpy()
    return memoryview(numbers).cast("B")


def connected_ends(count: int) -> list[StageEnds]:
    """Ends of `count` stages of one host, by stage."""
    pairs = [socket.socketpair() for _ in range(count - 1)]
    befores = [None, *(after for _, after in pairs)]
    afters = [*(before for before, _ in pairs), None]
    return [StageEnds(*ends) for ends in zip(befores, afters, strict=True)]
