"""A GPU whose steps overlap with the host's work, for the gate of drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.engine.base.drafts import DraftShape
from weft.engine.requests.request import Request
from weft.engine.scheduler.plan import NO_DRAFTS, Plan, PlanItem, Run, VerifyItem
from weft.engine.scheduler.ports import DraftGate
from weft.engine.scheduler.running import MAX_DRAFTED_BESIDE
from weft.testing.scheduling.bare_request import bare_request
from weft.testing.scheduling.draft_machine import Outcome

PROMPTS_S, PROMPTS_DEVICE_S = 0.6e-3, 0.3e-3
"""More of the host's and of the device's time for a step that brings prompts."""
WARM_UP_S = 0.012
"""So long everything takes twice as long."""


class _Begun(NamedTuple):
    """A step that the device has."""

    plan: Plan
    runs: list[Run]
    num_requests: int
    depth: int
    ends_at: float


@dataclass(slots=True, kw_only=True)
class OverlapMachine:
    """Serves requests, so many at a time: a new one begins where one has ended.

    The host begins a step while the device runs the one before, waits for that, and takes its
    tokens. Times are about those of a model of 135 million parameters on one H200.
    """

    num_requests: int
    chance: float
    """Probability that a draft is right."""
    slowness: float
    """Of the host; 1.0: one that is about as fast as the device."""
    num_tokens: tuple[int, int] = (60, 128)
    """Fewest and most tokens of a request."""
    random: random.Random = field(default_factory=random.Random)
    _num_born: int = 0
    _requests: list[Request] = field(default_factory=list)
    _host_s: float = 0.0
    _device_s: float = 0.0
    _ended_s: float = 0.0
    _begun: _Begun | None = None

    def run(self, gate: DraftGate, number: int) -> Outcome:
        """Serves so many requests from begin to end."""
        depths, num_tokens, began_s = [], 0, self._host_s
        while True:
            running = [r for r in self._requests if r.num_computed < r.max_tokens]
            count = min(number, self.num_requests - len(running))
            number -= count
            new = [self._new() for _ in range(count)]
            self._requests = [*running, *new]
            if not self._requests:
                self._end(gate)
                return Outcome(depths, num_tokens, self._host_s - began_s)
            shape = gate.shape(running) if running else NO_DRAFTS
            if new and len(running) > MAX_DRAFTED_BESIDE:
                shape = NO_DRAFTS
            plan, runs = self._plan(running, new, shape)
            begun = self._launch(plan, runs, len(running), shape.num_drafts if running else 0)
            self._end(gate)
            self._begun = begun
            depths.append(begun.depth)
            num_tokens += len(plan.decodes) + len(new) + sum(len(run.tokens) for run in runs)
            for request in [*plan.decodes, *new]:
                request.num_computed += 1
            for run in runs:
                run.request.num_computed += len(run.tokens)

    def _new(self) -> Request:
        request = bare_request([1], 16, bytes(32))
        request.drafts.wanted = True
        # The same ones, whatever else was drawn.
        request.max_tokens = random.Random(self._num_born).randint(*self.num_tokens)
        self._num_born += 1
        return request

    def _plan(
        self, running: list[Request], new: list[Request], shape: DraftShape
    ) -> tuple[Plan, list[Run]]:
        plan = Plan([] if shape.num_drafts else running)
        plan.chunks = [PlanItem(request, 0, 1, draws=True) for request in new]
        runs: list[Run] = []
        for request in running if shape.num_drafts else ():
            room = min(shape.num_drafts, max(0, request.max_tokens - request.num_computed - 1))
            num_right = 0
            while num_right < room and self.random.random() < self.chance:
                num_right += 1
            plan.verifies = [*plan.verifies, VerifyItem(request, 0, room)]
            runs.append(Run(request, [1] * num_right + [0], [None] * (1 + num_right), room))
        plan.drafts = [[1] * run.num_drafts for run in runs]
        return plan, runs

    def _launch(self, plan: Plan, runs: list[Run], num_requests: int, depth: int) -> _Begun:
        count, has_prompts = max(1, num_requests), bool(plan.chunks)
        host_s = 0.3e-3 + 2.5e-6 * count if depth else 0.28e-3 + 0.9e-6 * count
        self._host_s += self._about(self.slowness * host_s + PROMPTS_S * has_prompts)
        rows = count * (1 + depth)
        device_s = 0.43e-3 + 7.5e-6 * count + 0.7e-6 * rows
        device_s += (0.07e-3 + 0.05e-3 * depth) * (depth > 0) + PROMPTS_DEVICE_S * has_prompts
        self._device_s = max(self._host_s, self._device_s) + self._about(device_s)
        return _Begun(plan, runs, count, depth, self._device_s)

    def _end(self, gate: DraftGate) -> None:
        """Waits for the step that began last."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        self._host_s = max(self._host_s, begun.ends_at)
        before_s, self._ended_s = self._ended_s, self._host_s
        gate.observe(begun.plan, begun.runs, self._ended_s - before_s)
        each_s = 3e-6 + 0.3e-6 * begun.depth if begun.depth else 0.5e-6
        taking_s = (0.07e-3 if begun.depth else 0.05e-3) + each_s * begun.num_requests
        self._host_s += self._about(self.slowness * taking_s)

    def _about(self, seconds: float) -> float:
        if self._host_s < WARM_UP_S:
            seconds *= 2
        if self.random.random() < 0.01:
            return seconds * self.random.uniform(1.3, 3)
        return seconds * max(0.8, self.random.gauss(1, 0.05))
