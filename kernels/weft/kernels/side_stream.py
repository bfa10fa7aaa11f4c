"""Launches beside those of the current stream, where a graph is captured: it runs both at once.

Out of captures the events that this takes cost the host more than the device gains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")

_is_rehearsal: ContextVar[bool] = ContextVar("is_rehearsal", default=False)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def rehearsal() -> Iterator[None]:
    """What is inside is launched as while a graph is captured, so that it is compiled by then."""
    token = _is_rehearsal.set(True)
    try:
        yield
    finally:
        _is_rehearsal.reset(token)


def is_forking(device: torch.device) -> bool:
    """Whether `Beside` takes another stream now."""
    if device.type != "cuda":
        return False
    return _is_rehearsal.get() or torch.cuda.is_current_stream_capturing()


class Beside(Generic[Result]):
    """Work on another stream where `is_forking`, else on this one, at once.

    On another stream it waits for what was launched before this is made, and not for what is
    launched between that and `join`. There it is launched: after the other, which so gets its
    multiprocessors first.

    Args:
        device: Of the current stream.
        work: Launches; on another stream none of them, nor the first after the join, may begin
            early (`weft.kernels.gpu.dependent_launch`). What they read stays as it is meanwhile.
        is_forked: False: on this stream, at once, in any case.
    """

    def __init__(
        self, device: torch.device, work: Callable[[], Result], *, is_forked: bool = True
    ) -> None:
        self._device = device
        self._work = work
        self._fork: torch.cuda.Event | None = None
        self._done: list[Result] = []
        if is_forked and is_forking(device):
            self._fork = torch.cuda.current_stream(device).record_event()
        else:
            self._done.append(work())

    def join(self) -> Result:
        """Its result, for launches on the current stream; once."""
        if self._fork is None:
            return self._done.pop()
        side, main = _stream(self._device), torch.cuda.current_stream(self._device)
        side.wait_event(self._fork)
        with torch.cuda.stream(side):
            result = self._work()
        main.wait_stream(side)
        return result
