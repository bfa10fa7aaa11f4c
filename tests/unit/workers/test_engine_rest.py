"""How an engine's process rests between two turns."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import cast

import pytest
from weft.common.worker.engine_main import ServerLink, rest
from weft.engine.loop.engine import Engine

LONG_S = 60.0


class FakeEngine:
    """Expects pages of a peer, which arrive after so many looks."""

    def __init__(self, poll_s: float | None, num_looks: int) -> None:
        self._poll_s = poll_s
        self.num_left = num_looks

    def arrival_poll_s(self) -> float | None:
        return self._poll_s

    def has_arrived(self) -> bool:
        self.num_left -= 1
        return self.num_left <= 0


@pytest.fixture
def link() -> Iterator[ServerLink]:
    ours, theirs = socket.socketpair()
    yield ServerLink(ours)
    ours.close()
    theirs.close()


def test_pages_that_arrive_end_the_rest(link: ServerLink) -> None:
    engine = FakeEngine(1e-4, num_looks=5)
    rest(cast("Engine", engine), link, LONG_S)
    assert engine.num_left == 0


def test_a_wake_up_ends_the_rest(link: ServerLink) -> None:
    for poll_s in (None, 1e-3):
        engine = FakeEngine(poll_s, num_looks=10**9)
        timer = threading.Timer(0.02, link.wake)
        timer.start()
        rest(cast("Engine", engine), link, LONG_S)
        timer.join()


def test_nobody_looks_where_nothing_can_arrive(link: ServerLink) -> None:
    engine = FakeEngine(None, num_looks=1)
    rest(cast("Engine", engine), link, 1e-3)
    assert engine.num_left == 1
    engine = FakeEngine(1e-4, num_looks=10**9)
    rest(cast("Engine", engine), link, 5e-3)
    assert engine.num_left < 10**9
