"""Ten thousand random operations over all of an engine's memory: nothing wrong is ever read, and in
the end every page of every tier is free, cached or quarantined."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from weft.engine.base.config import EvictionName
from weft.testing.scheduling.memory_system import NAMESPACES, PAGE, System, arm_any, disarm

NUM_OPERATIONS = 10_000
MAX_OPEN = 8
CHANCES = {"step": 60, "submit": 25, "cancel": 8, "fault": 3, "flush": 0.3, "restart": 0.2}


@pytest.fixture(autouse=True)
def _peace() -> Iterator[None]:
    yield
    disarm()


SHORT = [("lru", 0, True), ("slru", 1000, False)]
POLICIES = (("lru", 0), ("lfu", 1), ("fifo", 0), ("slru", 1000))
OTHERS = [
    (policy, threshold, is_overlapped)
    for policy, threshold in POLICIES
    for is_overlapped in (True, False)
    if (policy, threshold, is_overlapped) not in SHORT
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "threshold", "is_overlapped"),
    [*SHORT, *(pytest.param(*values, marks=pytest.mark.full) for values in OTHERS)],
)
def test_random_operations_leave_nothing(
    tmp_path: Path, policy: EvictionName, threshold: int, is_overlapped: bool
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def new_system() -> System:
        return System(
            rng,
            tmp_path,
            num_pages=40,
            num_slots=(24, 60),
            policy=policy,
            threshold=threshold,
            is_overlapped=is_overlapped,
        )

    stems = [[rng.randrange(3) for _ in range(10 * PAGE)] for _ in range(5)]
    system = new_system()
    total: Counter[str] = Counter()
    names, weights = list(CHANCES), list(CHANCES.values())
    for number in range(NUM_OPERATIONS):
        operation = rng.choices(names, weights)[0]
        if operation == "step":
            system.step()
        elif operation == "submit":
            if len(system.requests()) < MAX_OPEN:
                stem = rng.choice(stems)[: rng.randint(0, 10 * PAGE)]
                tokens = stem + [rng.randrange(3) for _ in range(rng.randint(1, 2 * PAGE))]
                num_fillers = rng.choice([0, 0, 0, 1, 2])
                system.submit(tokens, rng.choice(NAMESPACES), rng.randint(1, 12), num_fillers)
        elif operation == "cancel":
            system.cancel_any()
        elif operation == "fault":
            total[arm_any(rng)] += 1
        elif operation == "flush":
            system.flush()
        else:  # What runs ends; the disk's pages stay.
            while system.requests():
                system.cancel_any()
            system.settle()
            total += tally(system)
            system.close()
            system = new_system()
        if number % 50 == 0:
            system.check()
    disarm()
    system.settle()
    total += tally(system)
    system.close()
    print(total)
    assert total["host loaded"]
    assert total["disk loaded"]
    assert total["written back"]
    assert total["host corrupt"] + total["disk corrupt"]
    assert total["filled by prefill"]
    assert total["filled by kvstore"] or threshold
    assert total["read positions"] > 10_000


def tally(system: System) -> Counter[str]:
    """What a system has done."""
    found = Counter({f"filled by {kind}": n for kind, n in system.others.num_filled.items()})
    for report in system.tiers.report():
        for name in ("loaded", "saved", "corrupt", "dropped", "evicted"):
            found[f"{report.name} {name}"] = report.counters[f"{name}_pages"]
        found[f"{report.name} failed"] = report.counters["failed_loads"]
    found["read positions"] = system.num_read_positions
    found["preempted"] = system.scheduler.num_preemptions
    found["written back"] = system.tiers.num_written_back_pages
    return found
