"""Step durations by number of requests, with and without drafts, measured or predicted."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from math import log

from weft.engine.base.drafts import DraftShape
from weft.engine.scheduler.plan import NO_DRAFTS

_Kind = tuple[int, DraftShape]
MEASURED_WEIGHT = 1.5
"""Number of steps from which on a duration counts as measured."""
FIRM_WEIGHT = 5.0
"""Number of steps from which on a kind may determine the pace if steps overlap. It is larger
because the times of overlapping steps vary more.
"""
MAX_WEIGHT = 12.0
"""Largest weight of a known time, in steps, against one new step."""
FARTHEST = 1.5
"""A time is clipped to the expected time multiplied or divided by this factor."""
DROPPED_UP_TO = 2.0
"""A time of at most this weight is replaced by the next step's if it exceeds FARTHEST times that
step's, since the first steps of a kind are often slow. With a weight of 1, two slow first steps
would count for hundreds of steps.
"""
FOLLOWED_AFTER = 8
"""After so many consecutive steps of one kind, this kind determines the pace."""
PACE_SHARE = 0.15
"""Weight of the newest step in the pace."""
MAX_CHANGE = 1.25
"""Largest change of the pace that one step may indicate."""
GROWTH = 0.3
"""Exponent of the growth of times with the number of rows that is assumed without other data."""
ALIKE = 1.15
"""Largest ratio of the numbers of requests of two steps that count as alike."""
MIN_SHARE = 0.2
"""Least share of the requested drafts with which a step is evidence of the cost of drafts."""


def size_class(number: int) -> int:
    """Rounds down to 1, 2, 3, 4, 6, 8, 12, 16, 24, ... Numbers of one class count as alike."""
    if number < 4:
        return number
    shift = number.bit_length() - 2
    return number >> shift << shift


def _next_sizes(size: int) -> tuple[int, int]:
    """The neighbouring size classes. The lower neighbour of 1 is 1."""
    is_power = size & (size - 1) == 0
    return size_class(max(1, size - 1)), size + max(1, size // (2 if is_power else 3))


@dataclass(slots=True)
class _Average:
    """A moving average that clips outliers and drops slow first values."""

    value: float
    weight: float = 1.0

    def note(self, value: float, weight: float = 1.0) -> None:
        if self.weight <= DROPPED_UP_TO and self.value > FARTHEST * value:
            self.value, self.weight = value, weight
            return
        value = _within(value / self.value, FARTHEST) * self.value
        self.weight = min(self.weight + weight, MAX_WEIGHT)
        self.value += weight / self.weight * (value - self.value)


def _within(factor: float, most: float) -> float:
    return min(max(factor, 1 / most), most)


@dataclass(slots=True)
class _Point:
    number: float
    time: _Average


class _Curve:
    """Times by number: a power law between neighbouring points."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._points: list[_Point] = []

    @property
    def largest(self) -> float:
        """Largest recorded number; 0 if none."""
        return self._points[-1].number if self._points else 0.0

    def note(self, number: int, time: float) -> None:
        size = size_class(number)
        place = bisect_left(self._sizes, size)
        if place == len(self._sizes) or self._sizes[place] != size:
            self._sizes.insert(place, size)
            self._points.insert(place, _Point(number, _Average(time)))
        else:
            point = self._points[place]
            point.time.note(time)
            point.number += (number - point.number) / point.time.weight

    def at(self, number: float) -> float:
        points = self._points
        if len(points) == 1:
            return points[0].time.value * float((number / points[0].number) ** GROWTH)
        upper = bisect_left(points, number, key=lambda point: point.number)
        if upper == len(points):
            # Points that are too close to each other cannot predict distant ones.
            half = bisect_right(points, number / 2, key=lambda point: point.number)
            first, last = points[min(max(half, 1), upper - 1) - 1], points[-1]
        else:
            first, last = points[max(upper, 1) - 1], points[max(upper, 1)]
        power = log(last.time.value / first.time.value) / log(last.number / first.number)
        begin = first if number < first.number else last
        return begin.time.value * float((number / begin.number) ** min(max(power, 0.0), 1.0))


@dataclass(frozen=True, slots=True)
class StepTaken:
    """A step with tokens of running requests only."""

    num_requests: int
    shape: DraftShape
    """Shape of the drafts requested for each request."""
    num_drafts: int
    """Drafts made, over all requests."""
    duration_s: float
    drafting_s: float
    """Seconds of the step spent on drafting."""

    @property
    def kind(self) -> tuple[int, DraftShape]:
        """Size class and shape of the drafts."""
        return size_class(self.num_requests), self.shape

    def is_like(self, other: StepTaken) -> bool:
        """Whether both steps have drafts of the same shape and similar numbers of requests."""
        few, many = sorted((self.num_requests, other.num_requests))
        return self.shape == other.shape and many <= ALIKE * few

    @property
    def share(self) -> float:
        """Share of the requested drafts that were made."""
        wanted = self.num_requests * self.shape.num_drafts
        return self.num_drafts / wanted if wanted else 0.0

    @property
    def rows_a_turn(self) -> int:
        """Rows of each forward pass of the drafter, except the first one of a tree."""
        return self.num_requests * self.shape.width


class StepTimes:
    """The recorded durations of steps with tokens of running requests only.

    Steps slow down as contexts grow and as other processes use the machine. The pace is that
    slowdown. The kind of steps that runs most of the time determines the pace, and times of other
    kinds are divided by it. The time of a kind that was not measured is predicted from steps with
    as many rows.

    Args:
        overlaps: Whether steps overlap. Then drafts have a fixed cost, so that steps without drafts
            no longer predict steps with drafts once some of these were measured. Few steps can be
            timed, so an unknown cost of drafts is taken from a neighbouring size class.
    """

    def __init__(self, *, overlaps: bool = False) -> None:
        self._overlaps = overlaps
        self._times: dict[_Kind, _Average] = {}
        """Durations of steps that had all their drafts, at a pace of 1."""
        self._rows = _Curve()
        """Durations without drafting, by number of rows."""
        self._drafted_rows = _Curve() if overlaps else self._rows
        """Durations of steps with drafts, less their drafting, by number of rows."""
        self._drafting = _Curve()
        """Duration of one forward pass of the drafter, by number of rows."""
        self._pace = 1.0
        """Current duration of steps relative to the recorded ones."""
        self._followed: _Kind = (0, NO_DRAFTS)
        """The kind of steps that determines the pace."""
        self._newest: _Kind = (0, NO_DRAFTS)
        self._num_alike = 0
        """Number of the newest consecutive steps of one kind."""

    def note(self, step: StepTaken, *, is_settled: bool) -> None:
        """Records a completed step.

        Args:
            is_settled: Whether contexts are about as long as in the previous steps.
        """
        kind = step.kind
        least = FIRM_WEIGHT if self._overlaps else MEASURED_WEIGHT
        is_firm = self.weight(*kind) >= least
        if not (is_settled and kind[0] == self._followed[0]) and is_firm:
            # No recent step is comparable, so this kind determines the pace from now on.
            self._followed, self._num_alike = kind, 0
        if kind == self._followed:
            factor = step.duration_s / self.seconds(step.num_requests, step.shape, step.share)
            self._pace *= 1 + PACE_SHARE * (_within(factor, MAX_CHANGE) - 1)
        time, drafting = step.duration_s / self._pace, step.drafting_s / self._pace
        # Without drafts (for lack of room or time) the draft model only read tokens.
        if drafting and step.num_drafts:
            self._drafting.note(step.rows_a_turn, drafting / step.shape.depth)
        rows = self._drafted_rows if step.num_drafts else self._rows
        rows.note(step.num_requests + step.num_drafts, max(time - drafting, 0.1 * time))
        if kind != self._followed:
            self._note_time(kind, step.share, time / self._scale(step.num_requests, kind[0]))
        self._num_alike = self._num_alike + 1 if kind == self._newest else 1
        self._newest = kind
        if self._num_alike == FOLLOWED_AFTER:
            self._followed = kind

    def _note_time(self, kind: _Kind, share: float, time: float) -> None:
        weight = 1.0
        if kind[1].num_drafts:
            plain = self._times.get((kind[0], NO_DRAFTS))
            if share < MIN_SHARE or plain is None:
                return
            time, weight = plain.value + (time - plain.value) / share, share**2
            time = max(time, plain.value / FARTHEST)
        known = self._times.get(kind)
        if known is None:
            self._times[kind] = _Average(time, weight)
        else:
            known.note(time, weight)

    def weight(self, num_requests: int, shape: DraftShape) -> float:
        """Number of measured steps, up to `MAX_WEIGHT`; 0: the duration is predicted."""
        known = self._times.get((size_class(num_requests), shape))
        return 0.0 if known is None else known.weight

    def is_measured(self, num_requests: int, shape: DraftShape) -> bool:
        """Whether the time of these steps is measured rather than predicted."""
        return self.weight(num_requests, shape) >= MEASURED_WEIGHT

    def is_known(self, num_requests: int, shape: DraftShape) -> bool:
        """Whether the time of these steps is measured, in this or a neighbouring size class."""
        size = size_class(num_requests)
        is_plain_known = self.is_measured(num_requests, NO_DRAFTS)
        return self.is_measured(num_requests, shape) or (
            is_plain_known and self._of_next_size(size, shape) is not None
        )

    def is_near(self, num_rows: int) -> bool:
        """Whether steps with at least half as many rows were measured."""
        return num_rows <= 2 * max(self._rows.largest, self._drafted_rows.largest)

    def seconds(self, num_requests: int, shape: DraftShape, share: float = 1.0) -> float:
        """Duration of a step in which this share of the drafts is made. At least one step must be
        recorded.
        """
        size = size_class(num_requests)
        plain, full = self._times.get((size, NO_DRAFTS)), self._times.get((size, shape))
        factor = None
        if plain is not None:
            factor = full.value / plain.value if full else self._of_next_size(size, shape)
        if plain is None or factor is None:
            return self._pace * self._predicted(num_requests, shape, share)
        time = plain.value * (1 + share * (factor - 1))
        return self._pace * time * self._scale(num_requests, size)

    def _of_next_size(self, size: int, shape: DraftShape) -> float | None:
        """Duration of such steps relative to steps without drafts, if it is measured for a
        neighbouring size class.
        """
        for other in _next_sizes(size) if self._overlaps else ():
            if other != size and all(self.is_measured(other, one) for one in (NO_DRAFTS, shape)):
                return self._times[other, shape].value / self._times[other, NO_DRAFTS].value
        return None

    def _by_depth(self, size: int, shape: DraftShape) -> float | None:
        """Duration of such steps, from that of steps with other drafts in the same size class, if
        both are measured for another number of requests.
        """
        if not (self._overlaps and shape.num_drafts):
            return None
        sizes = {other for other, _ in self._times if other != size}
        given = [s for other, s in self._times if other == size and s.num_drafts and s != shape]
        given.sort(key=lambda one: abs(one.num_drafts - shape.num_drafts))
        for other in sorted(sizes, key=lambda one: abs(log(one / size))):
            for one in given:
                if all(
                    self.is_measured(*kind) for kind in ((size, one), (other, one), (other, shape))
                ):
                    factor = self._times[other, shape].value / self._times[other, one].value
                    return self._times[size, one].value * factor
        return None

    def _scale(self, num_requests: int, size: int) -> float:
        return 1.0 if num_requests == size else self._rows.at(num_requests) / self._rows.at(size)

    def _predicted(self, num_requests: int, shape: DraftShape, share: float) -> float:
        known_s = self._by_depth(size_class(num_requests), shape)
        if known_s is not None:
            return known_s * self._scale(num_requests, size_class(num_requests))
        rows = self._rows
        if shape.num_drafts and self._drafted_rows.largest:
            rows = self._drafted_rows
        time = rows.at(max(1, round(num_requests * (1 + share * shape.num_drafts))))
        if shape.depth and self._drafting.largest:
            time += shape.depth * self._drafting.at(num_requests * shape.width)
        return time
