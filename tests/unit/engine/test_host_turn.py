"""Threads that give way to an engine's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from weft.contract import give_way as host_turn
from weft.contract.give_way import HostPriority, give_way
from weft.engine.base.background import BackgroundThread

TIMEOUT_S = 30.0


class Worker:
    """Works in pieces until it is told to stop; counts them."""

    def __init__(self) -> None:
        self.num_pieces = 0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            give_way()
            self.num_pieces += 1

    def end(self) -> None:
        pass


def reaches(goal: Callable[[], bool]) -> bool:
    until = time.monotonic() + TIMEOUT_S
    while not goal() and time.monotonic() < until:
        time.sleep(0.001)
    return goal()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostPriority:
    """It gives way at each piece, and waits end by the turn's end alone."""
    monkeypatch.setattr(host_turn, "SLICE_S", 0.0)
    monkeypatch.setattr(host_turn, "MAX_WAIT_S", TIMEOUT_S)
    monkeypatch.setattr(host_turn, "MAX_PATIENCE_S", 10 * TIMEOUT_S)
    return HostPriority()


@pytest.fixture
def worker(host: HostPriority) -> Iterator[Worker]:
    worker, thread = Worker(), BackgroundThread("test", lambda: None, host)
    thread.give(worker)
    yield worker
    worker.stop.set()
    host.yield_cores()
    thread.close()


def test_work_stands_still_while_the_host_computes(host: HostPriority, worker: Worker) -> None:
    for _ in range(3):
        assert reaches(lambda begun=worker.num_pieces: worker.num_pieces > begun + 10)
        host.take_cores()
        begun = worker.num_pieces
        time.sleep(0.05)
        # It may have been in the middle of a piece.
        assert worker.num_pieces <= begun + 1
        host.yield_cores()


def test_work_goes_on_beside_a_host_that_never_rests(
    host: HostPriority, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # Before the thread starts: it may be about to wait for as long as was allowed before.
    monkeypatch.setattr(host_turn, "MAX_WAIT_S", 0.001)
    worker: Worker = request.getfixturevalue("worker")
    assert reaches(lambda: worker.num_pieces > 10)
    host.take_cores()
    assert reaches(lambda begun=worker.num_pieces: worker.num_pieces > begun + 10)


def test_who_has_worked_little_waits_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all twice as long as it has worked, and what it had earned before."""
    now, waits = 100.0, list[float]()

    def wait(host: HostPriority, most_s: float) -> None:
        nonlocal now
        waits.append(most_s)
        now += most_s

    monkeypatch.setattr(HostPriority, "wait", wait)
    monkeypatch.setattr(host_turn.time, "perf_counter", lambda: now)
    guest, worked = host_turn._Guest(HostPriority()), 0.0
    guest.give_way()
    for _ in range(1000):
        now += host_turn.SLICE_S
        worked += host_turn.SLICE_S
        guest.give_way()
    assert max(waits) == host_turn.MAX_WAIT_S
    assert waits[-1] < host_turn.MAX_WAIT_S
    earned = host_turn.MAX_PATIENCE_S + host_turn.PATIENCE * worked
    assert sum(waits) == pytest.approx(earned, rel=0.1)
    now += 10.0
    guest.give_way()
    assert waits[-1] == host_turn.MAX_WAIT_S


def test_other_threads_give_way_to_nobody(host: HostPriority) -> None:
    host.take_cores()
    worker = Worker()
    thread = BackgroundThread("test", lambda: None)
    thread.give(worker)
    assert reaches(lambda: worker.num_pieces > 10)
    worker.stop.set()
    thread.close()
    host.yield_cores()
