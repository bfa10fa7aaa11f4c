"""Blocks of recurrent layers: states of the right tokens alone, whatever the load."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from weft.engine.requests.request import Request, State
from weft.engine.scheduler.limits import SchedulerLimits
from weft.pages.memory.state_index import BLOCKS_OF_REQUEST
from weft.testing.scheduling.late_state_bench import LateStateBench
from weft.testing.scheduling.scheduler_bench import Bench
from weft.testing.scheduling.state_bench import PAGE, VOCAB, StateBench

STEMS = [[random.Random(stem).randrange(VOCAB) for _ in range(150)] for stem in range(3)]


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def ride(rng: random.Random, num_operations: int, folder: Path, *, is_late: bool) -> StateBench:
    """Prompts that begin alike, turns of chats, forks, cancels, preemptions, accepted drafts, texts
    that another worker began; with tiers or without. `is_late`: only the device knows where
    requests with drafts are.
    """
    max_running = rng.randint(1, 6)
    limits = SchedulerLimits(
        PAGE,
        max_running + rng.choice([4, 16, 40]),
        rng.choice([PAGE, 4 * PAGE, 10 * PAGE]),
        max_running,
    )
    form = (
        {"drafts": True}
        if is_late
        else {"drafts": rng.random() < 0.7, "is_overlapped": rng.random() < 0.6}
    )
    bench = (LateStateBench if is_late else StateBench)(
        rng,
        rng.randint(65, 160),
        1 + BLOCKS_OF_REQUEST * rng.randint(1, max_running) + rng.choice([0, 3, 20]),
        limits,
        checkpoint_tokens=rng.choice([PAGE, 4 * PAGE, 16 * PAGE]),
        has_cache=rng.random() < 0.9,
        **form,
        stop_chance=rng.choice([0.0, 0.05]),
        slots=(rng.choice([0, 12, 40, 200]), rng.choice([0, 0, 0, 100])),
        folder=folder,
        threshold=rng.choice([0, 0, 1, 1000]),
    )
    added: list[Request] = []
    for number in range(num_operations):
        chance = rng.random()
        if chance < 0.15 and bench.scheduler.num_requests < 12:
            prompt = rng.choice(STEMS)[: rng.randint(0, 110)]
            if added and rng.random() < 0.4:
                prompt = rng.choice(added[-8:]).tokens[:110]
            prompt = prompt + random_tokens(rng, rng.randint(1, 20))
            begun = random_tokens(rng, rng.randint(1, 20)) if rng.random() < 0.2 else []
            samples = rng.choice([0, 0, 0, 1, 3])
            added.append(bench.add(prompt, rng.randint(1, 40), samples, begun))
        elif chance < 0.2 and (open_ones := [r for r in added if r.state is not State.FINISHED]):
            bench.cancel(rng.choice(open_ones))
            bench.check_cached()
        elif chance < 0.22 and bench.scheduler.running:
            bench.scheduler.preempt(rng.choice(bench.scheduler.running))
            bench.check_cached()
        elif chance < 0.221:
            bench.blocks.flush_cache()
            bench.memory.flush_cache()
        else:
            bench.step()
        if number % 20 == 0:
            bench.check_cached()
    bench.run_out()
    if bench.tiers is not None:
        bench.tiers.close()
    return bench


@pytest.mark.parametrize(
    ("num_operations", "is_late"),
    [
        (1_500, False),
        (500, True),
        pytest.param(100_000, False, marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
        pytest.param(50_000, True, marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
    ],
)
def test_states_are_right_whatever_the_load(
    num_operations: int, is_late: bool, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    rng, total, seen = random.Random(seed), 0, Counter[str]()
    expected = {"accepted", "late"} if is_late else {"accepted", "hits", "rerun"}
    expected |= {"hits", "rerun", "host", "disk", "preempted"} if num_operations > 10_000 else set()

    def is_enough() -> bool:
        # A few rides in a row may all be without drafts, or without a cache.
        has_all = all(seen[name] for name in expected)
        return total >= (num_operations if has_all else 10 * num_operations)

    while not is_enough():
        count = rng.randint(100, 500)
        bench = ride(rng, count, tmp_path / str(total), is_late=is_late)
        total += count
        seen["accepted"] += bench.num_accepted
        seen["hits"] += bench.scheduler.num_prefix_hit_tokens
        seen["rerun"] += bench.num_rerun
        seen["preempted"] += bench.scheduler.num_preemptions
        seen["late"] += isinstance(bench, LateStateBench) and bench.num_late
        for tier in [] if bench.tiers is None else bench.tiers.report():
            seen[tier.name] += tier.counters["loaded_pages"]
    print(seen)
    assert all(seen[name] for name in expected), seen


def test_a_state_that_is_still_to_be_written_is_not_kept() -> None:
    """A border that drafts crossed: the next step writes its block, and the request ends first."""
    rng, num_seen = random.Random(), 0
    while num_seen < 3:
        limits = SchedulerLimits(PAGE, 32, 16, 2)
        bench = StateBench(rng, 40, 20, limits, drafts=True, is_overlapped=True)
        request = bench.add(random_tokens(rng, 9), 60)
        while request.state is not State.FINISHED:
            bench.step()
            held = bench.states._held.get(request)
            newest = held.newest if held is not None else 0
            is_passed = 0 < newest * PAGE <= request.num_computed
            if held is not None and is_passed and held.blocks[newest].end > request.num_computed:
                bench.cancel(request)
                bench.check_cached()
                num_seen += 1
        bench.run_out()


def hit_rate(bench: Bench | StateBench, rng: random.Random) -> float:
    """Share of prompt tokens found: agents with one long prompt, whose turns go on behind their
    answers and now and then behind a part of their history.
    """
    shared = random_tokens(rng, 60 * PAGE)
    chats = [shared + random_tokens(rng, rng.randint(4, 30)) for _ in range(6)]
    for _ in range(6):
        turns = []
        for chat in chats:
            most = rng.randint(4, 24)
            if isinstance(bench, StateBench):
                turns.append(bench.add(chat, most))
            else:
                turns.append(bench.add(len(chat), most, prefix=chat))
            for _ in range(rng.randint(0, 4)):
                bench.step()
        while any(turn.state is not State.FINISHED for turn in turns):
            bench.step()
        for at, turn in enumerate(turns):
            is_branch = rng.random() < 0.2
            end = rng.randint(len(shared), turn.num_tokens) if is_branch else turn.num_tokens
            chats[at] = turn.tokens[:end] + random_tokens(rng, rng.randint(8, 60))
    scheduler = bench.scheduler
    return scheduler.num_prefix_hit_tokens / scheduler.num_prefix_query_tokens


def test_agents_find_nearly_as_much_as_with_attention_alone() -> None:
    """With ten blocks beside those of running requests, which have the KV of hundreds of pages.

    Of several loads together: one in fifty loses a long prefix by chance, and a tenth with it.
    """
    limits, found, most = SchedulerLimits(PAGE, 160, 128, 6), 0.0, 0.0
    num_blocks = 1 + 6 * BLOCKS_OF_REQUEST + 10
    for _ in range(4):
        seed = random.SystemRandom().randrange(1 << 32)
        states = StateBench(random.Random(), 700, num_blocks, limits, checkpoint_tokens=64 * PAGE)
        found += (own := hit_rate(states, random.Random(seed)))
        most += (other := hit_rate(Bench(random.Random(), 700, limits), random.Random(seed)))
        print(f"seed {seed}: {own:.3f} of prompt tokens found, {other:.3f} with attention alone")
    assert found >= 0.9 * most
