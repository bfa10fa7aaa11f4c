"""Schedules of `weft chaos`: the same seed, the same faults; or those of the hand-over alone."""

from __future__ import annotations

import random
from itertools import islice

from weft.chaos.mesh import Link
from weft.chaos.schedule import (
    RANK_TIMEOUT_S,
    RANK_WEIGHTS,
    TRANSFER_POINTS,
    make_schedule,
    transfer_links,
)

NAMES = ["prefill-0", "prefill-1", "decode-0", "decode-1", "kvstore-0"]
LINKS: list[Link] = [
    ("gateway", "prefill-0"),
    ("gateway", "decode-1"),
    ("decode", "prefill-0"),
    ("decode", "prefill-1"),
    ("worker", "kvstore-0"),
    ("gateway", "kvstore-0"),
]


def test_a_seed_gives_one_schedule() -> None:
    seed = random.randrange(2**32)
    first, second = (list(islice(make_schedule(seed, NAMES, LINKS), 50)) for _ in range(2))
    assert first == second


def test_faults_of_the_hand_over_meet_nothing_else() -> None:
    links = transfer_links(LINKS)
    assert links == [("decode", "prefill-0"), ("decode", "prefill-1"), ("worker", "kvstore-0")]
    schedule = make_schedule(random.randrange(2**32), NAMES, links, points=TRANSFER_POINTS)
    for planned in islice(schedule, 200):
        assert planned.link is None or planned.link in links
        if planned.spec is not None:
            role = planned.target.partition("-")[0]
            assert planned.spec.kind in TRANSFER_POINTS[role][planned.spec.point]


def test_only_ranks_are_hit_each_of_them_and_some_for_longer_than_others_wait() -> None:
    names = [name for name in NAMES if not name.startswith("kvstore")]
    schedule = make_schedule(
        random.randrange(2**32), names, [], RANK_WEIGHTS, parts=("rank",), num_ranks=4
    )
    found = list(islice(schedule, 400))
    assert {(each.kind, each.part) for each in found} == {("kill", "rank"), ("stop", "rank")}
    assert {each.rank for each in found} == set(range(4))
    held = [each.hold_s for each in found if each.kind == "stop"]
    assert min(held) < RANK_TIMEOUT_S < max(held)
