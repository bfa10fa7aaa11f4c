"""Chooses the number of drafts from measured step times and acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

from weft.engine.base.config import MAX_TREE_REQUESTS
from weft.engine.base.drafts import DraftShape, depths_up_to, tree_shapes
from weft.engine.base.token_trees import parents_of
from weft.engine.features.speculative.step_times import (
    MEASURED_WEIGHT,
    StepTaken,
    StepTimes,
    size_class,
)
from weft.engine.requests.acceptance import Acceptance
from weft.engine.requests.request import Request
from weft.engine.scheduler.plan import NO_DRAFTS, Plan, Run, VerifyItem
from weft.engine.scheduler.ports import DraftGate

TREE_GAINS = (1.1, 1.3, 1.4)
"""Assumed ratio of the accepted drafts of each tree to those of a chain of equal depth, until trees
have run (docs/decisions/0027).
"""
GAIN_WEIGHT = 20.0
"""Weight of this assumption, in drafts."""
FIRST_ALLOWANCE = 8.0
"""Initial allowance for trials, in multiples of a step's time."""
ALLOWANCE_SHARE = 0.01
"""Share of all steps' time that may be spent on trials."""
PROBE_EVERY = 100
"""The gate tries a neighbour of the best shape after this number of steps, times the number of
steps in a trial, if the allowance covers the trial.
"""
LOOK_EVERY = 4
"""Steps between two evaluations, unless a trial runs or many requests are new."""
RESTS_AFTER = 400
"""If the gate chose no drafts, it evaluates less often after this many steps of one size class."""
RESTING = 16
"""Factor on the distance between evaluations if steps overlap and have had no drafts for long. The
gate then watches only the steps right before an evaluation, because its work is part of the host
work that may limit the speed of such steps.
"""
DIP = 6
"""Number of steps without drafts after steps become small enough for drafts to pay, if steps
overlap. Often steps are small only until a prompt replaces a request that has ended, and switching
drafts on and off costs time that the gate does not measure.
"""
SETTLED_AFTER = 8
"""Steps after which the context lengths of a step's requests count as settled."""
OVERLAPPED_GAIN = 1.15
"""Factor by which drafting must be faster than not drafting before the gate starts it, if steps
overlap. It is larger than `HYSTERESIS` because each change costs time, and because the cost of
drafts is less certain.
"""
OVERLAPPED_LEAST = 1.06
"""Factor by which drafting must stay faster if steps overlap."""
HYSTERESIS = 1.02
"""Factor by which another number of drafts, or none, must be faster before it is chosen."""
UNSURE = 0.08
"""Relative uncertainty of a single measurement; of n measurements, this divided by sqrt(n)."""
DECAY = 0.995
"""Decay per verified request of the acceptance statistics over all requests."""
OWN_DECAY = 0.95
"""Decay of one request's own statistics, which describe its kind of text."""
OWN_WEIGHT = 6.0
"""Weight of the statistics of all requests when a new request begins."""
OVERLAPPED_TRIAL = 4
"""Steps of a trial if steps overlap. Only the inner ones have neighbours of the same kind."""
FIRST_TIMED_AFTER = 12
"""Steps of one size class before the gate times or tries one, if steps overlap. The first steps of
a size are often slow, and drafts would look cheap compared with them.
"""
MAX_ASKED = 16
"""Most requests whose acceptance is evaluated before a step. More would cost more time than they
are worth.
"""


@dataclass(slots=True)
class _Gain:
    """Ratio of the accepted drafts of trees to those of chains of equal depth."""

    accepted: float
    expected: float = GAIN_WEIGHT

    @property
    def factor(self) -> float:
        """At least 1."""
        return max(1.0, self.accepted / self.expected)

    def note(self, accepted: float, expected: float) -> None:
        self.accepted = DECAY * self.accepted + accepted
        self.expected = DECAY * self.expected + expected


@dataclass(slots=True)
class _Choice:
    best: DraftShape = NO_DRAFTS
    num_steps: int = 0
    num_probes: int = 0
    look_at: int = 0
    """Number of the step at which the gate reconsiders the choice."""
    tried_at: dict[DraftShape, int] = field(default_factory=dict)
    """Step of the last trial of each shape."""


@dataclass(slots=True)
class _Trial:
    shape: DraftShape
    expected_s: float
    """Expected time for as many tokens with the best shape."""
    num_left: int
    """Steps of the trial that are still to be planned."""
    ends_at: int
    """Number of completed steps at which the trial is over, even if some of its steps were
    cancelled or had fewer drafts.
    """


class MeasuredGate(DraftGate):
    """Chooses the drafts that give the most tokens per second: how many, and as a chain or a tree.

    The gate estimates the benefit of drafts from the past acceptance of the step's requests. It
    measures their cost by trials of shapes that might pay according to predicted step times. Trials
    may lose only a fixed share of the total time.

    Args:
        width: Width of trees; 1: drafts form chains only.
        overlaps: Whether a step is planned and begun before the previous one has ended. Then the
            time between the ends of two steps includes host work for the neighbouring steps, and
            counts only if these are of the same kind.
    """

    def __init__(self, max_drafts: int, width: int = 1, *, overlaps: bool = False) -> None:
        self._overlaps = overlaps
        self._trial_steps = OVERLAPPED_TRIAL if overlaps else 1
        self._recent: tuple[StepTaken | None, StepTaken | None] = (None, None)
        """The last two steps; None for a step whose time is not usable."""
        trees = tree_shapes(width)
        self._chains = [DraftShape.chain(depth) for depth in depths_up_to(max_drafts)]
        self._shapes = [*self._chains, *trees]
        gains = zip(trees, TREE_GAINS, strict=False)
        self._gains = {shape: _Gain(gain * GAIN_WEIGHT) for shape, gain in gains}
        deepest = max(shape.depth for shape in self._shapes)
        self._acceptance = Acceptance(deepest, DECAY)
        self._times = StepTimes(overlaps=overlaps)
        self._choices: dict[int, _Choice] = {}
        self._allowance_s = 0.0
        """Seconds that may be spent on trials."""
        self._trial: _Trial | None = None
        """The trial whose steps have not all ended."""
        self._num_ended = 0
        self._num_resting = 0
        """Steps still to be planned without watching them."""
        self._rested = _Choice(), 0.0
        """The choice for which these steps count, and the allowance that each adds."""
        self._plain: _Choice | None = None
        """The choice that most recently led to a step without drafts."""
        self._num_dipping = 0
        """Steps of other choices that still get no drafts, as `DIP` says."""
        self._num_settled = 0
        """Steps since many of the requests were new."""
        self._has_prompts = False
        """Whether the last step had prompt tokens, so that the next one probably has some too."""

    def shape(self, requests: Sequence[Request]) -> DraftShape:
        num_requests = len(requests)
        choice = self._choice(num_requests)
        if self._num_resting:
            is_dip = self._is_dip(choice)
            if is_dip or not choice.best.num_drafts:
                self._num_resting -= 1
                return NO_DRAFTS
            self._end_rest()
        trial = self._trial
        if trial is not None and trial.num_left and trial.shape in self._options(num_requests):
            trial.num_left -= 1
            return trial.shape
        speculating = [request for request in requests if request.drafts.wanted]
        asked = speculating[:MAX_ASKED]
        if not asked or not self._times.is_measured(num_requests, NO_DRAFTS):
            return NO_DRAFTS
        num_new = sum(request.drafts.acceptance is None for request in asked)
        are_new = 4 * num_new > len(asked)
        self._num_settled = 0 if are_new else self._num_settled + 1
        if are_new or choice.num_steps >= choice.look_at:
            num_stood_for = num_requests * len(asked) / len(speculating)
            known = [self._own(request) for request in asked]
            worth = _Worth(known, num_stood_for, self._gains)
            self._choose(choice, worth, num_requests)
            if trial := self._trial_of(choice, worth, num_requests):
                self._trial = trial
                choice.tried_at[trial.shape] = choice.num_steps
                return trial.shape
            choice.look_at = choice.num_steps + LOOK_EVERY
            if self._rests(choice):
                self._rest(choice, num_requests)
        return NO_DRAFTS if self._is_dip(choice) else choice.best

    def observe(self, plan: Plan, runs: Sequence[Run], duration_s: float) -> None:
        self._num_ended += 1
        self._has_prompts = bool(plan.chunks)
        if self._num_resting and not plan.verifies:
            self._recent = None, None
            return
        step = self._step_of(plan, runs, duration_s)
        self._note_time(step)
        if step is not None:
            self._choice(step.num_requests).num_steps += 1
            self._count_loss(step)
        if self._trial is not None and self._num_ended >= self._trial.ends_at:
            self._trial = None

    def _step_of(self, plan: Plan, runs: Sequence[Run], duration_s: float) -> StepTaken | None:
        num_requests = len(plan.decodes) + len(plan.verifies)
        if not num_requests:
            return None
        # These are the requests whose acceptance `shape` evaluates.
        for index, (item, run) in enumerate(zip(plan.verifies, runs[:MAX_ASKED], strict=False)):
            if item.tree is not None:
                self._observe_tree(item, run, plan.drafts[index])
            elif not item.request.drafts.is_behind:
                num_accepted = max(0, len(run.tokens) - 1)
                self._note_chain(item.request, num_accepted, item.max_drafts, run.num_drafts)
        if self._has_prompts or duration_s <= 0:
            return None
        if plan.is_late is not None:
            return None  # The first step after steps with drafts.
        if not plan.verifies:
            return StepTaken(num_requests, NO_DRAFTS, 0, duration_s, plan.drafting_s)
        shape = max(
            (item.tree for item in plan.verifies if item.tree is not None),
            default=DraftShape.chain(max(plan.most_accepted)),
        )
        num_drafts = sum([run.num_drafts for run in runs])
        if not shape.num_drafts:
            return None
        if shape.is_tree and shape not in self._gains:
            return None  # The end of a request cut the tree to a shape that is not compared.
        return StepTaken(num_requests, shape, num_drafts, duration_s, plan.drafting_s)

    def _note_time(self, step: StepTaken | None) -> None:
        """Records the time of a step. If steps overlap, it records the time of the previous step
        instead, provided that its neighbours on both sides are like it.
        """
        timed = step
        if self._overlaps:
            before, timed = self._recent
            self._recent = timed, step
            if before is None or step is None or timed is None:
                return
            if not (timed.is_like(before) and timed.is_like(step)):
                return
            if self._choice(timed.num_requests).num_steps < FIRST_TIMED_AFTER:
                return
        if timed is not None:
            self._times.note(timed, is_settled=self._num_settled >= SETTLED_AFTER)

    def _note_chain(
        self, request: Request, num_accepted: int, max_drafts: int, num_drafts: int
    ) -> None:
        self._own(request).observe(num_accepted, max_drafts, num_drafts)
        if not request.drafts.lacks_room:
            self._acceptance.observe(num_accepted, max_drafts, num_drafts)

    def _observe_tree(self, item: VerifyItem, run: Run, drafts: Sequence[int]) -> None:
        """Records how many drafts of a tree's most likely chain were right, if that is known."""
        if item.tree is None or not run.tokens or not drafts:
            return
        accepted = run.tokens[:-1]
        is_whole = item.max_drafts == item.tree.num_drafts
        if is_whole and (gain := self._gains.get(item.tree)):
            expected = self._own(item.request).expected_tokens()[item.tree.depth] - 1
            gain.note(len(accepted), expected)
        num_first, is_known = _first_accepted(drafts, accepted)
        depth = item.tree.depth if is_known else num_first
        self._note_chain(item.request, num_first, depth, depth)

    def _options(self, num_requests: int) -> list[DraftShape]:
        return self._shapes if num_requests <= MAX_TREE_REQUESTS else self._chains

    def _choose(self, choice: _Choice, worth: _Worth, num_requests: int) -> None:
        times = self._times
        rates = {
            shape: worth.tokens(shape) / times.seconds(num_requests, shape, worth.share)
            for shape in self._options(num_requests)
            if times.is_known(num_requests, shape)
        }
        if choice.best not in rates:
            choice.best = NO_DRAFTS
        gain = HYSTERESIS
        if self._overlaps and not choice.best.num_drafts:
            gain = OVERLAPPED_GAIN
        if choice.best.num_drafts and self._overlaps:
            rates[NO_DRAFTS] *= OVERLAPPED_LEAST
        best = max(rates, key=rates.__getitem__)
        if not best.num_drafts:
            gain = 1.0  # The gate stops drafting as soon as it does not pay.
        if rates[best] > gain * rates[choice.best]:
            choice.best = best

    def _trial_of(self, choice: _Choice, worth: _Worth, num_requests: int) -> _Trial | None:
        if self._trial is not None or self._has_prompts:
            return None
        if self._overlaps and choice.num_steps < FIRST_TIMED_AFTER:
            return None
        times = self._times
        best_s = times.seconds(num_requests, choice.best, worth.share) / worth.tokens(choice.best)

        def trial(shape: DraftShape) -> _Trial | None:
            expected_s = best_s * worth.tokens(shape)
            seconds = times.seconds(num_requests, shape, worth.share)
            loss_s = self._trial_steps * max(seconds - expected_s, 0.0)
            if loss_s > self._allowance_s:
                return None
            # The previous step may still be running.
            ends_at = self._num_ended + self._trial_steps + 1
            return _Trial(shape, expected_s, self._trial_steps - 1, ends_at)

        if found := self._hope(choice, worth, num_requests):
            shape, rate = found
            if rate * best_s > 1 and (first := trial(shape)):
                return first
        is_due = choice.num_steps >= self._probe_every * (choice.num_probes + 1)
        if not is_due or self._num_settled < SETTLED_AFTER:
            return None
        # Only neighbours of the best shape, and no drafts: distant shapes may be far slower.
        options = self._options(num_requests)
        near = options.index(choice.best)
        others = [*options[max(0, near - 1) : near], *options[near + 1 : near + 2]]
        if choice.best.num_drafts and self._overlaps:
            others = [one for other in others for one in (NO_DRAFTS, other)]
        return trial(others[choice.num_probes % len(others)])

    def _hope(
        self, choice: _Choice, worth: _Worth, num_requests: int
    ) -> tuple[DraftShape, float] | None:
        """Of the shapes with few measurements, the one that could be the best, and its tokens per
        second in that case.
        """
        times, found = self._times, None
        for shape in self._options(num_requests):
            weight = times.weight(num_requests, shape)
            num_rows = round(num_requests * (1 + shape.num_drafts * worth.share))
            if shape == choice.best or not times.is_near(num_rows):
                continue
            if weight >= MEASURED_WEIGHT and self._num_settled < SETTLED_AFTER:
                continue
            # The trial's steps may have had other numbers of requests than it was chosen for.
            tried_at = choice.tried_at.get(shape, -PROBE_EVERY)
            if self._overlaps and choice.num_steps < tried_at + PROBE_EVERY:
                continue
            rate = worth.tokens(shape) / times.seconds(num_requests, shape, worth.share)
            rate *= 1 + UNSURE / sqrt(max(weight, 1.0))
            if found is None or rate > found[1]:
                found = shape, rate
        return found

    def _count_loss(self, step: StepTaken) -> None:
        duration_s = step.duration_s
        if self._allowance_s == 0.0:
            self._allowance_s = FIRST_ALLOWANCE * duration_s
        self._allowance_s += ALLOWANCE_SHARE * duration_s
        # Another step may have been under way when a trial was chosen.
        trial = self._trial
        if trial is not None and trial.shape == step.shape:
            loss_s = max(duration_s - trial.expected_s, 0.0)
            self._allowance_s = max(self._allowance_s - loss_s, 1e-9)
            choice = self._choice(step.num_requests)
            choice.num_probes = choice.num_steps // self._probe_every
        if self._times.is_measured(step.num_requests, NO_DRAFTS):
            most_s = FIRST_ALLOWANCE * self._times.seconds(step.num_requests, NO_DRAFTS)
            self._allowance_s = min(self._allowance_s, most_s)

    @property
    def _probe_every(self) -> int:
        return PROBE_EVERY * self._trial_steps

    def _is_dip(self, choice: _Choice) -> bool:
        """Whether the step's number of requests is probably low only for a moment (`DIP`)."""
        if not choice.best.num_drafts:
            self._plain, self._num_dipping = choice, DIP
        elif self._overlaps and choice is not self._plain and self._num_dipping:
            self._num_dipping -= 1
            return True
        return False

    def _rests(self, choice: _Choice) -> bool:
        """Whether the gate may evaluate less often, because steps have had no drafts for long.
        While requests come and go it may not: then few steps suit trials, so it watches all.
        """
        if not self._overlaps or choice.best.num_drafts or self._trial is not None:
            return False
        is_settled = self._num_settled >= SETTLED_AFTER
        return is_settled and choice.num_steps >= RESTS_AFTER

    def _rest(self, choice: _Choice, num_requests: int) -> None:
        """Stops watching for some steps, which count as if the gate had watched them."""
        self._num_resting = LOOK_EVERY * (RESTING - 1)
        self._rested = choice, ALLOWANCE_SHARE * self._times.seconds(num_requests, NO_DRAFTS)
        self._count_rest(self._num_resting)

    def _end_rest(self) -> None:
        self._count_rest(-self._num_resting)
        self._num_resting = 0

    def _count_rest(self, num_steps: int) -> None:
        choice, allowance_s = self._rested
        choice.num_steps += num_steps
        choice.look_at += num_steps
        self._allowance_s += num_steps * allowance_s

    def _own(self, request: Request) -> Acceptance:
        if request.drafts.acceptance is None:
            request.drafts.acceptance = self._acceptance.of_one(OWN_DECAY, OWN_WEIGHT)
        return request.drafts.acceptance

    def _choice(self, num_requests: int) -> _Choice:
        size = size_class(num_requests)
        if self._gains and size <= MAX_TREE_REQUESTS < num_requests:
            size = MAX_TREE_REQUESTS + 1  # For fewer requests the best shape may be a tree.
        found = self._choices.get(size)
        if found is None:
            found = self._choices[size] = _Choice()
        return found

    def depths(self) -> dict[int, int]:
        return {size: choice.best.num_drafts for size, choice in sorted(self._choices.items())}


def _first_accepted(drafts: Sequence[int], accepted: Sequence[int]) -> tuple[int, bool]:
    """Number of accepted drafts of a tree's most likely chain, and whether the chain ended with a
    wrong draft. That is unknown if the chain reaches the end of the tree.

    Args:
        drafts: The tree. The more likely of two siblings comes first.
        accepted: Tokens of the path that was drawn.
    """
    row, parents = 0, parents_of(drafts)
    for count, token in enumerate([*accepted, None]):
        child = next((i for i, parent in enumerate(parents) if parent == row), None)
        if child is None or drafts[child] != token:
            return count, child is not None
        row = child + 1
    return len(accepted), False


class _Worth:
    """Mean benefit of drafts for one request of a step.

    Args:
        known: Acceptance of a sample of the requests that may get drafts.
        num_requests: Number of the step's requests that the sample represents, including a
            proportional share of those that may not get drafts.
    """

    def __init__(
        self,
        known: Sequence[Acceptance],
        num_requests: float,
        gains: Mapping[DraftShape, _Gain],
    ) -> None:
        self._gains = gains
        columns = zip(*(acceptance.expected_tokens() for acceptance in known), strict=True)
        self._tokens: list[float] = [
            1 + (sum(column) - len(known)) / num_requests for column in columns
        ]
        self.share = sum(acceptance.share for acceptance in known) / num_requests
        """Expected share of the requested drafts that the drafter makes."""

    def tokens(self, shape: DraftShape) -> float:
        """Expected tokens per step with drafts of this shape."""
        tokens = self._tokens[shape.depth]
        gain = self._gains.get(shape)
        return tokens if gain is None else 1 + gain.factor * (tokens - 1)
