"""Landed pages that the engine thread moves into the pool itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from weft.engine.transfer.staged import MAX_MOVING, StagedPort
from weft.engine.transfer.staging import StagingArea

LEASE = bytes(16)


class Move:
    """A copy that ends when the test says so."""

    def __init__(self, staged: Sequence[int]) -> None:
        self.staged = staged
        self.thread = threading.get_ident()
        self.ended = threading.Event()
        self.error: Exception | None = None

    def is_done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.ended.is_set()

    def wait(self) -> None:
        assert self.ended.wait(60)

    def digests(self) -> list[int]:
        return [100 + page for page in self.staged]

    def digest_s(self) -> float:
        return 0.0


class Landing:
    """A port over a staging area of which the test ends the copies."""

    def __init__(self, *, is_direct: bool) -> None:
        self.is_direct = is_direct
        self.moves: list[Move] = []
        self.woken = threading.Event()
        area, mover = StagingArea(np.zeros((40, 8), np.uint8), 32), self
        as_mover: Any = mover
        self.port = StagedPort(area, as_mover, self.woken.set, has_digests=True)

    def move_in(self, staged: Sequence[int], pages: Sequence[int], *_: Any, **__: Any) -> Move:
        self.moves.append(Move(staged))
        return self.moves[-1]

    def move_out(self, pages: Sequence[int], staged: Sequence[int], **_: Any) -> Move:
        return self.move_in(staged, pages)

    def verify(self, index: int) -> None:
        self.port.verify((LEASE, index), [index], [index], None)

    def taken(self) -> list[Any]:
        """Results of the thread, once it has told of some."""
        assert self.woken.wait(60)
        self.woken.clear()
        return [one.tag for one in self.port.take()]


@pytest.fixture
def landing() -> Iterator[Landing]:
    made = Landing(is_direct=True)
    yield made
    for move in made.moves:
        move.ended.set()
    made.port.close()


def test_quick_copies_are_begun_and_watched_by_the_engine_thread(landing: Landing) -> None:
    landing.verify(3)
    landing.verify(4)
    assert [move.thread for move in landing.moves] == [threading.get_ident()] * 2
    assert landing.port.is_moving
    landing.moves[1].ended.set()
    assert not landing.port.has_moved(), "the first comes first"
    assert landing.port.take() == []
    landing.moves[0].ended.set()
    assert landing.port.has_moved()
    assert [(one.tag, one.digests) for one in landing.port.take()] == [
        ((LEASE, 3), [103]),
        ((LEASE, 4), [104]),
    ]
    assert not landing.port.is_moving
    assert not landing.port.has_moved()
    assert landing.port.sizes() == {"digests": 0}


def test_the_engine_thread_waits_for_no_buffer(landing: Landing) -> None:
    """More copies, and all that follow while the thread has some, are the thread's."""
    for index in range(MAX_MOVING + 1):
        landing.verify(index)
    for move in landing.moves[:MAX_MOVING]:
        move.ended.set()
    assert [one.tag[1] for one in landing.port.take()] == list(range(MAX_MOVING))  # type: ignore[index]
    landing.verify(MAX_MOVING + 1)
    assert not landing.port.is_moving
    tags = []
    while len(tags) < 2:
        for move in landing.moves:
            move.ended.set()
        if landing.woken.wait(0.01):
            tags += landing.taken()
    assert tags == [(LEASE, MAX_MOVING), (LEASE, MAX_MOVING + 1)]
    assert all(move.thread != threading.get_ident() for move in landing.moves[MAX_MOVING:])
    landing.verify(20)
    assert landing.port.is_moving, "the thread has nothing left"


def test_slow_copies_are_the_threads() -> None:
    landing = Landing(is_direct=False)
    landing.verify(1)
    assert not landing.port.is_moving
    while not landing.moves:
        landing.woken.wait(0.001)
    landing.moves[0].ended.set()
    assert landing.taken() == [(LEASE, 1)]
    landing.port.close()


def test_a_copy_that_fails_is_told_by_take(landing: Landing) -> None:
    landing.verify(1)
    landing.moves[0].error = RuntimeError("an illegal memory access")
    assert landing.port.has_moved()
    with pytest.raises(RuntimeError, match="copying pages"):
        landing.port.take()
    landing.moves[0].error = None
