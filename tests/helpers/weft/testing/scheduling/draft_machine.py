"""A machine of known speed whose requests' drafts are of known worth, for the gate of drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.engine.base.drafts import DraftShape
from weft.engine.base.token_trees import TokenTree
from weft.engine.requests.request import Request
from weft.engine.scheduler.plan import Plan, PlanItem, Run, VerifyItem
from weft.engine.scheduler.ports import DraftGate
from weft.testing.scheduling.bare_request import bare_request

StepTime = Callable[[int, int], float]
"""Seconds of a step without its drafting, by number of rows and of requests."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of some steps."""

    depths: list[int]
    """Number of drafts in each step."""
    num_tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


@dataclass(slots=True, kw_only=True)
class DraftMachine:
    """Runs steps as a gate wants them, of requests that begin together and end one by one.

    When the last one has ended as many others begin. Steps take longer as contexts grow.
    """

    num_requests: int
    step_s: StepTime
    draft_s: float
    """Seconds of each turn of the drafter."""
    chances: Sequence[float]
    """Probability that a draft is right, by generation of requests."""
    has_drafts: float = 1.0
    """Share of steps in which a request gets drafts at all."""
    num_tokens: tuple[int, int] = (100, 100)
    """Fewest and most tokens of a request."""
    growth: float = 0.2
    """Factor by which steps are longer when requests have their 100th token."""
    noise: float = 0.04
    """Standard deviation of steps' times; now and then one is much longer."""
    wants_drafts: Sequence[bool] = (True,)
    """Whether each request, in turn, wants drafts."""
    prompts: Sequence[PlanItem] = ()
    """Prompts in each step beside the requests."""
    sibling_chance: float = 0.0
    """Probability that a tree's less likely draft is right where the most likely one is not."""
    random: random.Random = field(default_factory=random.Random)
    requests: list[Request] = field(default_factory=list)
    _num_born: int = 0

    def run(self, gate: DraftGate, generations: int) -> Outcome:
        """Runs all requests from begin to end, this many times."""
        depths, num_tokens, seconds = [], 0, 0.0
        while True:
            self.requests = [r for r in self.requests if r.num_computed < r.max_tokens]
            if not self.requests:
                if not generations:
                    return Outcome(depths, num_tokens, seconds)
                generations -= 1
                self.requests = [self._new() for _ in range(self.num_requests)]
            shape = gate.shape(self.requests)
            plan, runs = self._step(shape)
            duration_s = self.time_s(plan)
            gate.observe(plan, runs, self._measured(duration_s))
            depths.append(shape.num_drafts)
            seconds += duration_s
            num_tokens += len(plan.decodes) + sum(len(run.tokens) for run in runs)
            self._advance(plan, runs)

    def time_s(self, plan: Plan) -> float:
        """Undisturbed duration of a step."""
        rows = len(self.requests) + sum(len(drafts) for drafts in plan.drafts)
        known = self.step_s(rows, len(self.requests)) + plan.drafting_s
        progress = sum(request.num_computed for request in self.requests) / len(self.requests)
        known *= 1 + self.growth * progress / 100
        return known

    def _measured(self, seconds: float) -> float:
        if self.random.random() < 0.01:
            return seconds * self.random.uniform(1.5, 4)
        return seconds * max(0.8, self.random.gauss(1, self.noise))

    def _new(self) -> Request:
        request = bare_request([1], 16, bytes(32))
        request.drafts.wanted = self.wants_drafts[self._num_born % len(self.wants_drafts)]
        # Its generation, from which its chance follows, wherever it is kept.
        request.seed = self._num_born // self.num_requests
        request.max_tokens = random.Random(self._num_born).randint(*self.num_tokens)
        self._num_born += 1
        return request

    def _step(self, shape: DraftShape) -> tuple[Plan, list[Run]]:
        wanted = shape.num_drafts
        drafted = [request for request in self.requests if request.drafts.wanted and wanted]
        others = [request for request in self.requests if request not in drafted]
        plan = Plan(others, chunks=self.prompts)
        tree = shape if shape.is_tree else None
        plan.verifies = [VerifyItem(request, 0, wanted, tree) for request in drafted]
        drafts, runs = [], []
        for request in drafted:
            num_drafts = wanted if self.random.random() < self.has_drafts else 0
            chance, count = self.chances[request.seed % len(self.chances)], 0
            while count < min(num_drafts, shape.depth) and self.random.random() < chance:
                count += 1
            drawn = [1] * count
            if num_drafts and shape.is_tree and count < shape.depth:
                drawn += [2] * (self.random.random() < self.sibling_chance)
            drafts.append(comb(shape) if shape.is_tree and num_drafts else [1] * num_drafts)
            runs.append(Run(request, [*drawn, 0], [None] * (1 + len(drawn)), num_drafts))
        plan.drafts, plan.drafting_s = drafts, self.draft_s * shape.depth if drafted else 0.0
        return plan, runs

    def _advance(self, plan: Plan, runs: list[Run]) -> None:
        for request in plan.decodes:
            request.num_computed += 1
        for run in runs:
            run.request.num_computed += len(run.tokens)


def comb(shape: DraftShape) -> TokenTree:
    """A tree whose likeliest chain of 1s has a 2 beside each; others are 3s behind the root."""
    parents = [*range(shape.depth), *range(shape.depth)]
    tokens = [1] * shape.depth + [2] * shape.depth
    others = shape.num_drafts - len(tokens)
    tokens, parents = tokens + [3] * others, parents + [0] * others
    return TokenTree(tokens[: shape.num_drafts], parents[: shape.num_drafts])


class FixedGate(DraftGate):
    """Always the same drafts: so many in chains, or trees of a shape."""

    def __init__(self, drafts: int | DraftShape) -> None:
        self._shape = DraftShape.chain(drafts) if isinstance(drafts, int) else drafts

    def shape(self, requests: Sequence[Request]) -> DraftShape:
        """See `DraftGate.shape`."""
        return self._shape

    def observe(self, plan: Plan, runs: Sequence[Run], duration_s: float) -> None:
        """See `DraftGate.observe`."""
