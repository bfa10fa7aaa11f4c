"""Records the steps of one process with PyTorch's profiler.

    prepare  in a thread: starting CUPTI on a GPU may take seconds, without the interpreter's lock
    start    takes less than a millisecond
    stop     waits for the device and collects events, some 10 us for each operation of PyTorch
    writing  in a thread, which holds the interpreter's lock for some 5 ms a megabyte

The events are not handed to a forked process, because a fork copies memory that is pinned for a GPU
or registered with a NIC. Merging and compressing is the work of another process. The class
`torch.profiler.profile` is not used, since it imports PyTorch's compiler, which takes seconds. A
profile that fails leaves a file `rank-N.error`, and the engine goes on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.autograd.profiler import profile, record_function
from torch.profiler import ProfilerActivity, supported_activities
from weft.engine.base.device_threads import use_device
from weft.engine.executor.step_input import StepInput

logger = logging.getLogger(__name__)

PREPARE_LIMIT_S = 20.0
"""Longest time that a preparation may take; later it counts as hung."""


class StepProfiler:
    """Belongs to the thread that runs the steps of one rank."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device = device
        self._rank = rank
        self._profile: profile | None = None
        self._preparing: threading.Thread | None = None
        self._ready_by = 0.0
        self._problem = ""
        self._num_steps = 0
        self.is_recording = False

    @property
    def is_ready(self) -> bool:
        """Whether `start` would not wait."""
        return not self._is_preparing or self.is_hung

    @property
    def is_hung(self) -> bool:
        """Whether a preparation has not ended in time, nor since. No other can begin."""
        return self._is_preparing and time.monotonic() >= self._ready_by

    @property
    def _is_preparing(self) -> bool:
        return self._preparing is not None and self._preparing.is_alive()

    def prepare(self, *, host: bool, device: bool) -> None:
        self._problem, self._num_steps = "", 0
        if self._is_preparing:
            return
        late, self._profile = self._profile, None
        self._ready_by = time.monotonic() + PREPARE_LIMIT_S
        self._preparing = threading.Thread(
            target=self._guarded, args=(lambda: self._prepare(host, device, late),), daemon=True
        )
        self._preparing.start()

    def start(self) -> None:
        if self._preparing is not None:
            self._preparing.join(max(0.0, self._ready_by - time.monotonic()))
        if self._is_preparing:
            self._problem = (
                f"the profiler was not ready within {PREPARE_LIMIT_S:.0f} s; restart the worker if "
                "that lasts"
            )
        elif self._profile is not None and not self._problem:
            self._guarded(self._profile._start_trace)
            self.is_recording = not self._problem

    def step(self, step: StepInput) -> AbstractContextManager[object]:
        """Names what is recorded within as the next step."""
        self._num_steps += 1
        first_chunk = step.num_decodes + step.num_verified
        counts = {
            "decodes": step.num_decodes,
            "verified": step.num_verified,
            "prompt tokens": int(step.counts[first_chunk:].sum()),
        }
        words = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return record_function(f"step {self._num_steps}: {words}")

    def stop(self, folder: str) -> None:
        if not self.is_recording:
            # What was prepared must be started and stopped, or the next one could not be prepared.
            self.start()
        recorded = None
        if self.is_recording and self._profile is not None:
            recorded, self._profile, self.is_recording = self._profile, None, False
            self._guarded(lambda: _end(recorded))
        path = Path(folder) / f"rank-{self._rank}.json"
        threading.Thread(target=_write, args=(recorded, path, self._problem), daemon=True).start()

    def _prepare(self, host: bool, device: bool, late: profile | None) -> None:
        """`late` was prepared for an earlier profile, after that had ended."""
        use_device(self._device)
        if late is not None:
            with contextlib.suppress(Exception):
                late._start_trace()  # type: ignore[no-untyped-call]
                _end(late)
        on_gpu = device and self._device.type == "cuda"
        can_record = ProfilerActivity.CUDA in supported_activities()  # type: ignore[no-untyped-call]
        if on_gpu and not can_record:
            self._problem = "this build of PyTorch cannot record a GPU"
            return
        prepared = profile(
            use_cpu=host or not on_gpu, use_device="cuda" if on_gpu else None, use_kineto=True
        )
        prepared._prepare_trace()  # type: ignore[no-untyped-call]
        self._profile = prepared

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            logger.exception("profiling failed")
            self._problem = self._problem or f"{type(error).__name__}: {error}"


def _end(recorded: profile) -> None:
    recorded.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _write(recorded: profile | None, path: Path, problem: str) -> None:
    unfinished = path.with_suffix(".part")
    try:
        if recorded is None or problem:
            raise RuntimeError(problem or "nothing was recorded")
        recorded.export_chrome_trace(str(unfinished))  # type: ignore[no-untyped-call]
        unfinished.replace(path)
    except Exception as error:
        logger.exception("a profile was not written")
        with contextlib.suppress(OSError):  # Nobody may wait for it any more.
            unfinished.write_text(problem or f"{type(error).__name__}: {error}")
            unfinished.replace(path.with_suffix(".error"))
