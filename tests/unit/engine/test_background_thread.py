"""The thread that moves pages: what becomes of its jobs when another one takes its place."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

import pytest
from weft.engine.base.background import BackgroundThread

TIMEOUT_S = 30.0


class Job:
    """Waits, if it is told to."""

    def __init__(self, going_on: threading.Event | None = None) -> None:
        self.begun = threading.Event()
        self.num_runs = self.num_ends = 0
        self._going_on = going_on

    def run(self) -> None:
        self.begun.set()
        self.num_runs += 1
        if self._going_on is not None:
            self._going_on.wait(TIMEOUT_S)

    def end(self) -> None:
        self.num_ends += 1


class HeldQueue:
    """A queue whose owner is held up once before it takes anything back."""

    def __init__(self, queue: SimpleQueue[Any], hold_up: Any) -> None:
        self._queue = queue
        self._hold_up = hold_up

    def put(self, job: Any) -> None:
        self._queue.put(job)

    def get(self) -> Any:
        return self._queue.get()

    def get_nowait(self) -> Any:
        self._hold_up()
        return self._queue.get_nowait()


def ended(thread: BackgroundThread) -> None:
    until = time.monotonic() + TIMEOUT_S
    while thread.num_open:
        assert time.monotonic() < until, "a job never ends"
        thread.take()
        time.sleep(0.005)


@pytest.mark.parametrize("is_late", [False, True], ids=["stuck", "goes-on"])
def test_every_job_ends_once(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    """Also if the stuck one goes on just before the others are taken back."""
    going_on = threading.Event()
    thread = BackgroundThread("test", lambda: None)

    def hold_up() -> None:
        if is_late and not going_on.is_set():
            going_on.set()
            thread._thread.join(TIMEOUT_S)

    jobs = [Job(going_on), Job(), Job()]
    thread.give(jobs[0])
    assert jobs[0].begun.wait(TIMEOUT_S)
    for job in jobs[1:]:
        thread.give(job)
    monkeypatch.setattr(thread, "_jobs", HeldQueue(thread._jobs, hold_up))
    for job in thread.take_back():
        job.end()
    going_on.set()
    ended(thread)
    assert [job.num_ends for job in jobs] == [1, 1, 1]
    assert [job.num_runs for job in jobs] == [1, 0, 0]
    thread._thread.join(TIMEOUT_S)
    assert not thread._thread.is_alive()


def test_closing_says_whether_the_thread_has_ended() -> None:
    going_on = threading.Event()
    thread = BackgroundThread("test", lambda: None)
    job = Job(going_on)
    thread.give(job)
    assert job.begun.wait(TIMEOUT_S)
    assert not thread.close(0.01)
    going_on.set()
    assert thread.close(TIMEOUT_S)
