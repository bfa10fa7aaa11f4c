"""The gate finds what pays, against a machine and a draft of known speed and worth."""

from __future__ import annotations

import random

import pytest
from bare_request import bare_request
from weft.engine.scheduler.acceptance import Acceptance
from weft.engine.scheduler.plan import Plan, PlanItem, Run, VerifyItem
from weft.engine.scheduler.state import Request
from weft.engine.speculative.gate import DEPTHS, PROBE_EVERY, MeasuredGate

MAX_DRAFTS = 5
CHOICES = [depth for depth in DEPTHS if depth <= MAX_DRAFTS]


class Machine:
    """Steps of known time, and drafts that are right with known chance."""

    def __init__(self, requests: int, chance: float, draft_s: float, row_s: float) -> None:
        self.chance, self.draft_s, self.row_s = chance, draft_s, row_s
        self.requests: list[Request] = [bare_request([1], 16, bytes(32)) for _ in range(requests)]
        for request in self.requests:
            request.speculates = True

    def time_s(self, depth: int) -> float:
        """Of a step: something fixed, each row, each turn of the draft."""
        return 10e-3 + self.row_s * len(self.requests) * (1 + depth) + self.draft_s * depth

    def best_rate(self) -> float:
        """Tokens a second of a request at the best depth."""
        return max(self.tokens(depth) / self.time_s(depth) for depth in CHOICES)

    def tokens(self, depth: int) -> float:
        return sum(self.chance**index for index in range(depth + 1))

    def run(self, gate: MeasuredGate, steps: int) -> tuple[list[int], float]:
        """The depth of each step, and tokens a second of a request."""
        depths, num_tokens, seconds = [], 0.0, 0.0
        for _ in range(steps):
            depth = gate.max_drafts(self.requests)
            plan = Plan(self.requests if not depth else ())
            runs = []
            if depth:
                plan.verifies = [VerifyItem(request, 0, depth) for request in self.requests]
                for request in self.requests:
                    count = 0
                    while count < depth and random.random() < self.chance:
                        count += 1
                    runs.append(Run(request, [1] * (1 + count), [None] * (1 + count), depth))
            duration_s = self.time_s(depth)
            gate.observe(plan, runs, duration_s * random.uniform(0.95, 1.05))
            depths.append(depth)
            seconds += duration_s
            num_tokens += sum(len(run.tokens) for run in runs) / len(self.requests) or 1
        return depths, num_tokens / seconds


@pytest.mark.parametrize("requests", [1, 4, 64])
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("row_s", [0.0, 1e-4, 2e-3])
def test_it_comes_near_the_best(requests: int, chance: float, row_s: float) -> None:
    machine, gate = Machine(requests, chance, 1e-3, row_s), MeasuredGate(MAX_DRAFTS)
    machine.run(gate, 300)
    depths, rate = machine.run(gate, 2000)
    assert rate > 0.93 * machine.best_rate()
    # Where drafts cannot pay they cost next to nothing.
    if chance == 0.0:
        assert sum(depth > 0 for depth in depths) <= len(depths) // PROBE_EVERY + 1
        assert rate > 0.98 / machine.time_s(0)


def test_it_follows_what_changes() -> None:
    machine, gate = Machine(1, 0.9, 1e-3, 0.0), MeasuredGate(MAX_DRAFTS)
    machine.run(gate, 500)
    assert machine.run(gate, 100)[0].count(MAX_DRAFTS) > 90
    machine.chance = 0.0
    machine.run(gate, 3000)
    assert machine.run(gate, 100)[0].count(0) > 90
    machine.chance = 0.9
    machine.run(gate, 30_000)
    assert machine.run(gate, 100)[0].count(0) < 10


def step(gate: MeasuredGate, machine: Machine, *, has_prompt: bool = False) -> int:
    """One step in which those that may be drafted for get nothing right; its depth."""
    depth = gate.max_drafts(machine.requests)
    drafted = [request for request in machine.requests if request.speculates and depth]
    plan = Plan([request for request in machine.requests if request not in drafted])
    plan.verifies = [VerifyItem(request, 0, depth) for request in drafted]
    if has_prompt:
        plan.chunks = [PlanItem(bare_request([1], 16, bytes(32)), 0, 1, samples=False)]
    gate.observe(
        plan, [Run(request, [1], [None], depth) for request in drafted], machine.time_s(depth)
    )
    return depth


def test_one_that_wants_no_drafts_does_not_keep_the_gate_from_learning() -> None:
    machine, gate = Machine(4, 0.0, 1e-3, 2e-3), MeasuredGate(MAX_DRAFTS)
    machine.requests[0].speculates = False
    for _ in range(300):
        step(gate, machine)
    assert sum(step(gate, machine) > 0 for _ in range(100)) <= 2


def test_beside_prompts_nothing_is_tried_that_was_not_measured() -> None:
    machine, gate = Machine(4, 0.9, 1e-3, 0.0), MeasuredGate(MAX_DRAFTS)
    for _ in range(8):  # Until drafts are being explored.
        step(gate, machine)
    assert step(gate, machine, has_prompt=True) > 0
    assert [step(gate, machine, has_prompt=True) for _ in range(200)] == [0] * 200
    machine.run(gate, 400)
    assert sum(machine.run(gate, 50)[0]) > 50


def test_numbers_of_requests_are_apart() -> None:
    """What pays for one request need not pay for 64."""
    gate = MeasuredGate(MAX_DRAFTS)
    few, many = Machine(1, 0.8, 1e-3, 1e-4), Machine(64, 0.8, 1e-3, 5e-3)
    for _ in range(20):
        few.run(gate, 50)
        many.run(gate, 50)
    assert gate.depths()[1] > 0
    assert gate.depths()[64] == 0


def test_acceptance_is_by_place() -> None:
    acceptance = Acceptance(4, 0.99)
    for _ in range(4000):
        acceptance.observe(2, 4)  # The third is never right.
    expected = acceptance.expected_tokens()
    assert expected == pytest.approx([1, 2, 3, 3, 3], abs=0.05)
    # One request begins with that, and soon has its own.
    own = acceptance.of_one(0.9, 4)
    assert own.expected_tokens() == pytest.approx(expected)
    for _ in range(40):
        own.observe(0, 4)
    assert own.expected_tokens() == pytest.approx([1, 1, 1, 1, 1], abs=0.1)
    assert acceptance.expected_tokens() == expected


def test_kinds_of_text_are_apart() -> None:
    """A request whose drafts are wrong soon gets none, though others' were right; and back."""
    gate = MeasuredGate(MAX_DRAFTS)
    good, bad = Machine(2, 0.9, 1e-3, 3e-3), Machine(2, 0.1, 1e-3, 3e-3)
    good.run(gate, 400)
    assert sum(good.run(gate, 50)[0]) > 50
    bad.run(gate, 40)
    assert sum(bad.run(gate, 100)[0]) <= 10
    assert sum(good.run(gate, 50)[0]) > 50
