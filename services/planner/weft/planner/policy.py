"""Decides how many workers of each role a model should have. It reads no clock and sends nothing.

demand of the last minute misses with what is there          -> more, at once
the worst demand of a window would be met with one less      -> less
some time has passed without a change      -> its arrivals decide once more, more precisely, and are
                                              accepted: only a load that surely differs changes more
one role has too many and the other too few                  -> roles change, at once
the workers there surely suffice with a role each            -> they are apart; else, at once, not
no data | a change had no effect | somebody else changed it  -> nothing changes, and it is told
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from weft.planner.forecast import (
    Counts,
    Demand,
    Need,
    Speed,
    Targets,
    meets_first_token,
    meets_inter_token,
    need,
)
from weft.planner.recent import Lengths

_AGAIN = 30
"""After a doubt, workers get a role each only when they have sufficed for so many times as long."""

AlarmName = Literal["no_data", "no_effect", "foreign_edit", "over_budget", "uneven"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How fast a plan follows, in seconds."""

    demand_s: tuple[float, ...] = (10.0, 20.0, 40.0, 90.0, 240.0)
    """Arrivals of so long are looked at: of any of them for more workers, of the longest for
    fewer."""
    hold_s: float = 120.0
    """Demand must have been low for so long before there are fewer, or workers get a role each."""
    role_calm_s: float = 60.0
    """The same before a worker of a role that has too many changes to the other."""
    effect_s: float = 600.0
    """Time in which a change must be seen."""
    silent_s: float = 30.0
    """Age from which what is known of the mesh is no data."""
    sureness: float = 4.0
    """Standard deviations of counted arrivals by which demand is taken to be lower before it makes
    more workers necessary: arrivals scatter."""
    caution: float = 2.5
    """The same by which it is taken to be higher before fewer are enough."""
    reserve: float = 0.5
    """The same by which it is taken to be higher to say how many more."""
    settle_s: float = 600.0
    """Time without a change after which its load is accepted. Else steady load that is near a
    border would pass it at some time, however sure one is each time: it is looked at for ever."""
    least_prefill: int = 1
    least_decode: int = 1
    budget: int = 0
    """Most workers of all roles; 0 = no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What is known of one model at a time."""

    time_s: float
    """Of the newest news of the mesh, on the planner's clock."""
    requests: int
    """That have arrived since a fixed time, refused ones included."""
    lengths: tuple[Lengths, ...]
    """Of requests lately, those by the longest memory first."""
    queued_tokens: float
    prefill: int
    """Workers of the role, starting ones included."""
    decode: int
    ready: int
    """Workers of both roles that serve."""
    speed: Speed
    able: int = 0
    """Workers whose role may change."""
    both: int = 0
    """Of these, those that have both roles now. They are among the decode workers."""
    ordered: Counts | None = None
    """Numbers that are ordered now, whoever has ordered them; None: it is not known."""
    own_order: Counts | None = None
    """This planner's last order; None: it has given none."""
    worst_share: float = 0.0
    """KV pages in use at the fullest worker, as a share."""
    mean_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    name: AlarmName
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a model should have."""

    prefill: int
    decode: int
    why: str
    alarms: tuple[Alarm, ...] = ()
    apart: bool = True
    """Whether workers that can have both roles get one each. Of both roles, they do whatever comes,
    though prompts then delay the tokens of answers."""

    @property
    def counts(self) -> Counts:
        return Counts(self.prefill, self.decode)

    @property
    def total(self) -> int:
        return self.prefill + self.decode


@dataclass(slots=True)
class _Past:
    """What was needed at a time, at the demand's higher bound."""

    time_s: float
    prefill: int
    decode: int
    likely: Counts
    """The same at the demand itself."""


class _Load(NamedTuple):
    """Tokens a second."""

    prefill: float
    decode: float

    @classmethod
    def of(cls, demand: Demand) -> _Load:
        rate = demand.requests_per_s
        return cls(rate * demand.prompt_tokens, rate * demand.output_tokens)


@dataclass(slots=True)
class ModelPlanner:
    """Plans for one model."""

    targets: Targets
    rules: Rules = field(default_factory=Rules)
    _counts: deque[tuple[float, int]] = field(default_factory=deque)
    _past: deque[_Past] = field(default_factory=deque)
    _plan: Plan | None = None
    _effective_at: float = 0.0
    """When numbers last were those wanted, or came nearer."""
    _seen: Counts = field(default_factory=lambda: Counts(0, 0))
    _ordered: Counts | None = None
    """What was ordered when it was last looked at."""
    _wanted: deque[tuple[float, Counts]] = field(default_factory=deque)
    """Numbers that were wanted lately, and since when."""
    _short_at: float | None = None
    """When the workers there last did not surely suffice with a role each."""
    _was_doubted: bool = False
    """Whether they had a role each, and that became unsure."""
    _since: tuple[float, int] | None = None
    """Time and count of requests at the last change; None: it is noted with the next news."""
    _accepted: tuple[_Load, _Load] | None = None
    """The accepted load, cautiously low and high; None: the last change was lately."""
    num_changes: int = 0
    """Times that the wanted numbers changed."""

    def decide(self, now_s: float, seen: Observation | None) -> Plan:
        """What is wanted now. `seen` is None while nothing is known of the model."""
        if seen is None or now_s - seen.time_s > self.rules.silent_s:
            return self._alarmed("no_data", "nothing is heard of the mesh; nothing changes", seen)
        if not seen.speed.is_known:
            return self._alarmed("no_data", "workers have not told their speeds yet", seen)
        there = seen.ordered or Counts(seen.prefill, seen.decode)
        if self._plan is not None and seen.own_order is None and seen.ordered != self._ordered:
            # Whoever acts has ordered it: a planner that acts next goes on from there.
            self._take(now_s, *there, "as ordered")
            self._past.clear()
        self._ordered = seen.ordered
        foreign = self._find_foreign(now_s, seen)
        if foreign is not None:
            # Plans go on from what is there now, so that nobody is fought.
            self._take(now_s, *there, foreign.text)
            self._past.clear()
        self._count(seen)
        rules = self.rules
        lasting = self._demand(seen, seen.lengths[0], max(rules.demand_s), rules.caution)
        calm = self._need(lasting, seen.speed)
        likely = self._need(
            self._demand(seen, seen.lengths[0], max(rules.demand_s), 0.0), seen.speed
        )
        if self._plan is None:
            self._take(now_s, *there, "as found")
        assert self._plan is not None
        fast_prefill, fast_decode, why = 0, 0, calm.why
        for lengths, span_s in itertools.product(seen.lengths, rules.demand_s):
            low = self._demand(seen, lengths, span_s, -rules.sureness)
            is_met = (
                meets_first_token(low, seen.speed, self.targets, self._plan.prefill),
                meets_inter_token(low, seen.speed, self.targets, self._plan.decode),
            )
            if self._accepted is not None:
                is_met = self._met_or_accepted(low, seen.speed, is_met)
            if all(is_met):
                continue
            high = self._demand(seen, lengths, span_s, rules.reserve)
            found = self._need(high, seen.speed)
            why = found.why
            if not is_met[0]:
                fast_prefill = max(fast_prefill, found.prefill, self._plan.prefill + 1)
            if not is_met[1]:
                fast_decode = max(fast_decode, found.decode, self._plan.decode + 1)
        settled = self._settled(seen)
        if settled is not None:
            least, most = settled
            fast_prefill = max(fast_prefill, least.prefill)
            fast_decode = max(fast_decode, least.decode)
        # What made more necessary keeps them for as long as what is calm.
        needed = Counts(max(calm.prefill, fast_prefill), max(calm.decode, fast_decode))
        self._remember(now_s, needed, Counts(likely.prefill, likely.decode))
        fallen = self._fallen(seen)
        prefill = self._next("prefill", now_s, self._plan.prefill, fast_prefill, fallen[0])
        decode = self._next("decode", now_s, self._plan.decode, fast_decode, fallen[1])
        if settled is not None:
            lately = [one.likely for one in self._past]
            prefill = min(prefill, max(most.prefill, *(one.prefill for one in lately)))
            decode = min(decode, max(most.decode, *(one.decode for one in lately)))
        prefill, decode = self._convert(now_s, prefill, decode)
        prefill = max(prefill, self.rules.least_prefill)
        decode = max(decode, self.rules.least_decode)
        alarms = [] if foreign is None else [foreign]
        prefill, decode, over = self._within_budget(prefill, decode)
        alarms += over
        if (prefill, decode) != (self._plan.prefill, self._plan.decode):
            self.num_changes += 1
            self._take(now_s, prefill, decode, why)
        self._plan = replace(self._plan, apart=self._may_be_apart(now_s, seen))
        if not self._plan.apart:
            why += "; workers keep both roles, as they might not suffice with one each"
        alarms += self._find_ineffective(now_s, seen)
        if seen.worst_share > 0.9 and seen.mean_share < 0.5:
            text = (
                f"the fullest worker has {seen.worst_share:.0%} of its pages in use, all together "
                f"{seen.mean_share:.0%}: routing, not numbers, is uneven"
            )
            alarms.append(Alarm(name="uneven", text=text))
        self._seen = Counts(seen.prefill, seen.decode)
        self._plan = replace(self._plan, why=why, alarms=tuple(alarms))
        return self._plan

    def _may_be_apart(self, now_s: float, seen: Observation) -> bool:
        """Whether the workers there surely suffice with a role each, and have for long. To give
        them both roles takes no time, and a doubt is enough for it.
        """
        if not seen.able:
            return True
        assert self._plan is not None
        if self._short_at is None:
            self._short_at = now_s
        was_apart = self._plan.apart and seen.both < seen.able
        sureness = self.rules.caution if was_apart else self.rules.sureness
        if not self._suffice_apart(seen, sureness):
            self._short_at = now_s
            self._was_doubted |= was_apart
            return False
        calm_s = self.rules.hold_s * (_AGAIN if self._was_doubted else 1)
        return was_apart or now_s - self._short_at > calm_s

    def _suffice_apart(self, seen: Observation, deviations: float) -> bool:
        least = Counts(self.rules.least_prefill, self.rules.least_decode)
        for lengths, span_s in itertools.product(seen.lengths, self.rules.demand_s):
            high = self._demand(seen, lengths, span_s, deviations)
            found = need(high, seen.speed, self.targets)
            least = Counts(max(least.prefill, found.prefill), max(least.decode, found.decode))
            if least.total > seen.prefill + seen.decode:
                return False
        return True

    def _met_or_accepted(
        self, low: Demand, speed: Speed, is_met: tuple[bool, bool]
    ) -> tuple[bool, bool]:
        """Whether each role meets its target at this demand, or arrivals are no more than accepted
        ones. A queue is not accepted.
        """
        assert self._plan is not None
        assert self._accepted is not None
        load, known = _Load.of(low), self._accepted[1]
        alone = replace(low, queued_tokens=0.0)
        is_queue = meets_first_token(alone, speed, self.targets, self._plan.prefill)
        return (
            is_met[0] or (load.prefill <= known.prefill and not is_queue),
            is_met[1] or load.decode <= known.decode,
        )

    def _fallen(self, seen: Observation) -> tuple[bool, bool]:
        """Whether each role's load is surely below the accepted one, or none is accepted."""
        if self._accepted is None:
            return True, True
        rules, known = self.rules, self._accepted[0]
        high = self._demand(seen, seen.lengths[0], max(rules.demand_s), rules.sureness)
        load = _Load.of(high)
        return load.prefill < known.prefill, load.decode < known.decode

    def _need(self, demand: Demand, speed: Speed) -> Need:
        """By arrivals alone."""
        return need(replace(demand, queued_tokens=0.0), speed, self.targets)

    def _settled(self, seen: Observation) -> tuple[Counts, Counts] | None:
        """What the load since the last change surely needs, and surely not more than, when that is
        long enough ago. The load is then accepted.
        """
        if self._since is None or seen.requests < self._since[1]:
            self._since, self._accepted = (seen.time_s, seen.requests), None
        span_s, lengths = seen.time_s - self._since[0], seen.lengths[0]
        if self._accepted is not None or span_s < self.rules.settle_s:
            return None
        arrived, caution = seen.requests - self._since[1], self.rules.caution
        low, high = (
            self._scattered(seen, lengths, arrived, span_s, deviations)
            for deviations in (-caution, caution)
        )
        self._accepted = _Load.of(low), _Load.of(high)
        least, most = (self._need(one, seen.speed) for one in (low, high))
        return Counts(least.prefill, least.decode), Counts(most.prefill, most.decode)

    def _count(self, seen: Observation) -> None:
        self._counts.append((seen.time_s, seen.requests))
        if self._counts[0][1] > seen.requests:
            # The gateway was restarted, and counts anew.
            self._counts.clear()
            self._counts.append((seen.time_s, seen.requests))
        longest_s = max(self.rules.demand_s)
        while len(self._counts) > 2 and seen.time_s - self._counts[1][0] >= longest_s:
            self._counts.popleft()

    def _demand(
        self, seen: Observation, lengths: Lengths, span_s: float, deviations: float
    ) -> Demand:
        """Demand by the arrivals of so long, higher or lower by so many standard deviations of
        their number and their lengths.
        """
        began_s, before = next(
            (one for one in reversed(self._counts) if seen.time_s - one[0] >= span_s),
            self._counts[0],
        )
        span_s = max(seen.time_s - began_s, 1.0)
        return self._scattered(seen, lengths, seen.requests - before, span_s, deviations)

    def _scattered(
        self, seen: Observation, lengths: Lengths, arrived: int, span_s: float, deviations: float
    ) -> Demand:
        deviation = math.hypot(math.sqrt(1 / max(arrived, 1)), lengths.deviation)
        return Demand(
            requests_per_s=arrived / span_s * max(0.0, 1 + deviations * deviation),
            sizes=lengths.sizes,
            output_tokens=lengths.output_tokens,
            queued_tokens=seen.queued_tokens,
        )

    def _remember(self, now_s: float, needed: Counts, likely: Counts) -> None:
        self._past.append(_Past(now_s, *needed, likely))
        while self._past and now_s - self._past[0].time_s > self.rules.hold_s:
            self._past.popleft()

    def _most(self, role: Literal["prefill", "decode"], now_s: float, span_s: float) -> int | None:
        """Most workers that were needed in a time; None: it is not known for so long."""
        assert self._past, "the present need is remembered first"
        if now_s - self._past[0].time_s < 0.9 * span_s:
            return None
        recent = (one for one in self._past if now_s - one.time_s <= span_s)
        return max(one.prefill if role == "prefill" else one.decode for one in recent)

    def _next(
        self,
        role: Literal["prefill", "decode"],
        now_s: float,
        have: int,
        wanted: int,
        may_fall: bool,
    ) -> int:
        if wanted > have or not may_fall:
            return max(wanted, have)
        calm = self._most(role, now_s, self.rules.hold_s)
        return have if calm is None else min(have, calm)

    def _convert(self, now_s: float, prefill: int, decode: int) -> tuple[int, int]:
        """Workers that one role can spare, which take less time to change than to start."""
        assert self._plan is not None
        more = (prefill - self._plan.prefill, decode - self._plan.decode)
        spared = {
            role: self._most(role, now_s, self.rules.role_calm_s) for role in ("prefill", "decode")
        }
        if more[1] > 0 and more[0] == 0 and (calm := spared["prefill"]) is not None:
            prefill -= min(more[1], max(0, self._plan.prefill - calm))
        if more[0] > 0 and more[1] == 0 and (calm := spared["decode"]) is not None:
            decode -= min(more[0], max(0, self._plan.decode - calm))
        return prefill, decode

    def _within_budget(self, prefill: int, decode: int) -> tuple[int, int, list[Alarm]]:
        budget = self.rules.budget
        if not budget or prefill + decode <= budget:
            return prefill, decode, []
        needed = Counts(prefill, decode)
        kept = needed.within(budget, self.rules.least_decode)
        text = f"{needed} are needed, and {budget} are allowed"
        return kept.prefill, kept.decode, [Alarm(name="over_budget", text=text)]

    def _find_foreign(self, now_s: float, seen: Observation) -> Alarm | None:
        """Somebody else changed the numbers. Where orders are not known, these are more workers
        than were wanted lately: fewer may have died, or not have started yet.
        """
        if self._plan is None:
            return None
        if seen.ordered is not None and seen.own_order is not None:
            if seen.ordered == seen.own_order:
                return None
            text = f"{seen.ordered} are ordered, and this planner has ordered {seen.own_order}"
            return Alarm(name="foreign_edit", text=text)
        before, now = self._seen, Counts(seen.prefill, seen.decode)
        if seen.able:
            # Roles are this planner's own, and end with their leases: the sum is what counts.
            before, now = Counts(0, before.total), Counts(0, now.total)
        while len(self._wanted) > 1 and now_s - self._wanted[1][0] > self.rules.effect_s:
            self._wanted.popleft()
        wanted = Counts(*map(max, zip(*(one for _, one in self._wanted), strict=True)))
        if seen.able:
            wanted = Counts(0, max(one.total for _, one in self._wanted))
        if now.prefill <= max(before.prefill, wanted.prefill) and (
            now.decode <= max(before.decode, wanted.decode)
        ):
            return None
        text = f"there are {now} after {before}, which this planner has not asked for"
        return Alarm(name="foreign_edit", text=text)

    def _find_ineffective(self, now_s: float, seen: Observation) -> list[Alarm]:
        """Numbers have neither been there nor come nearer for long, however wishes changed."""
        plan, before = self._plan, self._seen
        assert plan is not None
        if (
            _has_spare(seen, plan)
            or _distance(seen, plan) == 0
            or _distance(seen, plan) < _distance(before, plan)
        ):
            self._effective_at = now_s
            return []
        if now_s - self._effective_at <= self.rules.effect_s:
            return []
        text = (
            f"{plan.prefill} prefill and {plan.decode} decode workers are wanted, there are "
            f"{seen.prefill} and {seen.decode}, and for {now_s - self._effective_at:.0f} s they "
            "have not come nearer"
        )
        return [Alarm(name="no_effect", text=text)]

    def _take(self, now_s: float, prefill: int, decode: int, why: str) -> None:
        if self._plan is None:
            self._effective_at = now_s
        apart = self._plan is None or self._plan.apart
        self._plan = Plan(prefill=prefill, decode=decode, why=why, apart=apart)
        self._since = self._accepted = None
        self._wanted.append((now_s, Counts(prefill, decode)))

    def _alarmed(self, name: AlarmName, text: str, seen: Observation | None) -> Plan:
        """Everything stays as it is."""
        alarm = Alarm(name=name, text=text)
        if self._plan is not None:
            return replace(self._plan, alarms=(alarm,))
        have = (0, 0) if seen is None else (seen.prefill, seen.decode)
        return Plan(prefill=have[0], decode=have[1], why=text, alarms=(alarm,))


def _has_spare(seen: Observation, plan: Plan) -> bool:
    """Whether workers whose role may change are as many as wanted, or more: who sets roles ends
    nobody.
    """
    if not seen.able or seen.prefill + seen.decode < plan.total:
        return False
    return not plan.apart or (seen.prefill >= plan.prefill and seen.decode >= plan.decode)


def _distance(there: Counts | Observation, plan: Plan) -> int:
    """Workers that would have to come or go."""
    return abs(there.prefill - plan.prefill) + abs(there.decode - plan.decode)
