"""Which numbers of workers meet the targets at a demand: the cost model of admission, for a fleet.

prefill   prompts wait for one of n workers: Erlang's probability to wait, an exponential tail;
          where gateways refuse what would be late, the others wait less (Boots and Tijms, 1999)
decode    answers share a worker whose steps slow with their number n, so n is negative binomial;
          one more than the targets allow waits (Halfin and Whitt's probability), or slows all
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.common.capacity import first_token_s, requests_within

ATTAINED = 0.97
"""Share of requests that each role is to serve within its target, by the forecast."""
ADMITTED = 0.99
"""The same of prefill workers where gateways enforce targets: refusals keep their queues short, so
that one percent more costs few workers."""
HEADROOM = 0.95
"""Share of the target between tokens that admission lets steps take."""
_DRAIN_S = 60.0
MAX_WORKERS = 4096


class Counts(NamedTuple):
    """Numbers of workers of one model."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def within(self, most: int, least_decode: int = 1) -> Counts:
        """As these, with at most so many: both roles lack alike, and one decodes."""
        if self.total <= most:
            return self
        kept = max(1, round(most * self.prefill / self.total)) if most > 1 else 0
        kept = min(kept, max(0, most - least_decode))
        return Counts(kept, most - kept)

    def __str__(self) -> str:
        return f"{self.prefill} prefill and {self.decode} decode workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    first_token_s: float
    inter_token_s: float
    is_enforced: bool = False
    """Whether gateways refuse requests that would miss them: then prompts that alone take longer
    than the target are no load either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of one worker, as the mesh measures it."""

    prefill_tokens_per_s: float
    step_base_s: float
    step_request_s: float

    @property
    def is_known(self) -> bool:
        return self.prefill_tokens_per_s > 0 and self.step_base_s + self.step_request_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What arrives for a model, refused requests included."""

    requests_per_s: float
    sizes: Sequence[tuple[float, float]]
    """Prompt tokens that a worker must compute, and the share of requests with so many."""
    output_tokens: float
    """Mean of an answer."""
    queued_tokens: float = 0.0
    """Prompt tokens that wait already, at the gateway and at workers."""

    @property
    def prompt_tokens(self) -> float:
        return sum(tokens * share for tokens, share in self.sizes)

    def times(self, factor: float) -> Demand:
        return replace(self, requests_per_s=self.requests_per_s * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Least numbers of workers, and what decided them."""

    prefill: int
    decode: int
    why: str

    @property
    def total(self) -> int:
        return self.prefill + self.decode


def late_share(demand: Demand, speed: Speed, targets: Targets, workers: int) -> float:
    """Share of the requests that a worker could serve in time whose first token would be late, or
    which gateways refuse for that. Prompts that alone take longer than the target are left out,
    since no number of workers helps them; they count as load.
    """
    rate = speed.prefill_tokens_per_s
    mean, squares = _computed(demand, speed, targets)
    busy = _busy(demand, speed, targets, workers)
    if workers <= 0 or busy >= workers:
        return 1.0
    if mean <= 0:
        return 0.0
    squares /= mean**2
    waits = _waiting_share(workers, busy)
    # Of those that wait: mean of the rest of the services ahead, of a server that is n at once.
    tail_s = 0.5 * squares * (mean / rate) / (workers - busy)
    late = total = 0.0
    own_s = first_token_s(0.0, [tokens for tokens, _ in demand.sizes], rate).tolist()
    for (_, share), computing_s in zip(demand.sizes, own_s, strict=True):
        left_s = targets.first_token_s - computing_s
        if left_s <= 0:
            continue
        total += share
        late += share * waits * math.exp(-left_s / tail_s)
    late = late / total if total else 0.0
    if not targets.is_enforced:
        return late
    # Customers who leave after a time, of a queue that all would have joined.
    return (1 - busy / workers) * late / (1 - late * busy / workers)


def meets_first_token(demand: Demand, speed: Speed, targets: Targets, workers: int) -> bool:
    attained = ADMITTED if targets.is_enforced else ATTAINED
    return late_share(demand, speed, targets, workers) <= 1 - attained


def room_of(speed: Speed, targets: Targets) -> float:
    """Requests that one decode worker may have at a time; 0: even one would be too slow."""
    pace_s = targets.inter_token_s * (HEADROOM if targets.is_enforced else 1.0)
    return float(requests_within(pace_s, speed.step_base_s, speed.step_request_s))


def crowded_share(demand: Demand, speed: Speed, targets: Targets, workers: int) -> float:
    """Share of the requests for which decode workers have no room: steps are slower than the target
    or, where gateways enforce it, requests are held until their first token would be late.
    """
    room = workers * room_of(speed, targets)
    running, variance = _running(demand, speed, workers)
    if room <= 0 or running >= room:
        return 1.0
    if running <= 0:
        return 0.0
    free = (room - running) / math.sqrt(variance)
    below = 0.5 * math.erfc(-free / math.sqrt(2))
    if not targets.is_enforced:
        return 1 - below
    density = math.exp(-free * free / 2) / math.sqrt(2 * math.pi)
    waits = density / (density + free * below)
    # Places become free at the pace at which full workers end answers.
    mean, _ = _computed(demand, speed, targets)
    left_s = max(0.0, targets.first_token_s - mean / speed.prefill_tokens_per_s)
    answer_s = max(demand.output_tokens * targets.inter_token_s, 1e-9)
    return waits * math.exp(-(room - running) * left_s / answer_s)


def meets_inter_token(demand: Demand, speed: Speed, targets: Targets, workers: int) -> bool:
    return crowded_share(demand, speed, targets, workers) <= 1 - ATTAINED


def step_s(demand: Demand, speed: Speed, workers: int) -> float:
    """Mean time between tokens on a decode worker at this demand; infinite: it would never be
    served.
    """
    running, _ = _running(demand, speed, workers)
    return speed.step_base_s + speed.step_request_s * running / max(workers, 1)


def _running(demand: Demand, speed: Speed, workers: int) -> tuple[float, float]:
    """Mean and variance of the number of answers that are generated at a time. On one worker p(n)
    is proportional to the product over k <= n of asked * step(k) / k, as in any queue that shares
    its server, whatever the lengths of answers.
    """
    if workers <= 0:
        return math.inf, math.inf
    asked = demand.requests_per_s * demand.output_tokens / workers
    growth = 1 - asked * speed.step_request_s
    if growth <= 0:
        return math.inf, math.inf
    mean = workers * asked * (speed.step_base_s + speed.step_request_s) / growth
    return mean, mean / growth


def need(demand: Demand, speed: Speed, targets: Targets) -> Need:
    """The least numbers that meet the targets."""
    busy = _busy(demand, speed, targets, MAX_WORKERS)
    prefill = max(1, math.floor(busy))
    while prefill < MAX_WORKERS and not meets_first_token(demand, speed, targets, prefill):
        prefill += 1
    room = room_of(speed, targets)
    decode = 1
    if room > 0:
        while decode < MAX_WORKERS and not meets_inter_token(demand, speed, targets, decode):
            decode += 1
    why = (
        f"{demand.requests_per_s:.2f} requests/s of {demand.prompt_tokens:,.0f} prompt tokens keep "
        f"{busy:.1f} prefill workers busy; answers of {demand.output_tokens:,.0f} tokens have "
        f"{1000 * step_s(demand, speed, decode):.0f} ms between tokens on {decode} decode "
        f"worker{'s' if decode > 1 else ''}"
    )
    if room <= 0:
        why += f"; no number meets {targets.inter_token_s:g} s between tokens"
    return Need(prefill=prefill, decode=decode, why=why)


def _busy(demand: Demand, speed: Speed, targets: Targets, workers: int) -> float:
    """Workers that prompts keep busy, and those that the queue, beyond what meets the target,
    needs to be gone within `_DRAIN_S`.
    """
    rate = speed.prefill_tokens_per_s
    over = max(0.0, demand.queued_tokens - targets.first_token_s * workers * rate)
    mean, _ = _computed(demand, speed, targets)
    return (demand.requests_per_s * mean + over / _DRAIN_S) / rate


def _computed(demand: Demand, speed: Speed, targets: Targets) -> tuple[float, float]:
    """Means of the prompt tokens that are computed for a request, and of their squares."""
    most = targets.first_token_s * speed.prefill_tokens_per_s
    sizes = [one for one in demand.sizes if not targets.is_enforced or one[0] <= most]
    mean = sum(tokens * share for tokens, share in sizes)
    return mean, sum(tokens * tokens * share for tokens, share in sizes)


def _waiting_share(workers: int, busy: float) -> float:
    """Erlang C: the share of arrivals that find all workers busy."""
    if busy <= 0:
        return 0.0
    # Erlang B by its recursion, which neither overflows nor cancels.
    blocked = 1.0
    for count in range(1, workers + 1):
        blocked = busy * blocked / (count + busy * blocked)
    return blocked / (1 - busy / workers * (1 - blocked))
