"""Whether drafts pay, and how many: by what steps took and what came of them, as measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from weft.engine.scheduler.acceptance import Acceptance
from weft.engine.scheduler.plan import Plan, Run
from weft.engine.scheduler.state import Request

DEPTHS = (0, 1, 2, 3, 4, 5, 7)
"""Numbers of drafts that are compared; 0 = none."""
NUM_TIMES = 9
"""Newest steps of a kind whose median counts."""
NUM_FIRST_TIMES = 5
"""Steps of each kind that are run before the first choice; one more, the first, does not count."""
LEAST_TIMES = 2
"""Without so many a kind is not chosen."""
EXPLORE_FROM = 0.9
"""Of the best rate so far: with less than that from some drafts, more are not tried at first."""
PROBE_EVERY = 100
"""Of so many steps one is of another kind than the best."""
HYSTERESIS = 1.03
"""Another kind must be so much faster to be changed to."""
DECAY = 0.995
"""Of what is known of the acceptance of all requests, with each one's run."""
OWN_DECAY = 0.93
"""Of what is known of one request's: it tells its kind of text."""
OWN_WEIGHT = 4.0
"""Runs that all requests together count for when one begins."""
MOST_ASKED = 16
"""Requests whose acceptance is looked at before a step; more would take longer than they tell."""


class _Bucket:
    """Steps of about as many requests."""

    def __init__(self, depths: Sequence[int]) -> None:
        self.times: dict[int, deque[float]] = {d: deque(maxlen=NUM_TIMES) for d in depths}
        self.best = 0
        self.num_steps = 0
        self.num_probes = 0
        self.exploring: int | None = 0
        """Drafts whose time is being measured for the first time; None: all are that may pay."""
        self._is_first = True

    def note(self, depth: int, duration_s: float) -> None:
        """A step has taken so long. The first of a kind is not like those that follow."""
        if depth != self.exploring:
            self.num_probes += depth != self.best
            self.times[depth].append(duration_s)
        elif self._is_first:
            self._is_first = False
        else:
            self.times[depth].append(duration_s)

    def explore(self, expected: Sequence[float]) -> None:
        """Goes on to more drafts once some are measured, unless more will hardly pay.

        Args:
            expected: Tokens of a step, by its number of drafts.
        """
        if self.exploring is None or len(self.times[self.exploring]) < NUM_FIRST_TIMES:
            return
        rates = {d: expected[d] / median(times) for d, times in self.times.items() if times}
        deeper = [depth for depth in self.times if depth > self.exploring]
        may_pay = rates[self.exploring] >= EXPLORE_FROM * max(rates.values())
        self.exploring, self._is_first = (deeper[0] if deeper and may_pay else None), True


class MeasuredGate:
    """Chooses the number of drafts that brings the most tokens a second.

    Steps are told apart by their number of requests (powers of two). Each kind is run a few times;
    then the best one is, and now and then another one, since what drafts are worth changes. What
    they are worth to a step is what they were worth to its requests.

    Args:
        max_drafts: At most so many.
    """

    def __init__(self, max_drafts: int) -> None:
        self._depths = [*(depth for depth in DEPTHS if depth < max_drafts), max_drafts]
        self._acceptance = Acceptance(max_drafts, DECAY)
        self._buckets: dict[int, _Bucket] = {}
        self._has_prompts = False
        """The last step brought prompts too, and the next is likely to: such times tell nothing."""

    def max_drafts(self, requests: Sequence[Request]) -> int:
        """See `DraftGate.max_drafts`."""
        bucket = self._bucket(len(requests))
        if self._has_prompts:
            return bucket.best
        if bucket.exploring is not None:
            return bucket.exploring
        if bucket.num_steps % PROBE_EVERY == PROBE_EVERY - 1:
            # The next ones only: far ones may take many times as long.
            near = self._depths.index(bucket.best)
            others = [*self._depths[max(0, near - 1) : near], *self._depths[near + 1 : near + 2]]
            return others[bucket.num_probes % len(others)]
        self._choose(bucket, requests[:MOST_ASKED])
        return bucket.best

    def observe(self, plan: Plan, runs: Sequence[Run], duration_s: float) -> None:
        """See `DraftGate.observe`."""
        num_requests = len(plan.decodes) + len(plan.verifies)
        if not num_requests:
            return
        for item, run in zip(plan.verifies, runs, strict=True):
            num_accepted = max(0, len(run.tokens) - 1)
            own = self._own(item.request)
            own.observe(num_accepted, item.max_drafts)
            self._acceptance.observe(num_accepted, item.max_drafts)
        self._has_prompts = bool(plan.chunks)
        depth = max((item.max_drafts for item in plan.verifies), default=0)
        bucket = self._bucket(num_requests)
        bucket.num_steps += 1
        if self._has_prompts or depth not in bucket.times:
            return
        bucket.note(depth, duration_s)
        bucket.explore(self._acceptance.expected_tokens())

    def _choose(self, bucket: _Bucket, requests: Sequence[Request]) -> None:
        """Takes the best number of drafts for a step of these requests."""
        drafted = [request for request in requests if request.speculates]
        tokens = [self._own(request).expected_tokens() for request in drafted]
        num_others = len(requests) - len(drafted)
        rates = {
            depth: (num_others + sum(expected[depth] for expected in tokens)) / median(times)
            for depth, times in bucket.times.items()
            if len(times) >= LEAST_TIMES
        }
        best = max(rates, key=rates.__getitem__)
        if rates[best] > HYSTERESIS * rates[bucket.best]:
            bucket.best = best

    def _own(self, request: Request) -> Acceptance:
        if request.acceptance is None:
            request.acceptance = self._acceptance.of_one(OWN_DECAY, OWN_WEIGHT)
        return request.acceptance

    def _bucket(self, num_requests: int) -> _Bucket:
        key = num_requests.bit_length()
        found = self._buckets.get(key)
        if found is None:
            found = self._buckets[key] = _Bucket(self._depths)
        return found

    def depths(self) -> dict[int, int]:
        """Drafts of a request, by the number of requests in a step from which on that holds."""
        return {1 << key >> 1: bucket.best for key, bucket in sorted(self._buckets.items())}
