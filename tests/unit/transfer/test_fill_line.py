"""The order in which requests get room for fills, and how long one may hold up others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weft.engine.requests.request import State
from weft.engine.sources.fill_queue import FillQueue

PATIENCE_S = 5.0


class Line:
    """A line on a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.line = FillQueue(PATIENCE_S, lambda: self.now)

    def enough(self, request: Any, wanted: int) -> int:
        return self.line.enough_pages(request, wanted, most=100, least=12)


def request(state: State = State.FILLING) -> Any:
    return SimpleNamespace(state=state)


def test_the_first_that_waits_goes_before_others() -> None:
    line, first, second = Line().line, request(), request()
    assert line.may_begin(first)
    line.waits(first)
    assert line.may_begin(first)
    assert not line.may_begin(second)
    line.leaves(second)
    assert not line.may_begin(second)
    line.leaves(first)
    assert line.may_begin(second)


def test_a_fill_begins_with_all_or_half_of_the_room() -> None:
    line, one = Line(), request()
    assert [line.enough(one, wanted) for wanted in (1, 12, 49, 50, 51, 400)] == [
        *(1, 12, 49),
        *(50, 50, 50),
    ]
    assert line.line.enough_pages(one, 400, most=0, least=12) == 12
    assert line.line.enough_pages(one, 400, most=1, least=1) == 1


def test_patience_ends() -> None:
    """Whoever holds the room may wait itself: others are not held up for ever, nor the first."""
    line, first, second = Line(), request(), request()
    line.line.waits(first)
    line.now += PATIENCE_S - 0.1
    line.line.waits(first)  # Asked again each step: it waits since then, not since now.
    assert not line.line.may_begin(second)
    assert line.enough(first, 60) == 50
    line.now += 0.2
    assert line.line.may_begin(second)
    assert line.enough(first, 60) == 12
    assert line.enough(second, 60) == 50
    line.line.waits(second)
    line.line.leaves(first)
    assert line.line.may_begin(second)


def test_who_does_not_wait_any_more_holds_nobody_up() -> None:
    for state in (State.PREFILLING, State.WAITING, State.RUNNING, State.PREEMPTED):
        line, first, second = Line(), request(), request()
        line.line.waits(first)
        first.state = state
        assert line.line.may_begin(second)
        line.line.waits(second)
        assert line.line.may_begin(second)
        assert not line.line.may_begin(request())
