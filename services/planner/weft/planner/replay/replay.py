"""The planner against a day, in virtual time, beside an oracle that knows the day."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.planner.forecast import Speed, Targets
from weft.planner.policy import AlarmName, ModelPlanner, Observation, Rules
from weft.planner.replay.fleet import Fleet, Tally
from weft.planner.replay.traces import Arrival

INTERVAL_S = 5.0
SLOT_S = 300.0
"""The oracle changes its numbers so often, without delay."""
_ENOUGH = 0.99
_MAX_TRIES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    time_s: float
    prefill: int
    decode: int
    why: str


@dataclass(slots=True, kw_only=True)
class Outcome:
    tally: Tally
    changes: list[Change] = field(default_factory=list)
    alarms: set[AlarmName] = field(default_factory=set)

    @property
    def worker_hours(self) -> float:
        return self.tally.worker_s / 3600


def replay(
    day: Sequence[Arrival],
    speed: Speed,
    targets: Targets,
    rules: Rules | None = None,
    *,
    first: tuple[int, int] = (1, 1),
    start_s: float = 60.0,
    switch_s: float = 1.0,
    disturb: Callable[[Fleet], None] = lambda fleet: None,
    acts: bool = True,
) -> Outcome:
    """Lets a planner run a fleet through a day.

    Args:
        first: Prefill and decode workers at the beginning.
        disturb: Called before each decision; may change the fleet as somebody else would.
        acts: Whether the fleet obeys.
    """
    fleet = Fleet(speed, targets, *first, start_s=start_s, switch_s=switch_s)
    planner = ModelPlanner(targets, rules or Rules())
    outcome = Outcome(tally=fleet.tally)
    next_s = INTERVAL_S

    def decide() -> None:
        disturb(fleet)
        seen = Observation(
            time_s=fleet.now_s,
            requests=fleet.num_arrived,
            lengths=fleet.recent.lengths(),
            queued_tokens=fleet.queued_tokens,
            prefill=fleet.prefill,
            decode=fleet.decode,
            ready=fleet.prefill + fleet.decode,
            speed=speed,
        )
        plan = planner.decide(fleet.now_s, seen)
        outcome.alarms.update(alarm.name for alarm in plan.alarms)
        wanted = (plan.prefill, plan.decode)
        if wanted != (fleet.prefill, fleet.decode) and acts:
            fleet.change(*wanted)
            change = Change(time_s=fleet.now_s, prefill=wanted[0], decode=wanted[1], why=plan.why)
            outcome.changes.append(change)

    for arrival in day:
        while arrival.time_s >= next_s:
            fleet.run_until(next_s)
            decide()
            next_s += INTERVAL_S
        fleet.offer(arrival)
    _finish(fleet)
    return outcome


def oracle(day: Sequence[Arrival], speed: Speed, targets: Targets) -> Outcome:
    """Runs a day with the least workers, in each slot of five minutes, with which `_ENOUGH` of that
    slot's own requests are within their targets. Workers come and go at once.
    """
    numbers = _least(day, speed, targets)
    fleet = Fleet(speed, targets, *numbers[0], start_s=0.0, switch_s=0.0)
    outcome = Outcome(tally=fleet.tally)
    slot = 0
    for arrival in day:
        while arrival.time_s >= (slot + 1) * SLOT_S:
            slot += 1
            fleet.run_until(slot * SLOT_S)
            if numbers[slot] != (fleet.prefill, fleet.decode):
                fleet.change(*numbers[slot])
                change = Change(
                    time_s=fleet.now_s, prefill=numbers[slot][0], decode=numbers[slot][1], why=""
                )
                outcome.changes.append(change)
        fleet.offer(arrival)
    _finish(fleet)
    return outcome


def _finish(fleet: Fleet) -> None:
    """What is under way ends; the workers' time is counted to the last arrival."""
    worker_s = fleet.tally.worker_s
    fleet.run_until(fleet.now_s + 3600)
    fleet.tally.worker_s = worker_s


def _least(day: Sequence[Arrival], speed: Speed, targets: Targets) -> list[tuple[int, int]]:
    slots: list[list[Arrival]] = [[] for _ in range(1 + int(day[-1].time_s // SLOT_S))]
    for arrival in day:
        slots[int(arrival.time_s // SLOT_S)].append(arrival)
    found: list[tuple[int, int]] = []
    before: list[Arrival] = []
    for slot in slots:
        # The slot begins with what the one before has left running.
        began_s = slot[0].time_s if slot else 0.0
        lead = [one for one in before if began_s - one.time_s < SLOT_S / 3]
        guess = found[-1] if found else (1, 1)
        prefill = _search(lead, slot, speed, targets, guess[0], is_prefill=True)
        decode = _search(lead, slot, speed, targets, guess[1], is_prefill=False)
        found.append((prefill, decode))
        before = slot
    return found


def _search(
    lead: Sequence[Arrival],
    slot: Sequence[Arrival],
    speed: Speed,
    targets: Targets,
    guess: int,
    *,
    is_prefill: bool,
) -> int:
    """The least workers of one role, with more than enough of the other. `guess` saves time."""
    rate = speed.prefill_tokens_per_s

    def late(count: int, arrivals: Sequence[Arrival]) -> int:
        free_at, missed = [0.0] * count, 0
        for one in arrivals:
            ends_s = max(one.time_s, free_at[0]) + one.prompt_tokens / rate
            if ends_s - one.time_s > targets.first_token_s:
                missed += 1
            else:
                heapq.heapreplace(free_at, ends_s)
        return missed

    def slow(count: int, arrivals: Sequence[Arrival]) -> int:
        fleet = Fleet(speed, targets, len(arrivals), count)
        for one in arrivals:
            fleet.offer(one)
        fleet.run_until(fleet.now_s + 3600)
        return fleet.tally.requests - fleet.tally.good

    def misses(count: int) -> int:
        missed = late if is_prefill else slow
        return missed(count, [*lead, *slot]) - (missed(count, lead) if lead else 0)

    hopeless = sum(
        one.prompt_tokens / speed.prefill_tokens_per_s > targets.first_token_s for one in slot
    )
    allowed = math.floor((1 - _ENOUGH) * len(slot)) + hopeless
    count = guess
    while misses(count) > allowed and count < _MAX_TRIES:
        count += 1
    if count == guess:
        while count > 1 and misses(count - 1) <= allowed:
            count -= 1
    return count
