"""The longer first tokens wait, and the fewer requests run, the longer decodes leave cores."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from weft.engine.loop.fill_pace import MAX_PAUSE, FillPace

TARGET_S = 0.1


def paced(
    num_filling: int, num_running: int, weight: float = 1.0, target_s: float = TARGET_S
) -> Any:
    scheduler: Any = SimpleNamespace(
        filling=[None] * num_filling, running=[None] * num_running, prefilling=[]
    )
    return FillPace(scheduler, target_s, weight), scheduler


def test_a_pause_is_worth_what_it_spares() -> None:
    """A step of d seconds that comes p seconds later delays every running request by p less the
    target, and spares every first token that waits d seconds.
    """
    for _ in range(200):
        filling, running = random.randint(1, 30), random.randint(1, 30)
        weight, step_s = random.uniform(0, 3), random.uniform(0.001, 0.1)
        pace, _ = paced(filling, running, weight)
        pace.stepped(5.0, 5.0 + step_s)
        pause_s = pace.left_s(5.0 + step_s)
        assert TARGET_S - 1e-9 <= pause_s <= MAX_PAUSE * TARGET_S + 1e-9
        if pause_s < MAX_PAUSE * TARGET_S - 1e-9:
            assert running * (pause_s - TARGET_S) == pytest.approx(weight * filling * step_s)


def test_nothing_waits_without_a_fill_or_beside_a_prompt_of_its_own() -> None:
    pace, scheduler = paced(1, 4)
    pace.stepped(5.0, 5.02)
    assert pace.left_s(5.05) > 0
    assert pace.left_s(5.0 + MAX_PAUSE * TARGET_S + 0.02) == 0
    scheduler.prefilling.append(None)
    assert pace.left_s(5.05) == 0
    scheduler.prefilling.clear()
    scheduler.filling.clear()
    assert pace.left_s(5.05) == 0


def test_without_a_target_there_are_no_pauses() -> None:
    pace, _ = paced(9, 1, target_s=0.0)
    pace.stepped(5.0, 5.1)
    assert pace.left_s(5.1) == 0
