"""Launches on a side stream while a graph is captured, so that the graph runs both in parallel.

Outside of captures, the events that this takes cost the host more time than the device gains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, Literal, TypeVar

import torch

Result = TypeVar("Result")

_is_rehearsal: ContextVar[bool] = ContextVar("is_rehearsal", default=False)


Lane = Literal["adapters", "drafts"]
"""Side streams, one for each purpose."""


@functools.cache
def _stream(device: torch.device, lane: Lane) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def rehearsal() -> Iterator[None]:
    """Context in which kernels are launched as during a capture, so that they are compiled before
    it.
    """
    token = _is_rehearsal.set(True)
    try:
        yield
    finally:
        _is_rehearsal.reset(token)


def is_forking(device: torch.device) -> bool:
    """Whether `SideStreamWork` uses another stream now."""
    if device.type != "cuda":
        return False
    return _is_rehearsal.get() or torch.cuda.is_current_stream_capturing()


class SideStreamWork(Generic[Result]):
    """Work that runs on a side stream if `is_forking`, else on the current one, at once.

    On the side stream it waits for everything launched before this object was created, but not for
    launches between that and `join`. `join` launches it after those launches, so that they get
    their multiprocessors first.

    The lane's next work may get memory that this work has freed, even if the current stream has yet
    to read it. So each work of a lane must be created after all launches that read the results of
    the lane's earlier work.

    Args:
        work: Launches kernels; on the side stream neither they nor the first kernel after the join
            may start early (`weft.kernels.shared.dependent_launch`). Their inputs must not change
            until the join.
        is_forked: Whether to use a side stream at all; if not, the work runs on the current stream
            at once.
    """

    def __init__(
        self,
        device: torch.device,
        work: Callable[[], Result],
        lane: Lane = "adapters",
        *,
        is_forked: bool = True,
    ) -> None:
        self._device = device
        self._work = work
        self._lane = lane
        self._fork: torch.cuda.Event | None = None
        self._done: list[Result] = []
        if is_forked and is_forking(device):
            self._fork = torch.cuda.current_stream(device).record_event()
        else:
            self._done.append(work())

    def join(self) -> Result:
        """Returns the result, for launches on the current stream; call once."""
        if self._fork is None:
            return self._done.pop()
        side, main = _stream(self._device, self._lane), torch.cuda.current_stream(self._device)
        side.wait_event(self._fork)
        with torch.cuda.stream(side):
            result = self._work()
        main.wait_stream(side)
        return result
