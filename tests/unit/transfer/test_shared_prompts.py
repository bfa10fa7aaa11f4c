"""When prompts come faster than one worker can compute them, two workers share the work."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

from weft.contract.timeline import FillCandidate, FillRecord
from weft.engine.requests.request import HeldPages, PageSources
from weft.engine.sources.cost import MIN_RESTS, FillCosts, LocalLoad
from weft.gateway.routing.view import LoadEstimate

PAGE = 16
REPORT_S = 0.2


class Burst:
    """Simulates a gateway, a decode worker and a prefill worker, which compute equally fast.

    The gateway hears of a prompt that the decode worker keeps, of first tokens, and of the prefill
    worker's queue every `REPORT_S`.
    """

    def __init__(self, rate: float, num_tokens: int) -> None:
        self.rate, self.num_tokens = rate, num_tokens
        self.filler = LoadEstimate()
        self.costs = FillCosts(None, PAGE)
        self.local_free = self.filler_free = 0.0
        self.told: list[tuple[float, str]] = []
        """Time and kind of what the gateway will hear."""
        for _ in range(MIN_RESTS):
            self.costs.observe(self.filled(), num_tokens / rate)
        self.costs.observe_local(num_tokens, num_tokens / rate)

    def filled(self) -> FillRecord:
        return FillRecord(
            source="prefill",
            worker_id="prefill-0",
            transport="nixl",
            start_token=0,
            end_token=self.num_tokens,
            start_s=0.0,
            computed_tokens=self.num_tokens,
            bytes=self.num_tokens << 10,
            first_write_posted_s=self.num_tokens / self.rate,
            last_chunk_computed_s=self.num_tokens / self.rate,
            last_write_complete_s=self.num_tokens / self.rate + 1e-6,
        )

    def hear(self, now: float) -> None:
        for at_s, kind in sorted(self.told):
            if at_s > now:
                break
            self.told.remove((at_s, kind))
            if kind == "report":
                left_s = max(0.0, self.filler_free - at_s)
                self.filler.report(0, round(left_s * self.rate), 0)
            else:
                self.filler.computed(self.num_tokens)
                self.filler.end(self.num_tokens)

    def come(self, now: float) -> float:
        """Takes in a prompt, and returns the time of its first token."""
        self.hear(now)
        candidate = FillCandidate(
            worker_id="prefill-0",
            address="",
            epoch=1,
            queued_tokens=self.filler.queued_tokens,
            tokens_per_second=self.rate,
        )
        self.filler.begin(self.num_tokens, self.num_tokens)
        queued = round(max(0.0, self.local_free - now) * self.rate)
        self.costs.local_load = partial(LocalLoad, queued)
        request: Any = SimpleNamespace(
            num_tokens=self.num_tokens + 1,
            num_computed=0,
            held=HeldPages(),
            sources=PageSources([candidate]),
        )
        takes_s = self.num_tokens / self.rate
        if self.costs.decide(request, 0, self.num_tokens, 1 << 10).is_remote:
            first_s = self.filler_free = max(now, self.filler_free) + takes_s
            self.told.append((first_s, "first token"))
        else:
            first_s = self.local_free = max(now, self.local_free) + takes_s
            self.told.append((now, "computed here"))
        return first_s


def test_neither_worker_is_idle_while_prompts_wait_for_the_other() -> None:
    """Prompts that decode workers compute themselves do not count in a prefill worker's queue."""
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    for _ in range(20):
        rate, num_tokens = rng.uniform(5_000, 50_000), PAGE * rng.randrange(32, 256)
        takes_s, count = num_tokens / rate, rng.randrange(12, 40)
        burst, now, lasts = Burst(rate, num_tokens), 0.0, []
        burst.told += [(number * REPORT_S, "report") for number in range(200)]
        for _ in range(count):
            now += rng.expovariate(4.0 / takes_s)
            lasts.append(burst.come(now) - now)
        free_s = (burst.local_free, burst.filler_free)
        assert abs(free_s[0] - free_s[1]) <= 2.1 * takes_s, (seed, free_s, takes_s)
        assert max(lasts) <= (count / 2 + 2) * takes_s, (seed, max(lasts) / takes_s)
