"""Staging pages against a naive model: every page in one state, given to one at a time."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.engine.transfer.staging import StagingArea

NUM_LANDING, NUM_PAGES = 7, 12


def make_area() -> StagingArea:
    return StagingArea(np.zeros((NUM_PAGES, 8), np.uint8), NUM_LANDING)


def check(area: StagingArea, used: list[list[int]], quarantined: list[list[int]]) -> None:
    counts = area.counts()
    held = [page for group in (*used, *quarantined) for page in group]
    assert len(held) == len(set(held)), "a page was given out twice"
    assert counts.used == sum(map(len, used))
    assert counts.quarantined == sum(map(len, quarantined))
    assert counts.free + counts.used + counts.quarantined == counts.total == NUM_PAGES


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_pages_are_in_one_state_each(seed: int) -> None:
    rng, area = random.Random(seed), make_area()
    landing: list[list[int]] = []
    sending: list[list[int]] = []
    quarantined: list[list[int]] = []
    for _ in range(60):
        count, keep = rng.randint(1, 4), rng.choice([0, 0, 2])
        kind = rng.randrange(6)
        if kind == 0:
            free = NUM_LANDING - sum(map(len, landing)) - sum(map(len, quarantined))
            taken = area.take_landing(count)
            assert (taken is not None) == (free >= count)
            if taken is not None:
                assert len(taken) == count
                assert max(taken) < NUM_LANDING
                landing.append(taken)
        elif kind == 1:
            free = NUM_PAGES - NUM_LANDING - sum(map(len, sending))
            taken = area.take_sending(count, keep=keep)
            assert (taken is not None) == (free >= count + keep)
            if taken is not None:
                assert min(taken) >= NUM_LANDING
                sending.append(taken)
        elif kind == 2 and landing:
            area.free_landing(landing.pop(rng.randrange(len(landing))))
        elif kind == 3 and landing:
            quarantined.append(landing.pop(rng.randrange(len(landing))))
            area.quarantine(quarantined[-1])
        elif kind == 4 and quarantined:
            area.end_quarantine(quarantined.pop(rng.randrange(len(quarantined))))
        elif kind == 5 and sending:
            area.free_sending(sending.pop(rng.randrange(len(sending))))
        check(area, landing + sending, quarantined)


def test_what_is_taken_together_lies_together() -> None:
    area = make_area()
    first, second = area.take_landing(3), area.take_landing(2)
    assert (first, second) == ([0, 1, 2], [3, 4])
    area.free_landing([2, 0, 1])
    assert area.take_landing(3) == [0, 1, 2]
    assert area.take_sending(5) == [7, 8, 9, 10, 11]


def test_mistakes_are_seen() -> None:
    area = make_area()
    taken = area.take_landing(2)
    sent = area.take_sending(2)
    assert taken is not None
    assert sent is not None
    for mistake in (
        lambda: area.free_sending(taken),
        lambda: area.free_landing(sent),
        lambda: area.free_landing([6]),
        lambda: area.quarantine([6]),
        lambda: area.quarantine(sent),
    ):
        with pytest.raises(AssertionError):
            mistake()
    area.quarantine(taken)
    with pytest.raises(AssertionError):
        area.quarantine(taken)
    with pytest.raises(KeyError):
        area.end_quarantine([6])
    for num_landing in (0, NUM_PAGES):
        with pytest.raises(ValueError, match="landing pages"):
            StagingArea(np.zeros((NUM_PAGES, 8), np.uint8), num_landing)
