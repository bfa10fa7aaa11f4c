"""Ends of steps are seen soon after they come, whatever the steps before took."""

from __future__ import annotations

import random

import pytest
from weft.engine.loop.step_ends import MOST_LATE, WATCH_S, StepEnds

LEAD_S = 0.002
LOOK_S = 5e-6
"""What a look itself takes."""


def see_end(ends: StepEnds, true_s: float, num_tokens: int, *, is_plain: bool) -> tuple[float, int]:
    """Simulates a host that rests and looks until a step of this duration has ended.

    Returns:
        Seconds by which the end was seen late, and the number of looks.
    """
    passed_s, looks, is_followed = 0.0, 0, False
    while passed_s < true_s:
        is_followed |= ends.begins_in_s(passed_s, is_plain=is_plain) <= 0.0
        rest_s = ends.rest_s(passed_s, num_tokens, is_plain=is_plain, is_followed=is_followed)
        if not rest_s:
            passed_s = max(passed_s, true_s)  # The host waits for the device.
            break
        passed_s += rest_s + LOOK_S
        looks += 1
    ends.learn(passed_s, num_tokens, is_plain=is_plain)
    return passed_s - true_s, looks


@pytest.mark.parametrize("seed", range(20))
def test_an_end_is_seen_late_by_a_share_of_the_step_at_most(seed: int) -> None:
    rng = random.Random(seed)
    ends = StepEnds(LEAD_S)
    for _ in range(500):
        is_plain = rng.random() < 0.7
        ends.learn_start(rng.uniform(0, 0.003))
        true_s = 10 ** rng.uniform(-3.3, -0.3)
        late_s, _ = see_end(ends, true_s, rng.randint(1, 8192), is_plain=is_plain)
        assert late_s <= max(WATCH_S, MOST_LATE * true_s) + LOOK_S + 1e-9


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_slow_first_step_is_forgotten(is_plain: bool) -> None:
    # The first prompt of a process takes a hundred times as long for each token as later ones do.
    ends = StepEnds(LEAD_S)
    see_end(ends, 0.1, 40, is_plain=is_plain)
    for _ in range(4):
        late_s, _ = see_end(ends, 0.0034, 512, is_plain=is_plain)
    assert late_s <= WATCH_S + LOOK_S


@pytest.mark.parametrize("true_s", [0.0007, 0.007, 0.16])
@pytest.mark.parametrize("is_plain", [True, False])
def test_equal_steps_take_few_looks(true_s: float, is_plain: bool) -> None:
    ends = StepEnds(LEAD_S)
    for _ in range(30):
        late_s, looks = see_end(ends, true_s, 512, is_plain=is_plain)
    assert late_s <= (0.0 if is_plain else WATCH_S) + LOOK_S
    assert looks <= 50
