"""How stages of one host hand over the residual stream."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from weft.contract.errors import RanksLost

_HEADER = struct.Struct("<qqq")
"""Header: number of the step's stream, rows, columns."""
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
        names: Names of the stages before and after, for messages.
    """

    def __init__(self, ends: StageEnds, group: StageGroup, names: tuple[str, str]) -> None:
        self._ends, self._group = ends, group
        self._before, self._after = names
        self._num_received = self._num_sent = 0

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
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
        if stream.numel():
            self._read(end, _bytes_of(stream), what, deadline)
        return stream

    def send(self, stream: torch.Tensor) -> None:
        assert self._ends.after is not None
        self._num_sent += 1
        end, stream = self._ends.after, stream.contiguous()
        header = _HEADER.pack(self._num_sent, *stream.shape)
        try:
            end.settimeout(self._group.limit_s)
            end.sendall(header)
            if stream.numel():
                end.sendall(_bytes_of(stream))
        except TimeoutError:
            limit_s = self._group.limit_s
            self._group.fail(f"{self._after} has not taken rows within {limit_s:g} s")
        except OSError:
            self._lose(f"{self._after} is gone")

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
