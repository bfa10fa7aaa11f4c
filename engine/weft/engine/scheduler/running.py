"""What running requests bring to the next step: their last token, and drafts behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from weft.engine.memory.kv_memory import KvMemory, OutOfPages
from weft.engine.scheduler.limits import SchedulerLimits
from weft.engine.scheduler.pages import RequestPages
from weft.engine.scheduler.plan import Plan, Run, RunningColumns, VerifyItem
from weft.engine.scheduler.state import Request, State

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


class DraftGate(Protocol):
    """Decides whether drafts pay."""

    def max_drafts(self, requests: Sequence[Request]) -> int:
        """Drafts that each of these, the running ones, brings to the next step; 0: none."""

    def observe(self, plan: Plan, runs: Sequence[Run], duration_s: float) -> None:
        """A step has ended.

        Args:
            plan: Its plan.
            runs: Of its requests with drafts.
            duration_s: How long it took, drafting included.
        """


class RunningPlans:
    """Plans the tokens of running requests and makes room for them.

    Args:
        limits: Budgets.
        pages: Of requests.
        preempt: Pre-empts the running request that loses least, and returns it.
    """

    def __init__(
        self, limits: SchedulerLimits, pages: RequestPages, preempt: Callable[[], Request]
    ) -> None:
        self._page_size = limits.page_size
        self._max_step_tokens = limits.max_step_tokens
        self._pages = pages
        self._memory: KvMemory = pages.memory
        self._preempt = preempt
        self._columns: RunningColumns | None = None
        self.gate: DraftGate | None = None
        """None: nothing is drafted."""
        self.drafts_on_device = False
        """Drafts begin where the step under way will end, which only the device knows: a request
        goes on with drafts while others of it are verified."""

    def draft(self, gate: DraftGate | None, is_on_device: bool) -> None:
        """Lets requests be drafted for; see `gate` and `drafts_on_device`."""
        self.gate, self.drafts_on_device = gate, is_on_device

    def changed(self) -> None:
        """Others run now than at the last `plan`."""
        self._columns = None

    def plan(self, running: Sequence[Request]) -> Plan:
        """A token of each request, or one with drafts; no chunks."""
        if self._columns is None:
            self._columns = RunningColumns.of(running)
        requests, slots, ends, adapter_slots = self._columns
        starts = np.array([r.num_computed + r.num_launched for r in requests], np.int64)
        num_pages = np.array([len(r.pages) for r in requests], np.int64)
        chosen = starts < ends  # Else the token under way is the last one.
        max_drafts = 0
        if self.gate is not None:
            most = self._max_step_tokens // len(requests) - 1
            max_drafts = min(self.gate.max_drafts(requests), most)
            if not (self.drafts_on_device and max_drafts > 0):
                chosen &= _can_go_on(requests, is_drafting=max_drafts > 0)
        lacking = chosen & (starts >= num_pages * self._page_size)
        for index in np.flatnonzero(lacking).tolist():
            request = requests[index]
            if request.state is not State.RUNNING or not self._grow(request, int(starts[index])):
                chosen[index] = False
        if lacking.any():
            # A later request's growth may have pre-empted an earlier one.
            chosen &= np.array([r.state is State.RUNNING for r in requests])
        verifies: list[VerifyItem] = []
        if max_drafts > 0:
            for index in np.flatnonzero(chosen).tolist():
                if requests[index].speculates:
                    chosen[index] = False
                    start = int(starts[index])
                    num_drafts = min(max_drafts, int(ends[index]) - start - 1)
                    num_drafts = self._grow_for_drafts(requests[index], start, num_drafts)
                    verifies.append(VerifyItem(requests[index], start, num_drafts))
        if chosen.all():
            return Plan(requests, slots, starts, adapter_slots=adapter_slots)
        left = [requests[i] for i in np.flatnonzero(chosen).tolist()]
        if adapter_slots is not None:
            adapter_slots = adapter_slots[chosen]
        plan = Plan(left, slots[chosen], starts[chosen], adapter_slots=adapter_slots)
        plan.verifies = verifies
        return plan

    def _grow(self, request: Request, position: int) -> bool:
        """Makes room for a token.

        Returns:
            False when it has to wait: the request itself was pre-empted, or pages come back soon.
        """
        while len(request.pages) * self._page_size <= position:
            try:
                request.pages += self._memory.allocate(1, request.namespace)
            except OutOfPages:
                if self._pages.num_returning:
                    return False
                if self._preempt() is request:
                    return False
        return True

    def _grow_for_drafts(self, request: Request, start: int, num_drafts: int) -> int:
        """Makes room for drafts behind position `start`, as far as nobody loses anything by it.

        Returns:
            For how many there is.
        """
        while len(request.pages) * self._page_size <= start + num_drafts:
            if self._memory.num_available_pages < 1:
                return len(request.pages) * self._page_size - start - 1
            request.pages += self._memory.allocate(1, request.namespace)
        return num_drafts


def _can_go_on(requests: Sequence[Request], *, is_drafting: bool) -> BoolArray:
    """By request: a step of it that is under way does not keep it from the next one.

    How many drafts a step accepts is not known before its end. Neither is the token that drafts
    are to follow.
    """
    return np.array(
        [
            not request.num_verifying
            and not (is_drafting and request.speculates and request.num_launched)
            for request in requests
        ]
    )
