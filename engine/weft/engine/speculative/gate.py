"""Whether drafts pay, and how many: by what steps took and what came of them, as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from weft.engine.config import MAX_TREE_NODES, MAX_TREE_REQUESTS
from weft.engine.scheduler.acceptance import Acceptance
from weft.engine.scheduler.plan import NO_DRAFTS, DraftShape, Plan, Run, VerifyItem, parents_of
from weft.engine.scheduler.state import Request
from weft.engine.speculative.step_times import MEASURED_WEIGHT, StepTaken, StepTimes, size_class

DEPTHS = (0, 1, 2, 3, 4, 5, 7)
"""Numbers of drafts of chains that are compared; 0 = none."""
TREES = ((7, 5), (15, 6), (MAX_TREE_NODES, 6))
"""Nodes and depths of trees that are compared with them; of more nodes none is less deep."""
TREE_GAINS = (1.1, 1.3, 1.4)
"""Accepted drafts of each beside those of a chain as deep, before any was run
(docs/decisions/0027)."""
GAIN_WEIGHT = 20.0
"""Drafts that such a number counts for at first."""
FIRST_ALLOWANCE = 8.0
"""Steps whose time may be lost to trying before anything is known."""
ALLOWANCE_SHARE = 0.01
"""Of steps' time may be lost to trying later."""
LEAST_LOSS = 0.1
"""Of a step's time: so much a trial counts at least as lost."""
PROBE_EVERY = 100
"""After so many steps a neighbour of the best is run, if the allowance holds it."""
LOOK_EVERY = 4
"""Steps between two looks at what is best, unless something is being tried or requests are new."""
SETTLED_AFTER = 8
"""Steps after which the contexts of a step's requests are about as long as in those before."""
FIRST_GAIN = 1.04
"""Drafts must bring so many times what is had without them to be begun."""
HYSTERESIS = 1.02
"""Another number of drafts must be so much faster to be changed to."""
UNSURE = 0.08
"""By such a part what was measured once may be better; if n times, by 1 / sqrt(n) of that."""
DECAY = 0.995
"""Of what is known of the acceptance of all requests, with each one's run."""
OWN_DECAY = 0.95
"""Of what is known of one request's: it tells its kind of text."""
OWN_WEIGHT = 6.0
"""Runs that all requests together count for when one begins."""
MOST_ASKED = 16
"""Requests whose acceptance is looked at before a step; more would take longer than they tell."""


def depths_up_to(max_drafts: int) -> list[int]:
    """Numbers of drafts that are compared, if there may be at most so many."""
    return [*(depth for depth in DEPTHS if depth < max_drafts), max_drafts]


def tree_shapes(width: int) -> list[DraftShape]:
    """Trees that are compared, of that many children a node; none for chains."""
    if width == 1:
        return []
    shapes = [DraftShape(nodes, depth, width) for nodes, depth in TREES]
    return [shape for shape in shapes if shape.num_drafts <= shape.num_grown]


@dataclass(slots=True)
class _Gain:
    """What a tree brings beside a chain as deep: accepted drafts of both."""

    accepted: float
    expected: float = GAIN_WEIGHT

    @property
    def factor(self) -> float:
        """At least a chain's."""
        return max(1.0, self.accepted / self.expected)

    def note(self, accepted: float, expected: float) -> None:
        """Of a request in a step."""
        self.accepted = DECAY * self.accepted + accepted
        self.expected = DECAY * self.expected + expected


@dataclass(slots=True)
class _Choice:
    """For steps of about as many requests."""

    best: DraftShape = NO_DRAFTS
    num_steps: int = 0
    num_probes: int = 0
    look_at: int = 0
    """Before this step it is seen again what is best."""


@dataclass(slots=True)
class _Trial:
    """A step that is run to learn from it."""

    shape: DraftShape
    expected_s: float
    """What its tokens would take with what is best."""
    chosen_at: int
    """Steps that had ended then."""

    def is_under_way(self, num_ended: int) -> bool:
        """Its step has not ended, be another one before it. A step may also come to nothing, or
        with fewer drafts."""
        return num_ended <= self.chosen_at + 1


class MeasuredGate:
    """Chooses the drafts that bring the most tokens a second: how many, and as a chain or a tree.

    What drafts are worth to a step is what they were worth to its requests. What they cost is
    measured where it may pay, by what is predicted; what trying loses is kept to a share of all.

    Args:
        max_drafts: Of a chain, at most.
        width: Of trees; 1: there are none.
    """

    def __init__(self, max_drafts: int, width: int = 1) -> None:
        trees = tree_shapes(width)
        self._chains = [DraftShape.chain(depth) for depth in depths_up_to(max_drafts)]
        self._shapes = [*self._chains, *trees]
        gains = zip(trees, TREE_GAINS, strict=False)
        self._gains = {shape: _Gain(gain * GAIN_WEIGHT) for shape, gain in gains}
        deepest = max(shape.depth for shape in self._shapes)
        self._acceptance = Acceptance(deepest, DECAY)
        self._times = StepTimes()
        self._choices: dict[int, _Choice] = {}
        self._allowance_s = 0.0
        """That may be lost to trials."""
        self._trials: dict[DraftShape, _Trial] = {}
        """Whose steps have not ended."""
        self._num_ended = 0
        """Steps."""
        self._num_settled = 0
        """Steps since many of the requests were new."""
        self._has_prompts = False
        """The last step brought prompts too, and the next is likely to: such times tell nothing."""

    def shape(self, requests: Sequence[Request]) -> DraftShape:
        """See `DraftGate.shape`."""
        num_requests = len(requests)
        choice = self._choice(num_requests)
        if self._has_prompts:
            return choice.best
        speculating = [request for request in requests if request.speculates]
        asked = speculating[:MOST_ASKED]
        if not asked or not self._times.is_measured(num_requests, NO_DRAFTS):
            return NO_DRAFTS
        num_new = sum(request.acceptance is None for request in asked)
        self._num_settled = 0 if 4 * num_new > len(asked) else self._num_settled + 1
        if num_new or choice.num_steps >= choice.look_at:
            num_stood_for = num_requests * len(asked) / len(speculating)
            known = [self._own(request) for request in asked]
            worth = _Worth(known, num_stood_for, self._gains)
            self._choose(choice, worth, num_requests)
            if trial := self._trial_of(choice, worth, num_requests):
                self._trials[trial.shape] = trial
                return trial.shape
            choice.look_at = choice.num_steps + LOOK_EVERY
        return choice.best

    def observe(self, plan: Plan, runs: Sequence[Run], duration_s: float) -> None:
        """See `DraftGate.observe`."""
        self._num_ended += 1
        num_requests = len(plan.decodes) + len(plan.verifies)
        if not num_requests:
            return
        for index, (item, run) in enumerate(zip(plan.verifies, runs, strict=True)):
            if item.tree is not None:
                self._observe_tree(item, run, plan.drafts[index])
            elif not item.request.is_draft_behind:
                num_accepted = max(0, len(run.tokens) - 1)
                self._note_chain(item.request, num_accepted, item.max_drafts, run.num_drafts)
        self._has_prompts = bool(plan.chunks)
        if self._has_prompts or duration_s <= 0:
            return
        shapes = [item.tree or DraftShape.chain(item.max_drafts) for item in plan.verifies]
        num_drafts = sum(run.num_drafts for run in runs)
        shape = max(shapes, default=NO_DRAFTS)
        if shape.is_tree and shape not in self._gains:
            return  # Cut short by the end of its request, of which there are many kinds.
        step = StepTaken(num_requests, shape, num_drafts, duration_s, plan.drafting_s)
        self._times.note(step, is_settled=self._num_settled >= SETTLED_AFTER)
        self._choice(num_requests).num_steps += 1
        self._count_loss(step)

    def _note_chain(
        self, request: Request, num_accepted: int, max_drafts: int, num_drafts: int
    ) -> None:
        self._own(request).observe(num_accepted, max_drafts, num_drafts)
        if not request.lacks_draft_room:
            self._acceptance.observe(num_accepted, max_drafts, num_drafts)

    def _observe_tree(self, item: VerifyItem, run: Run, drafts: Sequence[int]) -> None:
        """Of a tree it is also known how far its most likely chain was right."""
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
        """Rows are cheap where there are few of them."""
        return self._shapes if num_requests <= MAX_TREE_REQUESTS else self._chains

    def _choose(self, choice: _Choice, worth: _Worth, num_requests: int) -> None:
        """Takes the best of what was measured."""
        times = self._times
        rates = {
            shape: worth.tokens(shape) / times.seconds(num_requests, shape, worth.share)
            for shape in self._options(num_requests)
            if times.is_measured(num_requests, shape)
        }
        if choice.best not in rates:
            choice.best = NO_DRAFTS
        best = max(rates, key=rates.__getitem__)
        gain = HYSTERESIS if choice.best.num_drafts else FIRST_GAIN
        if not best.num_drafts:
            gain = 1.0  # Drafts end as soon as they do not pay.
        if rates[best] > gain * rates[choice.best]:
            choice.best = best

    def _trial_of(self, choice: _Choice, worth: _Worth, num_requests: int) -> _Trial | None:
        """What to learn about in the next step, if anything that can be afforded."""
        times = self._times
        best_s = times.seconds(num_requests, choice.best, worth.share) / worth.tokens(choice.best)

        def trial(shape: DraftShape) -> _Trial | None:
            pending = self._trials.get(shape)
            if pending is not None and pending.is_under_way(self._num_ended):
                return None
            expected_s = best_s * worth.tokens(shape)
            seconds = times.seconds(num_requests, shape, worth.share)
            loss_s = max(seconds - expected_s, LEAST_LOSS * seconds)
            if loss_s > self._allowance_s:
                return None
            return _Trial(shape, expected_s, self._num_ended)

        if found := self._hope(choice, worth, num_requests):
            shape, rate = found
            if rate * best_s > 1 and (first := trial(shape)):
                return first
        is_due = choice.num_steps >= PROBE_EVERY * (choice.num_probes + 1)
        if not is_due or self._num_settled < SETTLED_AFTER:
            return None
        # The next ones only: far ones may take many times as long.
        options = self._options(num_requests)
        near = options.index(choice.best)
        others = [*options[max(0, near - 1) : near], *options[near + 1 : near + 2]]
        return trial(others[choice.num_probes % len(others)])

    def _hope(
        self, choice: _Choice, worth: _Worth, num_requests: int
    ) -> tuple[DraftShape, float] | None:
        """Of what is little known, the drafts that may be the best, and their tokens a second if
        they are."""
        times, found = self._times, None
        for shape in self._options(num_requests):
            weight = times.weight(num_requests, shape)
            num_rows = round(num_requests * (1 + shape.num_drafts * worth.share))
            if shape == choice.best or not times.is_near(num_rows):
                continue
            if weight >= MEASURED_WEIGHT and self._num_settled < SETTLED_AFTER:
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
        trial = self._trials.pop(step.shape, None)
        if trial is not None and trial.is_under_way(self._num_ended - 1):
            loss_s = max(duration_s - trial.expected_s, LEAST_LOSS * duration_s)
            self._allowance_s = max(self._allowance_s - loss_s, 1e-9)
            choice = self._choice(step.num_requests)
            choice.num_probes = choice.num_steps // PROBE_EVERY
        most_s = FIRST_ALLOWANCE * self._times.seconds(step.num_requests, NO_DRAFTS)
        self._allowance_s = min(self._allowance_s, most_s)

    def _own(self, request: Request) -> Acceptance:
        if request.acceptance is None:
            request.acceptance = self._acceptance.of_one(OWN_DECAY, OWN_WEIGHT)
        return request.acceptance

    def _choice(self, num_requests: int) -> _Choice:
        size = size_class(num_requests)
        if self._gains and size <= MAX_TREE_REQUESTS < num_requests:
            size = MAX_TREE_REQUESTS + 1  # What is best for fewer may be a tree.
        return self._choices.setdefault(size, _Choice())

    def depths(self) -> dict[int, int]:
        """Drafts of a request, by the number of requests in a step from which on that holds."""
        return {size: choice.best.num_drafts for size, choice in sorted(self._choices.items())}


def _first_accepted(drafts: Sequence[int], accepted: Sequence[int]) -> tuple[int, bool]:
    """How many drafts of a tree's most likely chain were right, and whether that is known: where
    the chain leaves the tree it need not be wrong.

    Args:
        drafts: The tree; of siblings the more likely comes first.
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
    """What drafts bring to a request of a step, on average.

    Args:
        known: The acceptance of some that may be drafted for.
        num_requests: They, and their share of those that may not.
        gains: Of trees.
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
        """Of the drafts that are asked for, those that are made."""

    def tokens(self, shape: DraftShape) -> float:
        """With such drafts asked for."""
        tokens = self._tokens[shape.depth]
        gain = self._gains.get(shape)
        return tokens if gain is None else 1 + gain.factor * (tokens - 1)
