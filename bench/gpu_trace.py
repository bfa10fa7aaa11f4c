"""Traces the device and its host during an engine's steps: kernels, gaps between them, waits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from weft.engine.base.device_copies import Mark

HOST_GAP_US = 10.0
"""A longer gap is no kernel's launch within a graph: the device waits for the host."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Idle time of a device during some steps."""

    steps: int
    kernels_per_step: float
    """Kernels, copies and fills per step."""
    share: float
    """Share of the time from the first kernel's start to the last one's end in which none ran. The
    profiler itself delays kernels: the true share is lower.
    """
    host_share: float
    """The same in gaps above 10 us alone."""


class Trace:
    """Records what a device runs, from its construction until `end`."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()

    def end(self, steps: int) -> Idle | None:
        """Summarises the device's work in this many steps; None if no kernel was seen."""
        torch.cuda.synchronize()
        self._profile.stop()
        events = self._profile.events() or ()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in events
            if event.device_type == DeviceType.CUDA and event.time_range.end > 0
        ]
        return idle_of(spans, steps) if spans else None


def idle_of(spans: Sequence[tuple[float, float]], steps: int) -> Idle:
    """Computes the idle time between spans of a device's work.

    Args:
        spans: Begin and end in microseconds, in any order; they may overlap.
        steps: That they are of.
    """
    ordered = sorted(spans)
    begin, busy_until = ordered[0]
    gaps = []
    for start, end in ordered:
        if start > busy_until:
            gaps.append(start - busy_until)
        busy_until = max(busy_until, end)
    whole = busy_until - begin
    long_gaps = sum(gap for gap in gaps if gap > HOST_GAP_US)
    return Idle(steps, len(ordered) / steps, sum(gaps) / whole, long_gaps / whole)


class Waits:
    """Time that the host waited for marks of the device."""

    def __init__(self) -> None:
        self.seconds = 0.0


@contextmanager
def counted_waits() -> Iterator[Waits]:
    """Counts the host's waits."""
    waits, wait = Waits(), Mark.wait

    def timed(mark: Mark) -> None:
        began = time.perf_counter()
        wait(mark)
        waits.seconds += time.perf_counter() - began

    Mark.wait = timed  # type: ignore[method-assign]
    try:
        yield waits
    finally:
        Mark.wait = wait  # type: ignore[method-assign]
