"""Blocks of recurrent layers: states of the right tokens alone, whatever the load."""

from __future__ import annotations

import random

import pytest
from weft.engine.memory.state_index import BLOCKS_OF_REQUEST
from weft.engine.scheduler.limits import SchedulerLimits
from weft.engine.scheduler.state import Request, State
from weft.testing.scheduling.state_bench import PAGE, VOCAB, StateBench

STEMS = [[random.Random(stem).randrange(VOCAB) for _ in range(150)] for stem in range(3)]


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def ride(rng: random.Random, num_operations: int) -> StateBench:
    """Prompts that begin alike, turns of chats, forks, cancels, preemptions, accepted drafts."""
    max_running = rng.randint(1, 6)
    limits = SchedulerLimits(
        PAGE,
        max_running + rng.choice([4, 16, 40]),
        rng.choice([PAGE, 4 * PAGE, 10 * PAGE]),
        max_running,
    )
    bench = StateBench(
        rng,
        rng.randint(60, 160),
        1 + BLOCKS_OF_REQUEST * rng.randint(1, max_running) + rng.choice([0, 3, 20]),
        limits,
        checkpoint_tokens=rng.choice([PAGE, 4 * PAGE, 16 * PAGE]),
        has_cache=rng.random() < 0.9,
        drafts=rng.random() < 0.6,
        is_overlapped=rng.random() < 0.5,
        stop_chance=rng.choice([0.0, 0.05]),
    )
    added: list[Request] = []
    for number in range(num_operations):
        chance = rng.random()
        if chance < 0.15 and bench.scheduler.num_requests < 12:
            prompt = rng.choice(STEMS)[: rng.randint(0, 110)]
            if added and rng.random() < 0.4:
                prompt = rng.choice(added[-8:]).tokens[:110]
            prompt = prompt + random_tokens(rng, rng.randint(1, 20))
            added.append(bench.add(prompt, rng.randint(1, 40), rng.choice([0, 0, 0, 1, 3])))
        elif chance < 0.18 and added:
            request = rng.choice(added[-12:])
            if request.state is not State.FINISHED:
                bench.cancel(request)
        elif chance < 0.181:
            bench.memory.flush_cache()
        else:
            bench.step()
        if number % 20 == 0:
            bench.check_cached()
    bench.run_out()
    return bench


@pytest.mark.parametrize(
    "num_operations",
    [1_500, pytest.param(100_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])],
    ids=str,
)
def test_states_are_right_whatever_the_load(num_operations: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    rng, total, seen = random.Random(seed), 0, dict.fromkeys(("accepted", "hits", "rerun"), 0)
    while total < num_operations:
        count = rng.randint(100, 500)
        bench = ride(rng, count)
        total += count
        seen["accepted"] += bench.num_accepted
        seen["hits"] += bench.scheduler.num_prefix_hit_tokens
        seen["rerun"] += bench.num_rerun
    assert all(seen.values()), seen
