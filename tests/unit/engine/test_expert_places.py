"""Placements of experts on ranks."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from weft.engine.parallel.expert_places import (
    UNUSED,
    ExpertLoad,
    Placement,
    balanced,
    settled,
)
from weft.kernels.ops.moe.spec import CYCLES

LEAST_GAIN = 0.02
"""Share of the most loaded rank's work that experts are moved for."""
LARGEST_RATIO = 4 / 3
"""Bound of greedy packing's largest sum over the least possible one (Graham, 1969)."""


def random_load(experts: int, steps: int = 200) -> ExpertLoad:
    chance = np.minimum(1.0, 3.0 / np.random.permutation(np.arange(1, experts + 1)))
    rows = np.random.binomial(16, chance, (steps, experts))
    return ExpertLoad(rows.sum(axis=0), (rows > 0).sum(axis=0))


def check_whole(placement: Placement, ranks: int, places: int) -> None:
    """Each row of each expert is computed on exactly one rank, by a place that has the expert."""
    assert [len(own) for own in placement.places] == [places] * ranks
    for own in placement.places:
        used = [expert for expert in own if expert != UNUSED]
        assert len(used) == len(set(used))
    tables = np.stack([placement.table(rank) for rank in range(ranks)])
    assert tables.shape == (ranks, CYCLES, placement.num_experts)
    assert ((tables < places).sum(axis=0) == 1).all()
    for rank, cycle, expert in np.argwhere(tables < places).tolist():
        assert placement.places[rank][tables[rank, cycle, expert]] == expert


@pytest.mark.parametrize(("experts", "ranks", "spares"), [(8, 2, 0), (12, 4, 2), (64, 2, 3)])
def test_work_is_counted_as_the_tables_divide_it(experts: int, ranks: int, spares: int) -> None:
    np.random.seed(seed := random.randrange(1 << 30))
    placement = Placement.first(experts, ranks, spares)
    check_whole(placement, ranks, experts // ranks + spares)
    assert placement.imbalance(ExpertLoad(*np.zeros((2, experts), np.int64)), 1.0) == 1.0
    for _ in range(6):
        load = random_load(experts)
        new = balanced(placement, load, read_rows := random.choice([0.0, 4.0, 100.0]))
        check_whole(new, ranks, experts // ranks + spares)
        # Of the mean it may be more: fewer copies read fewer weights.
        most, before = (float(one.loads(load, read_rows).max()) for one in (new, placement))
        assert new == placement or most <= before * (1 - LEAST_GAIN), seed
        # Many rows, of which each expert gets those that were counted.
        rows = np.zeros(ranks)
        for rank in range(ranks):
            mine = new.table(rank) < len(new.places[rank])
            rows[rank] = (mine.mean(axis=0) * load.rows).sum()
        # Copies whose number does not divide a cycle have unequal shares.
        assert new.loads(load, 0.0) == pytest.approx(rows, rel=0.2)
        assert rows.sum() == pytest.approx(load.rows.sum())
        placement = new


def test_sums_are_near_the_best_ones() -> None:
    """As all ways of dividing eight experts among two ranks show."""
    np.random.seed(random.randrange(1 << 30))
    for _ in range(20):
        load = random_load(8)
        found = balanced(Placement.first(8, 2, 0), load, 0.0).loads(load, 0.0).max()
        halves = itertools.combinations(range(8), 4)
        total = load.rows.sum()
        best = min(max(load.rows[list(h)].sum(), total - load.rows[list(h)].sum()) for h in halves)
        assert found <= LARGEST_RATIO * best * 1.03  # Small gains are not worth a move.


def test_one_hot_expert_gets_copies() -> None:
    rows = np.array([1000, 10, 10, 10])
    load = ExpertLoad(rows, np.full(4, 10))
    old = Placement.first(4, 2, 1)
    new = balanced(old, load, 1.0)
    assert new.holders()[0] == [0, 1]
    assert new.imbalance(load, 1.0) < 1.1 < old.imbalance(load, 1.0)


def test_what_stays_on_a_rank_keeps_its_slot() -> None:
    old = Placement(((3, 0, UNUSED), (1, 2, UNUSED)), 4)
    new = settled([[1, 2, 0], [0, 3]], old)
    assert new == Placement(((3, 0, UNUSED), (1, 2, 0)), 4)
    assert [(m.expert, m.rank, m.place) for m in new.moves_from(old)] == [(0, 1, 2)]
    assert Placement.of_numbers(new.numbers, 4, 2) == new
