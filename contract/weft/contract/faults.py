"""Fault points: named places where a process can be made to fail, so that failures can be tested.

    if faults.SHIP_POST.is_armed and faults.SHIP_POST.fire() == "drop":
        return

A point costs one attribute look-up while nothing is armed. Nothing can be armed before the process
has called `enable` (the services' `--enable-faults`). Like loggers, points are known by name in the
whole process. This module declares the points of product code. Points that break a guarantee of the
product are declared with the wrappers that hold them (`weft.chaos.sabotage`).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

from weft.contract.errors import FaultsDisabled, InjectedFault, InvalidRequest
from weft.contract.pages import StagingPages
from weft.contract.wire import wire

FaultKind = Literal[
    "drop", "delay", "duplicate", "corrupt", "stall", "kill", "error", "sabotage", ""
]
"""Kind of fault at a point; the empty one: nothing happens."""
KINDS: tuple[FaultKind, ...] = tuple(kind for kind in get_args(FaultKind) if kind)
MAX_ARMED = 64
MAX_DELAY_S = 600.0
_CLEARED_POLL_S = 0.02
_ANYWHERE: tuple[FaultKind, ...] = ("delay", "stall", "kill")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """One fault to arm; the same spec makes the same choices in every run."""

    point: str
    kind: str = field(metadata=wire(is_required=True))
    """One of KINDS that the point supports."""
    probability: float = 1.0
    """Probability, in (0, 1], that the fault happens each time the point is reached."""
    count: int = 1
    """Most times that the fault happens; 0: no limit."""
    skip: int = 0
    """Number of times that the point is passed before the fault can happen."""
    seed: int = 0
    """Seed of the random draws and of the bit that `corrupt` flips."""
    delay_s: float = 1.0
    """Duration of `delay`, seconds; also the longest `stall`, which ends when the fault is cleared.
    """


@dataclass(slots=True, kw_only=True)
class FaultState:
    spec: FaultSpec
    reached: int = 0
    """Number of times that its point was passed since it was armed."""
    fired: int = 0
    """Number of times that the fault has happened."""


class _Armed:
    def __init__(self, spec: FaultSpec) -> None:
        self.state = FaultState(spec=spec)
        self.random = random.Random(spec.seed)
        self.cleared = threading.Event()

    def draw(self) -> bool:
        """Counts one pass; returns whether the fault happens now."""
        spec, state = self.state.spec, self.state
        state.reached += 1
        if state.reached <= spec.skip or (spec.count and state.fired >= spec.count):
            return False
        if spec.probability < 1.0 and self.random.random() >= spec.probability:
            return False
        state.fired += 1
        return True


class FaultPoint:
    """A named place in the code where faults can be injected.

    Args:
        name: Part and action, as `ship.post`.
        kinds: Kinds of faults that can happen there besides delay, stall and kill. A point of kind
            `sabotage` supports no other kind: it breaks a guarantee of the product.
    """

    def __init__(self, name: str, where: str, *kinds: FaultKind) -> None:
        self.name = name
        self.where = where
        self.kinds = kinds if "sabotage" in kinds else (*kinds, *_ANYWHERE)
        self.is_armed = False
        """Whether any fault is armed; the only cost of a point while none is."""
        self._armed: list[_Armed] = []
        self._lock = threading.Lock()

    def fire(self) -> FaultKind:
        """Passes the point: waits, kills the process, raises, or returns the kind for the caller.
        Raises InjectedFault if the kind is `error`.
        """
        fault = self._draw()
        return "" if fault is None else self._wait(fault)

    async def fire_async(self) -> FaultKind:
        """Asynchronous form of `fire`, which does not block the event loop."""
        fault = self._draw()
        return "" if fault is None else await self._wait_async(fault)

    def repeat(self, item: T) -> Sequence[T]:
        """The copies of a message that the caller processes: none for `drop`, two for `duplicate`,
        else one.
        """
        return _repeated(item, self.fire())

    async def repeat_async(self, item: T) -> Sequence[T]:
        """Asynchronous form of `repeat`, which does not block the event loop."""
        return _repeated(item, await self.fire_async())

    def flip_bit(self, pool: StagingPages, pages: Sequence[int]) -> None:
        """Passes pages in a pool: `corrupt` flips one bit in one of them.

        Args:
            pool: uint8 `[num_pages, page_bytes]`.
            pages: Candidates; nothing happens when there is none.
        """
        fault = self._draw() if pages else None
        if fault is not None and self._wait(fault) == "corrupt":
            _flip(fault.random, pool, pages)

    async def flip_bit_async(self, pool: StagingPages, pages: Sequence[int]) -> None:
        """Asynchronous form of `flip_bit`, which does not block the event loop."""
        fault = self._draw() if pages else None
        if fault is not None and await self._wait_async(fault) == "corrupt":
            _flip(fault.random, pool, pages)

    def _draw(self) -> _Armed | None:
        with self._lock:
            return next((fault for fault in self._armed if fault.draw()), None)

    def _wait(self, fault: _Armed) -> FaultKind:
        kind = self._begin(fault)
        if kind == "delay":
            time.sleep(fault.state.spec.delay_s)
        elif kind == "stall":
            fault.cleared.wait(fault.state.spec.delay_s)
        return kind

    async def _wait_async(self, fault: _Armed) -> FaultKind:
        kind = self._begin(fault)
        if kind in ("delay", "stall"):
            until = time.monotonic() + fault.state.spec.delay_s
            while (left := until - time.monotonic()) > 0:
                if kind == "stall" and fault.cleared.is_set():
                    break
                await asyncio.sleep(min(left, _CLEARED_POLL_S if kind == "stall" else left))
        return kind

    def _begin(self, fault: _Armed) -> FaultKind:
        kind: FaultKind = next(kind for kind in KINDS if kind == fault.state.spec.kind)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "error":
            raise InjectedFault(f"an injected fault at {self.name}", stage=self.name)
        return kind

    def arm(self, spec: FaultSpec) -> None:
        """Arms a fault at this point, in addition to those already armed."""
        with self._lock:
            self._armed.append(_Armed(spec))
            self.is_armed = True

    def clear(self) -> int:
        """Disarms all faults and ends stalls; returns how many there were."""
        with self._lock:
            gone, self._armed = self._armed, []
            self.is_armed = False
        for fault in gone:
            fault.cleared.set()
        return len(gone)

    def states(self) -> list[FaultState]:
        with self._lock:
            return [fault.state for fault in self._armed]


class FaultBoard:
    """The fault points of this process."""

    def __init__(self, *points: FaultPoint) -> None:
        self._points = {point.name: point for point in points}
        self.is_enabled = False

    def enable(self) -> None:
        """Allows faults to be armed, for the rest of the process's life."""
        self.is_enabled = True

    def add(self, *points: FaultPoint) -> None:
        self._points |= {point.name: point for point in points}

    @property
    def points(self) -> Sequence[FaultPoint]:
        return tuple(self._points.values())

    def arm(self, spec: FaultSpec) -> None:
        """Arms a fault at its point. Raises FaultsDisabled if this process was not started with
        fault injection, and InvalidRequest if there is no such point or kind, or a value is out of
        range.
        """
        self.check_enabled()
        self.check(spec)
        if len(self.states()) >= MAX_ARMED:
            raise InvalidRequest(f"{MAX_ARMED} faults are armed; clear some", stage="faults")
        self._points[spec.point].arm(spec)

    def check_enabled(self) -> None:
        """Raises FaultsDisabled unless faults may be armed."""
        if not self.is_enabled:
            raise FaultsDisabled(
                "faults are off; start the service with --enable-faults", stage="faults"
            )

    def check(self, spec: FaultSpec) -> None:
        """Raises InvalidRequest for a spec that cannot be armed."""
        point = self._points.get(spec.point)
        if point is None:
            names = ", ".join(sorted(self._points))
            raise InvalidRequest(
                f"no fault point {spec.point!r}; there are {names}", stage="faults", param="point"
            )
        problems = (
            ("kind", spec.kind in point.kinds, f"{spec.point} knows {', '.join(point.kinds)}"),
            ("probability", 0 < spec.probability <= 1, "give more than 0, at most 1"),
            ("count", spec.count >= 0, "give 0 (no bound) or more"),
            ("skip", spec.skip >= 0, "give 0 or more"),
            ("delay", 0 <= spec.delay_s <= MAX_DELAY_S, f"give 0 to {MAX_DELAY_S:g} s"),
        )
        for param, is_good, message in problems:
            if not is_good:
                raise InvalidRequest(f"{param}: {message}", stage="faults", param=param)

    def clear(self, name: str = "") -> int:
        """Disarms all faults, or those armed at one point; returns how many there were."""
        return sum(point.clear() for point in self.points if name in ("", point.name))

    def states(self) -> list[FaultState]:
        return [state for point in self._points.values() for state in point.states()]


def _flip(draw: random.Random, pool: StagingPages, pages: Sequence[int]) -> None:
    pool[draw.choice(pages), draw.randrange(pool.shape[1])] ^= 1 << draw.randrange(8)


def _repeated(item: T, kind: FaultKind) -> Sequence[T]:
    if kind == "drop":
        return ()
    return (item, item) if kind == "duplicate" else (item,)


ENGINE_STEP = FaultPoint("engine.step", "an engine begins a step", "error")
SHIP_POST = FaultPoint(
    "ship.post",
    "a filler posts the write of a chunk; drop: it says that it has, and has not",
    "drop",
    "duplicate",
    "error",
)
FILL_NOTIFY = FaultPoint(
    "fill.notify", "an owner takes NIXL's word that a chunk has arrived", "drop", "duplicate"
)
FILL_DIGEST = FaultPoint(
    "fill.digest", "an owner digests pages that have arrived; corrupt: a bit is wrong", "corrupt"
)
FILL_START = FaultPoint(
    "fill.start", "an owner sends the first message of a fill", "drop", "duplicate", "error"
)
FILL_RENEW = FaultPoint("fill.renew", "an owner renews a lease", "drop", "duplicate", "error")
FILL_STOP = FaultPoint("fill.stop", "an owner stops a lease", "drop", "duplicate", "error")
FILL_EVENT_OUT = FaultPoint(
    "fill.event.out", "a filler sends an event", "drop", "duplicate", "error"
)
FILL_EVENT_IN = FaultPoint(
    "fill.event.in", "an owner receives an event", "drop", "duplicate", "error"
)
SESSION_SUBMIT = FaultPoint(
    "session.submit", "a decode worker receives a submit", "drop", "duplicate", "error"
)
SESSION_EVENT = FaultPoint(
    "session.event", "a decode worker sends what a step brought", "drop", "duplicate", "error"
)
STORE_LOOKUP = FaultPoint(
    "store.lookup", "a worker asks the KV store for a prompt", "drop", "error"
)
STORE_PUT = FaultPoint(
    "store.put", "a worker offers pages to the KV store", "drop", "duplicate", "error"
)
STORE_READ = FaultPoint(
    "store.read", "the KV store has read a put's pages; corrupt: a bit is wrong", "corrupt", "error"
)
STORE_FILL = FaultPoint(
    "store.fill",
    "the KV store begins a fill; corrupt: a bit of a held page is wrong",
    "corrupt",
    "error",
)
TIER_HOST = FaultPoint(
    "tier.host", "a page is read from host memory; corrupt: a bit is wrong", "corrupt", "error"
)
TIER_DISK_READ = FaultPoint(
    "tier.disk.read", "a page was read from local disk; corrupt: a bit is wrong", "corrupt", "error"
)
TIER_DISK_WRITE = FaultPoint(
    "tier.disk.write", "a page is written to local disk; error: the disk is full", "error"
)

BOARD = FaultBoard(
    ENGINE_STEP,
    SHIP_POST,
    FILL_NOTIFY,
    FILL_DIGEST,
    FILL_START,
    FILL_RENEW,
    FILL_STOP,
    FILL_EVENT_OUT,
    FILL_EVENT_IN,
    SESSION_SUBMIT,
    SESSION_EVENT,
    STORE_LOOKUP,
    STORE_PUT,
    STORE_READ,
    STORE_FILL,
    TIER_HOST,
    TIER_DISK_READ,
    TIER_DISK_WRITE,
)
"""The process-wide board on which fault points are registered."""
