"""What running requests bring to the next step: their last token, and drafts behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from weft.engine.memory.kv_memory import KvMemory, OutOfPages
from weft.engine.scheduler.limits import SchedulerLimits
from weft.engine.scheduler.pages import RequestPages
from weft.engine.scheduler.plan import (
    NO_DRAFTS,
    DraftShape,
    Plan,
    PlanItem,
    Run,
    RunningColumns,
    VerifyItem,
)
from weft.engine.scheduler.state import Request, State

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


class DraftGate(Protocol):
    """Decides whether drafts pay."""

    def shape(self, requests: Sequence[Request]) -> DraftShape:
        """Drafts that each of these, the running ones, brings to the next step."""

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
        self._max_chain = self._max_context_tokens = 0

    def draft(
        self, gate: DraftGate | None, is_on_device: bool, max_chain: int, max_context_tokens: int
    ) -> None:
        """Lets requests be drafted for.

        Args:
            gate: See `gate`.
            is_on_device: See `drafts_on_device`.
            max_chain: Drafts of a chain at most.
            max_context_tokens: For so many positions a request may have pages.
        """
        self.gate, self.drafts_on_device = gate, is_on_device
        self._max_chain, self._max_context_tokens = max_chain, max_context_tokens

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
        shape = NO_DRAFTS
        if self.gate is not None:
            most = self._max_step_tokens // len(requests) - 1
            shape = self.gate.shape(requests)
            if shape.num_drafts > most:
                shape = DraftShape.chain(max(0, min(shape.depth, self._max_chain, most)))
            if not (self.drafts_on_device and shape.num_drafts > 0):
                chosen &= _can_go_on(requests, is_drafting=shape.num_drafts > 0)
        lacking = chosen & (starts >= num_pages * self._page_size)
        for index in np.flatnonzero(lacking).tolist():
            request = requests[index]
            if request.state is not State.RUNNING or not self._grow(request, int(starts[index])):
                chosen[index] = False
        if lacking.any():
            # A later request's growth may have pre-empted an earlier one.
            chosen &= np.array([r.state is State.RUNNING for r in requests])
        verifies: list[VerifyItem] = []
        if shape.num_drafts > 0:
            for index in np.flatnonzero(chosen).tolist():
                if requests[index].speculates:
                    chosen[index] = False
                    num_left = int(ends[index] - starts[index]) - 1
                    item = self._verify(requests[index], int(starts[index]), shape, num_left)
                    verifies.append(item)
        if chosen.all():
            return Plan(requests, slots, starts, adapter_slots=adapter_slots)
        left = [requests[i] for i in np.flatnonzero(chosen).tolist()]
        if adapter_slots is not None:
            adapter_slots = adapter_slots[chosen]
        plan = Plan(left, slots[chosen], starts[chosen], adapter_slots=adapter_slots)
        plan.verifies = verifies
        return plan

    def add_prompts(self, plan: Plan, chunks: Sequence[PlanItem]) -> None:
        """Adds the chunks of a step. Beside many rows those of trees are not cheap: chains are
        drafted then."""
        plan.chunks = chunks
        if chunks and plan.has_trees:
            plan.verifies = [
                VerifyItem(item.request, item.start, min(item.max_accepted, self._max_chain))
                for item in plan.verifies
            ]

    def num_tokens_beside_prompts(self, plan: Plan) -> int:
        """New tokens of a plan without chunks, as they will be if it gets some."""
        if not plan.has_trees:
            return plan.num_tokens
        chains = (1 + min(item.max_accepted, self._max_chain) for item in plan.verifies)
        return len(plan.decodes) + sum(chains)

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

    def _verify(self, request: Request, start: int, shape: DraftShape, num_left: int) -> VerifyItem:
        """What a request brings that may accept at most `num_left` drafts."""
        if not shape.is_tree:
            num_drafts = self._grow_for_drafts(request, start, min(shape.num_drafts, num_left))
            return VerifyItem(request, start, num_drafts)
        # Most places are for drafts of which few are kept: they may lie behind the request's end.
        # All levels are grown, whatever may be accepted.
        num_places = min(shape.num_places, self._max_context_tokens - start - 1)
        num_places = self._grow_for_drafts(request, start, num_places) if num_left > 0 else 0
        tree = shape._replace(depth=min(shape.depth, num_left))
        return VerifyItem(request, start, min(shape.num_drafts, num_places), tree)

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
