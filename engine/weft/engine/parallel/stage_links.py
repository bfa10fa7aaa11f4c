"""How stages of one host hand over the residual stream."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from weft.contract.errors import RanksLost

_HEADER = struct.Struct("<qqq")
"""Header: number of the step's stream, rows, columns. Before the rows follow the nanoseconds for
which each stage up to the sender has computed, int64.
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


class SocketStages:
    """Implements `weft.engine.model.stage.Neighbours` on a CPU, over stream sockets.

    Args:
        stage: Number of this stage.
        names: Names of the stages before and after, for messages.
        copies: Connections to the other ranks of this stage, which get the rows from this one,
            since the stage before is on another host.
    """

    def __init__(
        self,
        ends: StageEnds,
        group: StageGroup,
        stage: int,
        names: tuple[str, str],
        copies: Sequence[socket.socket] = (),
    ) -> None:
        self._ends, self._group, self._copies = ends, group, copies
        self._busy = np.zeros(stage + 1, np.int64)
        self._blocked_ns = 0
        self._before, self._after = names
        self._num_received = self._num_sent = 0

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
        assert self._ends.before is not None
        end, what = self._ends.before, f"the rows of {self._before}"
        stream = torch.empty(tuple(shape), dtype=dtype)
        header = bytearray(_HEADER.size)
        deadline = time.monotonic() + self._group.limit_s
        self._read(end, memoryview(header), what, deadline)
        told = _HEADER.unpack(header)
        self._num_received += 1
        if told != (self._num_received, *shape):
            number, *rows = told
            self._group.fail(
                f"{self._before} has sent rows {tuple(rows)} of its step {number}, where "
                f"{tuple(shape)} of step {self._num_received} are due"
            )
        self._read(end, _bytes_of(torch.from_numpy(self._busy[:-1])), what, deadline)
        if stream.numel():
            self._read(end, _bytes_of(stream), what, deadline)
        for copy in self._copies:
            busy = self._busy[:-1].tobytes()
            self._write(copy, bytes(header) + busy, stream, "another rank of this stage")
        return stream

    def _send(self, stream: torch.Tensor) -> None:
        if self._ends.after is None:
            return  # The first rank of a host sends for the others.
        self._num_sent += 1
        header = _HEADER.pack(self._num_sent, *stream.shape) + self._busy.tobytes()
        self._write(self._ends.after, header, stream.contiguous(), self._after)

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
        self._ends.close()

    def _read(self, end: socket.socket, into: memoryview, what: str, deadline: float) -> None:
        try:
            while into:
                end.settimeout(max(1e-3, deadline - time.monotonic()))
                count = end.recv_into(into)
                if not count:
                    self._lose(f"{self._before} is gone")
                into = into[count:]
        except TimeoutError:
            self._group.fail(f"{what} have not come within {self._group.limit_s:g} s")
        except OSError:
            self._lose(f"{self._before} is gone")

    def _lose(self, why: str) -> NoReturn:
        """Raises RanksLost with what the group knows, usually more than this stage does."""
        if _comes(lambda: self._group.is_stopped, _SEEN_S):
            raise RanksLost(f"{self._group.reason}, before step {self._group.num_frames} has ended")
        self._group.fail(why)


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
