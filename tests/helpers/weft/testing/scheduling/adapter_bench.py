"""The adapters of a worker around a device that is told of, not there; no torch, no threads.

A row of the device holds the digest of the adapter that was written to it last.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from weft.checkpoint.adapters.limits import LoraLimits
from weft.checkpoint.adapters.rows import DevicePlace
from weft.contract.adapters import AdapterOrder, AdapterState
from weft.contract.errors import AdapterError, WeftError
from weft.engine.base.background import BackgroundJob
from weft.engine.features.lora import manager as manager_module
from weft.engine.features.lora.manager import AdapterManager
from weft.engine.model.adapters.weights import HostWeights
from weft.engine.scheduler.scheduler import Scheduler

ROW_BYTES = 100


@dataclass(frozen=True)
class FakeWeights:
    """An adapter of which only sizes matter."""

    digest: bytes
    rank: int
    needs: Mapping[str, int]
    left_out: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return ROW_BYTES * sum(self.needs.values())


class LateMover:
    """Stands in for `BackgroundThread`: does its work late, on the thread that takes it."""

    rng = random.Random()
    early_chance = 0.5

    def __init__(self, name: str, wake: Callable[[], None], host: object = None) -> None:
        self.current: BackgroundJob | None = None
        self._moves: deque[BackgroundJob] = deque()

    @property
    def num_open(self) -> int:
        """Number of jobs that have not ended."""
        return len(self._moves)

    def give(self, move: BackgroundJob) -> None:
        """Queues a job."""
        self._moves.append(move)

    def take(self) -> bool:
        """Runs some of the jobs."""
        has_any = False
        while self._moves and self.rng.random() < self.early_chance:
            has_any = True
            self._moves[0].run()
            self._moves.popleft().end()
        return has_any

    def stuck_s(self, now: float) -> float:
        """Always 0: there is no thread."""
        return 0.0

    def close(self) -> None:
        """Does nothing: there is no thread."""


class AdapterBench:
    """Adapters by directory, a manager of them, and what the device's rows hold.

    Args:
        patch: Takes the threads out of the manager.
        rng: How late moves are.
        limits: Of the manager.
        weights: What lies in each directory; None: it cannot be read.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        rng: random.Random,
        limits: LoraLimits,
        weights: Mapping[str, FakeWeights | None],
    ) -> None:
        patch.setattr(manager_module, "BackgroundThread", LateMover)
        patch.setattr(LateMover, "rng", rng)
        self.weights = dict(weights)
        self.limits = limits
        self.content = {kind: [b""] * count for kind, count in limits.num_rows.items()}
        self.slots: dict[int, DevicePlace] = {}
        self.manager = AdapterManager(limits, self, lambda: None)
        self.replies: dict[int, WeftError | None] = {}
        self._num_orders = 0
        self._told: dict[bytes, AdapterState] = {}

    def attach(self, scheduler: Scheduler) -> None:
        """Takes the scheduler that asks for adapters."""
        self.manager.attach(scheduler.waitlist, self.reply, scheduler.finish)

    # -- what the manager asks for ---------------------------------------------------------------

    def read(self, directory: str, *, is_lenient: bool) -> HostWeights:
        """See `LoraPool.read`."""
        weights = self.weights[directory]
        if weights is None:
            raise AdapterError(f"{directory} is damaged")
        return weights

    def write(self, place: DevicePlace, weights: HostWeights) -> None:
        """See `LoraPool.write`."""
        assert {kind: len(rows) for kind, rows in place.rows.items()} == dict(weights.needs)
        self.slots[place.slot] = place
        for kind, rows in place.rows.items():
            for row in rows:
                self.content[kind][row] = weights.digest

    def reply(self, query: int, error: WeftError | None) -> None:
        """Notes the outcome of an order."""
        assert query not in self.replies, "an order is answered once"
        self.replies[query] = error

    # -- what tests do ---------------------------------------------------------------------------

    def order(self, directory: str, *, unload: bool = False, is_pinned: bool = False) -> int:
        """Loads or unloads what lies in a directory; returns the order's number."""
        self._num_orders += 1
        order = AdapterOrder(
            query=self._num_orders,
            action="unload" if unload else "load",
            digest=directory.encode(),
            name=directory,
            directory=directory,
            is_pinned=is_pinned,
        )
        self.manager.order(order)
        return order.query

    def load(self, directory: str, *, is_pinned: bool = False) -> WeftError | None:
        """Loads, and waits for the answer."""
        return self.answer(self.order(directory, is_pinned=is_pinned))

    def answer(self, query: int) -> WeftError | None:
        """Waits for the answer to an order."""
        for _ in range(1000):
            if query in self.replies:
                return self.replies[query]
            self.turn()
        raise AssertionError("an order was not answered")

    def turn(self) -> None:
        """Runs one turn of the manager, and checks the invariants."""
        self.manager.turn()
        self.manager.residency.check_integrity()
        self._check_changes()

    def _check_changes(self) -> None:
        """Checks that the sum of all reported changes is the whole state."""
        changed, gone = self.manager.take_changes()
        self._told |= {state.digest: state for state in changed}
        for digest in gone:
            self._told.pop(digest, None)
        assert self._told == {state.digest: state for state in self.manager.states()}
        assert self.manager.take_changes() == ([], [])

    def state(self, directory: str) -> str:
        """State of an adapter; empty if unknown."""
        states = {state.name: state.state for state in self.manager.states()}
        return states.get(directory, "")

    def check(self, slot: int, digest: bytes) -> None:
        """A step finds an adapter where it was told."""
        for kind, rows in self.slots[slot].rows.items():
            for row in rows:
                assert self.content[kind][row] == digest, "a step reads another adapter's rows"
