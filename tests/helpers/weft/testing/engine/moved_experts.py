"""Experts that get random places on random ranks while an engine runs."""

from __future__ import annotations

import random

from weft.contract.messages import Inbox, Outbox
from weft.engine.loop.llm import LLM
from weft.engine.parallel.expert_places import UNUSED, Placement


def random_placement(old: Placement) -> Placement:
    """Any experts anywhere, in any places, with as many copies as there happen to be."""
    ranks, size = len(old.places), len(old.places[0])
    order = random.sample(range(old.num_experts), old.num_experts)
    packs: list[list[int]] = [[] for _ in range(ranks)]
    for expert in order:
        packs[random.choice([r for r in range(ranks) if len(packs[r]) < size])].append(expert)
    for pack in packs:
        others = [expert for expert in order if expert not in pack]
        pack += random.sample(others, random.randint(0, size - len(pack)))
        pack += [UNUSED] * (size - len(pack))
        random.shuffle(pack)
    return Placement(tuple(map(tuple, packs)), old.num_experts)


class Shuffler:
    """Orders random placements in the turns of an engine, one after another."""

    def __init__(self, llm: LLM) -> None:
        self._engine, self._turn = llm.engine, llm.engine.turn
        self.wanted: dict[int, Placement] = {}
        llm.engine.turn = self.turn  # type: ignore[method-assign]

    def turn(self, inbox: Inbox | None = None) -> Outbox:
        experts = self._engine.experts
        if experts.job is None:
            assert self.wanted == {} or experts.placements == self.wanted
            self.wanted = {n: random_placement(old) for n, old in experts.placements.items()}
            experts.begin(self.wanted)
        return self._turn(inbox)

    @property
    def num_changes(self) -> int:
        balance = self._engine.experts.balance
        assert balance is not None
        assert balance.num_failed == 0
        return balance.num_placements
