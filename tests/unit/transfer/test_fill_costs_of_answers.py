"""Who computes a prompt beside running requests: whole answers, in virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from weft.contract.timeline import FillCandidate, FillRecord, Timeline
from weft.engine.base.config import NEVER_SHIP_TOKENS
from weft.engine.requests.request import HeldPages, PageSources
from weft.engine.sources.cost import FillCosts, LocalLoad

PAGE = 16
PAGE_BYTES = 1 << 16
NUM_PROMPTS = 500


@dataclass
class Answer:
    came_s: float
    first_s: float
    end_s: float


@dataclass
class World:
    """A decode worker and a prefill worker of equal rates, whose prompts come by chance."""

    seed: int
    rate: float
    """Prompt tokens per second of either worker."""
    load: float
    """Share of one worker's rate that comes in prompts."""
    step_s: float
    """Duration of a step of decodes."""
    hand_over_s: float
    num_new: int
    """Tokens of an answer."""
    answers: list[Answer] = field(default_factory=list)
    local_free: float = 0.0
    filler_free: float = 0.0

    def mean_answer_s(self, costs: FillCosts) -> float:
        """Mean time from a prompt to its last token, as `costs` decides."""
        rng, now = random.Random(self.seed), 0.0
        self.answers, self.local_free, self.filler_free = [], 0.0, 0.0
        costs.observe_decode(self.step_s)
        for _ in range(NUM_PROMPTS):
            now += rng.expovariate(self.load * self.rate / 2_000)
            num_tokens = PAGE * rng.randint(31, 219)
            running = [one for one in self.answers if one.first_s <= now < one.end_s]
            queued = round(max(0.0, self.local_free - now) * self.rate)
            costs.local_load = partial(LocalLoad, queued, len(running), 8_192)
            there_s = max(0.0, self.filler_free - now)
            request = self._request(num_tokens, there_s)
            decision = costs.decide(request, 0, num_tokens, PAGE_BYTES)
            timeline = Timeline(submitted_at=now, admitted_s=0.0)
            timeline.local_cost_s = decision.local_s
            if decision.is_remote:
                first_s = self._fill(costs, timeline, num_tokens, there_s)
            else:
                first_s = self._compute(costs, num_tokens, now, is_beside=bool(running))
            timeline.first_token_s = first_s - now
            costs.observe_first_token(timeline)
            self.answers.append(Answer(now, first_s, first_s + self.num_new * self.step_s))
        return fmean(one.end_s - one.came_s for one in self.answers)

    def _request(self, num_tokens: int, there_s: float) -> Any:
        filler = FillCandidate(
            worker_id="prefill-0",
            address="",
            epoch=1,
            match_tokens=0,
            queued_tokens=round(there_s * self.rate),
            tokens_per_second=self.rate,
        )
        return SimpleNamespace(
            num_tokens=num_tokens + 1,
            num_computed=0,
            held=HeldPages(),
            sources=PageSources([filler]),
        )

    def _fill(self, costs: FillCosts, timeline: Timeline, num_tokens: int, there_s: float) -> float:
        computed_s = there_s + num_tokens / self.rate
        self.filler_free = timeline.submitted_at + computed_s
        record = FillRecord(
            source="prefill",
            worker_id="prefill-0",
            transport="nixl",
            start_token=0,
            end_token=num_tokens,
            start_s=0.0,
            end_s=computed_s + self.hand_over_s,
            computed_tokens=num_tokens,
            bytes=num_tokens // PAGE * PAGE_BYTES,
            first_write_posted_s=computed_s,
            last_chunk_computed_s=computed_s,
            last_write_complete_s=computed_s + 1e-4,
        )
        costs.observe(record, record.end_s)
        timeline.fills.append(record)
        return timeline.submitted_at + record.end_s + self.step_s

    def _compute(self, costs: FillCosts, num_tokens: int, now: float, *, is_beside: bool) -> float:
        """Computes here, and delays who runs meanwhile."""
        begin_s, added_s = max(now, self.local_free), num_tokens / self.rate
        took_s = added_s + self.step_s * is_beside
        self.local_free = begin_s + took_s
        for one in self.answers:
            if one.first_s < self.local_free and one.end_s > begin_s:
                one.end_s += added_s
        if is_beside:
            costs.observe_beside(num_tokens, took_s)
        if not is_beside or not costs.local_tokens_per_s:
            costs.observe_local(num_tokens, took_s)
        return self.local_free


def test_answers_are_hardly_slower_than_on_the_better_side() -> None:
    seed = random.randrange(2**31)
    rng, shares = random.Random(seed), []
    for _ in range(6):
        rate = rng.uniform(5_000, 50_000)
        world = World(
            rng.getrandbits(32),
            rate,
            load=rng.uniform(0.2, 1.1),
            step_s=2_000 / rate * rng.uniform(0.05, 0.3),
            hand_over_s=2_000 / rate * rng.uniform(0.05, 0.5),
            num_new=rng.choice([50, 200, 400]),
        )
        chosen, remote, local = (
            world.mean_answer_s(FillCosts(most, PAGE)) for most in (None, 0, NEVER_SHIP_TOKENS)
        )
        shares.append(chosen / min(remote, local))
    assert max(shares) <= 1.15, (seed, shares)
    assert fmean(shares) <= 1.05, (seed, shares)
