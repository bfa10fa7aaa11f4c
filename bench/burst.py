"""Simulates one engine's scheduler under bursts or random arrivals, over a modelled device.

    python bench/burst.py [--model qwen3-0.6b llama-3.1-8b cpu] [--requests 256] [--rate 0]

The scheduler, its pages and its budgets are the engine's own; the clock is virtual: a step takes
the time that the device's model says, and one step is planned while the one before runs, as on a
GPU. Rows
differ in what first tokens weigh (`--first-token-weight`) and in the order of admission. So it
shows the effect of the rules within a second and without a GPU; `bench/load.py` measures a server
under a burst.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from harness import Harness, Run, percentile
from weft.contract.keys import PageKeys
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.timeline import Timeline
from weft.engine.base.config import PolicyName
from weft.engine.requests.pages import RequestPages
from weft.engine.requests.request import Request, RequestKey, State
from weft.engine.scheduler.limits import SchedulerLimits
from weft.engine.scheduler.plan import Plan
from weft.engine.scheduler.policies import make_queue
from weft.engine.scheduler.prompt_budget import PromptBudget
from weft.engine.scheduler.scheduler import Scheduler
from weft.engine.sources.cost import MIN_MEASURED_TOKENS, FillCosts
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.tree import PrefixTree

PAGE = 16
AGEING_S = 2.0
TARGET_S = 0.1


class Device(NamedTuple):
    """What steps take."""

    decode_s: float
    """Time of a step of decodes, however few."""
    row_s: float
    """Additional time for each running request."""
    tokens_per_s: float
    """Prompt tokens."""
    step_tokens: int
    chunk_tokens: int
    decodes_beside: int

    def step_s(self, plan: Plan) -> float:
        """Seconds of one step: weights are read once, whoever uses them."""
        rows_s = self.row_s * len(plan.decodes)
        prompts_s = plan.num_chunk_tokens / self.tokens_per_s
        if self.decodes_beside == 0:  # A CPU: products of few rows share nothing with others.
            return (self.decode_s + rows_s) * bool(len(plan.decodes)) + prompts_s
        return max(self.decode_s, prompts_s) + rows_s


DEVICES = {
    # One H100, bench/results/gpu-engine-pair-20261126.json.
    "qwen3-0.6b": Device(8e-4, 2.8e-5, 270_000, 8192, 4096, 64),
    "llama-3.1-8b": Device(5.2e-3, 4e-5, 42_300, 8192, 4096, 64),
    # Two EPYC cores, demo model.
    "cpu": Device(1e-2, 1e-3, 1_285, 512, 256, 0),
}


harness = Harness(__file__, __doc__)
harness.flag("--model", nargs="+", choices=sorted(DEVICES), default=sorted(DEVICES))
harness.flag("--requests", type=int, default=256)
harness.flag("--rate", type=float, default=0.0, help="mean arrivals a second; 0 = all at once")
harness.flag("--prompt", type=int, nargs="+", default=[512], help="tokens, or a range")
harness.flag("--tokens", type=int, default=256, help="new tokens of each")
harness.flag("--max-running", type=int, default=256)
harness.flag("--policy", nargs="+", default=["fcfs", "shortest_remaining"])
harness.flag(
    "--shared-step-tokens", type=int, help="prompt tokens up to which prompts share a step"
)
harness.flag("--first-token-weight", type=float, nargs="+", default=[0.0, 1.0])


@dataclass(slots=True)
class Row:
    """One burst."""

    model: str
    policy: str
    first_token_weight: float
    requests: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    tokens_per_s: float


@dataclass(slots=True)
class Answer:
    """Times of one request's tokens, seconds."""

    sent_s: float
    times_s: list[float]


class Simulation:
    """One engine in virtual time.

    Args:
        device: What steps take.
        policy: Order of admission.
        first_token_weight: See `EngineConfig`.
        max_running: Requests that run at once.
        shared_step_tokens: See `EngineConfig`.
    """

    def __init__(
        self,
        device: Device,
        policy: PolicyName,
        first_token_weight: float,
        max_running: int,
        shared_step_tokens: int | None = None,
    ) -> None:
        self._device = device
        self.costs = FillCosts(None, PAGE)
        cache = PrefixTree(PAGE)
        memory = PageMemory(1 << 16, cache)
        pages = RequestPages(memory, cache, PAGE)
        limits = SchedulerLimits(
            PAGE,
            device.step_tokens,
            device.chunk_tokens,
            max_running,
            decodes_beside=device.decodes_beside,
            shared_step_tokens=shared_step_tokens,
        )
        budget = PromptBudget(
            self.costs, TARGET_S, first_token_weight, device.step_tokens, spares_running=False
        )
        self.scheduler = Scheduler(
            limits,
            pages,
            make_queue(policy, AGEING_S, pages.num_cached_tokens, device.step_tokens),
            None,
            lambda request: None,
            lambda slot: None,
            prompt_budget=budget.tokens,
        )
        self.answers: dict[int, Answer] = {}

    def run(self, arrivals: Sequence[tuple[float, int, int]], rng: random.Random) -> float:
        """Serves requests (seconds, prompt tokens, new tokens) to their end; returns that time."""
        waiting = iter(sorted(arrivals))
        following = next(waiting, None)
        now, num_added = 0.0, 0
        flying: tuple[int, Plan] | None = None
        last_end_s = 0.0
        while following is not None or flying is not None or self.scheduler.num_requests:
            while following is not None and following[0] <= now:
                self._add(num_added, *following, rng)
                num_added += 1
                following = next(waiting, None)
            plan = self.scheduler.plan(now)
            begun = (self.scheduler.launch(plan), plan) if len(plan) else None
            if flying is not None:
                took_s = self._device.step_s(flying[1])
                last_end_s = max(last_end_s, now) + took_s if took_s else last_end_s
                now = last_end_s
                self._end(*flying, now, took_s)
            elif begun is None and following is not None:
                now = last_end_s = following[0]
            flying = begun
        return now

    def _end(self, number: int, plan: Plan, now: float, took_s: float) -> None:
        self.scheduler.commit(number, plan)
        if plan.num_chunk_tokens >= MIN_MEASURED_TOKENS:
            if not plan.decodes or not self.costs.local_tokens_per_s:
                self.costs.observe_local(plan.num_chunk_tokens, took_s)
            if plan.decodes:
                self.costs.observe_beside(plan.num_chunk_tokens, took_s)
        elif plan.decodes:
            self.costs.observe_decode(took_s)
        drawn = [*plan.decodes, *(item.request for item in plan.drawing_chunks)]
        for request in drawn:
            if request.state is State.FINISHED:
                continue
            request.tokens.append(7)
            timeline = request.timeline
            if timeline.first_token_s is None:
                timeline.first_token_s = now - timeline.submitted_at
            self.answers[request.arrival].times_s.append(now)
            if request.num_generated >= request.max_tokens:
                self.scheduler.finish(request)

    def _add(
        self, number: int, at_s: float, num_prompt: int, num_new: int, rng: random.Random
    ) -> None:
        self.answers[number] = Answer(at_s, [])
        request = Request(
            key=RequestKey(0, str(number), 1),
            sample=0,
            tokens=[rng.randrange(50_000) for _ in range(num_prompt)],
            num_prompt_tokens=num_prompt,
            params=SamplingParams(),
            stop=StopCriteria(),
            max_tokens=num_new,
            eos_token_ids=frozenset(),
            seed=0,
            top_logprobs=None,
            keys=PageKeys(bytes(32), PAGE),
            arrival=number,
            first_token_deadline=math.inf,
            deadline=math.inf,
            timeline=Timeline(submitted_at=at_s),
        )
        self.scheduler.add(request)


def arrivals_of(
    options: argparse.Namespace, rng: random.Random
) -> Iterator[tuple[float, int, int]]:
    """The requests: all at once, or by chance at a mean rate."""
    at_s = 0.0
    for _ in range(options.requests):
        if options.rate:
            at_s += rng.expovariate(options.rate)
        low, high = options.prompt if len(options.prompt) > 1 else 2 * options.prompt
        yield at_s, rng.randint(low, high), options.tokens


def measure(name: str, policy: PolicyName, weight: float, options: argparse.Namespace) -> Row:
    """Runs one burst behind some requests that show the engine its own rates."""
    rng = random.Random(1)
    simulation = Simulation(
        DEVICES[name], policy, weight, options.max_running, options.shared_step_tokens
    )
    simulation.run([(0.0, 2 * DEVICES[name].chunk_tokens, 64)] * 4, rng)
    simulation.answers.clear()
    end_s = simulation.run(list(arrivals_of(options, random.Random(2))), rng)
    answers = list(simulation.answers.values())
    firsts = [1e3 * (answer.times_s[0] - answer.sent_s) for answer in answers]
    gaps = [
        1e3 * (later - earlier)
        for answer in answers
        for earlier, later in zip(answer.times_s, answer.times_s[1:], strict=False)
    ]
    return Row(
        name,
        policy,
        weight,
        options.requests,
        statistics.median(firsts),
        percentile(firsts, 0.99),
        percentile(gaps, 0.5),
        percentile(gaps, 0.99),
        sum(len(answer.times_s) for answer in answers) / end_s,
    )


@harness.part
def burst(run: Run) -> None:
    """All models, policies and weights."""
    options = run.options
    for name, policy, weight in product(options.model, options.policy, options.first_token_weight):
        run.row(measure(name, policy, weight, options))


if __name__ == "__main__":
    sys.exit(harness.main())
