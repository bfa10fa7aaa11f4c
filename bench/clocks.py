"""Times of a GPU: of calls, and of graphs of calls over inputs that rotate beyond the L2 cache."""

from __future__ import annotations

import gc
import math
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from harness import Run
from weft.kernels.shared.side_stream import rehearsal

MIN_CALLS = 12
MIN_GRAPH_US = 2000
"""A graph lasts so long at least: what its own launch takes does not count."""
ROTATING_BYTES = 256 << 20
Call = Callable[[], object]
T = TypeVar("T")


def event_s(call: Call) -> float:
    """Seconds on the device from before a call's launches to their end."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def median_s(call: Call, repeats: int = 10, warm_up: int = 2) -> float:
    """Median seconds of a call on the device."""
    times = [event_s(call) for _ in range(repeats + warm_up)]
    return statistics.median(times[warm_up:])


def graph_of(call: Call) -> torch.cuda.CUDAGraph:
    """A call's launches as a graph, after the call has run once."""
    with rehearsal():
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def capture(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of the calls, in turn, that lasts `MIN_GRAPH_US`, and their number."""
    turns = -(-MIN_CALLS // len(calls))
    while True:
        graph = graph_of(partial(_run_all, calls, turns))
        graph.replay()
        took_us = 1e6 * event_s(graph.replay)
        if took_us >= MIN_GRAPH_US:
            return graph, turns * len(calls)
        turns *= math.ceil(1.2 * MIN_GRAPH_US / took_us)


def replay_us(graph: torch.cuda.CUDAGraph, number: int) -> float:
    """Microseconds of one of a graph's calls, in one replay."""
    return 1e6 * event_s(graph.replay) / number


def graph_us(calls: Call | Sequence[Call], repeats: int = 9) -> float:
    """Median microseconds of one of equal calls on different inputs, in a graph."""
    graph, number = capture(calls if isinstance(calls, Sequence) else [calls])
    return statistics.median(replay_us(graph, number) for _ in range(repeats))


def num_inputs(num_bytes: int) -> int:
    """Inputs of so many bytes that together are several times the L2 cache."""
    return max(2, -(-ROTATING_BYTES // num_bytes))


def release() -> None:
    """Gives unused memory back to the device."""
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def timeline_of(call: Call) -> list[tuple[str, float, float]]:
    """Kernels of a call by their begin: name, begin and end in microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as taken:
        call()
        torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in taken.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.end > 0
    ]
    return sorted(spans, key=lambda span: span[1])


def _run_all(calls: Sequence[Call], turns: int) -> None:
    for _ in range(turns):
        for call in calls:
            call()


def compile_beside(
    compile_one: Callable[[T], str], cases: Sequence[T], processes: int, run: Run
) -> None:
    """Compiles kernels in processes beside each other, for this one to find in Triton's cache;
    what fails there fails again where it is timed.

    Args:
        compile_one: Compiles a case; returns what went wrong.
        cases: Of the kernels.
        processes: How many.
        run: Is told of it.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        failed = [error for error in pool.map(compile_one, cases, chunksize=2) if error]
    run.note(f"compiled {len(cases) - len(failed)} of {len(cases)} kernels {failed[:5] or ''}")
