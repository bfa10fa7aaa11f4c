"""What running requests bring to the next step: their last token, and drafts that follow it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from weft.contract.arrays import BoolArray
from weft.engine.base.drafts import DraftShape
from weft.engine.requests.pages import RequestPages
from weft.engine.requests.request import Request, State
from weft.engine.scheduler.columns import RequestColumns, RunningColumns
from weft.engine.scheduler.limits import SchedulerLimits
from weft.engine.scheduler.plan import NO_DRAFTS, Plan, PlanItem, VerifyItem
from weft.engine.scheduler.ports import DraftGate
from weft.pages.memory.page_memory import OutOfPages, PageMemory

MAX_DRAFTED_BESIDE = 8
"""Most running requests that get drafts in a step with prompts, if drafts are on the device. The
gate does not know what such steps cost, and with more requests most steps bring prompts.
"""


class Drafting(NamedTuple):
    """How steps have drafts."""

    gate: DraftGate | None
    """Decides how many drafts are worthwhile; None: speculation is off."""
    is_on_device: bool
    """Whether the drafter is on the device."""
    max_chain: int
    """Most drafts of a chain."""
    max_context_tokens: int
    """Most positions for which a request may have pages."""


class RunningPlans:
    """Plans the tokens of running requests and makes room for them.

    Args:
        preempt: Preempts the running request that loses the least work, and returns it. None: that
            request can be preempted only after a step under way.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pages: RequestPages,
        preempt: Callable[[], Request | None],
        drafting: Drafting | None = None,
    ) -> None:
        self._page_size = limits.page_size
        self._num_lanes = limits.num_lanes
        self._max_step_tokens = limits.max_step_tokens
        self._pages = pages
        self._memory: PageMemory = pages.memory
        self._preempt = preempt
        self._columns: RunningColumns | None = None
        """Columns of the running requests; None: the next plan makes them."""
        self._num_plain = 0
        """Plans launched since the last one with drafts. The two plans after one with drafts read
        the requests' positions again.
        """
        self._planned: tuple[RunningColumns, BoolArray] | None = None
        """Columns of the last plan until it is launched, and which requests bring a token each."""
        self._drafts: tuple[list[int], DraftShape] | None = None
        """Rows of these columns that get drafts, and the drafts' shape, if the step brings no
        prompts. None: the drafts are already in the plan.
        """
        self.gate = None if drafting is None else drafting.gate
        self.drafts_on_device = drafting is not None and drafting.is_on_device
        """Whether drafts start where the step under way ends, which only the device knows. Then a
        request gets new drafts while earlier drafts of it are being verified.
        """
        self._max_chain = 0 if drafting is None else drafting.max_chain
        self._max_context_tokens = 0 if drafting is None else drafting.max_context_tokens

    def joined(self, request: Request) -> None:
        if self._columns is not None:
            self._columns = self._columns.joined(request, self._page_size)

    def left(self, request: Request) -> None:
        if self._columns is not None:
            self._columns = self._columns.without(request)

    def has_exactly(self, columns: RequestColumns | None) -> bool:
        """Whether the running requests are those of a plan's columns, unchanged since. May return
        False although they are.
        """
        return self._columns is not None and self._columns.fixed is columns

    def plan(self, running: Sequence[Request], num_spared: int) -> Plan:
        """Plans one token of each running request, with drafts where they pay; plans no chunks.

        Args:
            num_spared: Tokens of a step that chains of drafts leave to prompts.
        """
        columns = self._columns
        has_drafts = self.gate is not None
        if columns is None or (has_drafts and (self._num_plain < 2 or self._num_lanes > 1)):
            fixed = RequestColumns.of(running) if columns is None else columns.fixed
            columns = self._columns = RunningColumns.of(fixed, self._page_size)
        fixed, starts = columns.fixed, columns.starts
        requests = fixed.requests
        chosen = starts < fixed.ends  # The other requests end with the token under way.
        if self._num_lanes > 1:
            chosen &= self._of_next_lane(requests)
        if fixed.has_beams:
            # The host decides how texts of a search go on when their step is committed.
            chosen &= np.array([r.beams is None or not r.num_launched for r in requests])
        shape = NO_DRAFTS
        if self.gate is not None:
            shape = self.gate.shape(requests)
            # A step with prompts has no trees.
            num_tokens = self._max_step_tokens - (0 if shape.is_tree else num_spared)
            most = num_tokens // len(requests) - 1
            if shape.num_drafts > most:
                shape = DraftShape.chain(max(0, min(shape.depth, self._max_chain, most)))
            if not self.drafts_on_device:
                chosen &= _can_go_on(requests, is_drafting=shape.num_drafts > 0)
        lacking = (chosen & (starts >= columns.limits)).nonzero()[0].tolist()
        if lacking and self._grow_at_once(columns, lacking):
            lacking = []
        for index in lacking:
            request = requests[index]
            if request.state is not State.RUNNING or not self._grow(request, int(starts[index])):
                chosen[index] = False
            columns.limits[index] = len(request.held.pages) * self._page_size
        if lacking and self._columns is not columns:
            # A later request's growth may have preempted an earlier one.
            chosen &= np.array([r.state is State.RUNNING for r in requests])
        self._planned, self._drafts, plan = (columns, chosen), None, Plan()
        if shape.num_drafts:
            rows = [row for row in np.flatnonzero(chosen).tolist() if requests[row].drafts.wanted]
            if self.drafts_on_device and len(requests) > MAX_DRAFTED_BESIDE:
                self._drafts = rows, shape
            else:
                self._add_drafts(plan, rows, shape)
        self._add_decodes(plan)
        return plan

    def _of_next_lane(self, requests: Sequence[Request]) -> BoolArray:
        """The requests that are in no step under way, as many as make lanes equal."""
        most = -(-len(requests) // self._num_lanes)
        free = [row for row, request in enumerate(requests) if not request.num_launched]
        chosen = np.zeros(len(requests), np.bool_)
        chosen[free[:most]] = True
        return chosen

    def _add_drafts(self, plan: Plan, rows: list[int], shape: DraftShape) -> None:
        assert self._planned is not None
        columns, chosen = self._planned
        chosen[rows] = False
        plan.verifies = self._verifies(columns, rows, shape)

    def _add_decodes(self, plan: Plan) -> None:
        assert self._planned is not None
        columns, chosen = self._planned
        fixed, starts = columns.fixed, columns.starts
        if not chosen.all():
            fixed, starts = fixed.of_rows(np.flatnonzero(chosen).tolist()), starts[chosen]
        plan.decodes, plan.slots, plan.starts = fixed.requests, fixed.slots, starts
        plan.columns = fixed

    def launch(self, plan: Plan) -> None:
        """Call it when the step planned last begins."""
        is_plain = not plan.verifies and plan.is_late is None
        self._num_plain = self._num_plain + 1 if is_plain else 0
        for request in plan.decodes:
            request.num_launched += 1
        planned, self._planned = self._planned, None
        if planned is None or planned[0] is not self._columns:
            self._columns = None  # Planning preempted a request, or no request ran.
        else:
            columns, chosen = planned
            self._columns = columns.launched(chosen)

    def add_prompts(self, plan: Plan, chunks: Sequence[PlanItem]) -> None:
        """Adds the chunks to a plan. Without chunks, adds the drafts that were held back. With
        chunks, turns trees into chains, since a tree's rows are not cheap together with many other
        rows.
        """
        plan.chunks = chunks
        if self._drafts is not None and not chunks:
            self._add_drafts(plan, *self._drafts)
            self._add_decodes(plan)
        elif chunks and plan.has_trees:
            plan.verifies = [
                VerifyItem(item.request, item.start, min(accepted, self._max_chain))
                for item, accepted in zip(plan.verifies, plan.most_accepted, strict=True)
            ]
        self._drafts = None
        if self.drafts_on_device and not self._num_plain and plan.decodes:
            is_late = np.array([r.num_verifying > 0 for r in plan.decodes], np.bool_)
            plan.is_late = is_late if is_late.any() else None

    def num_tokens_beside_prompts(self, plan: Plan) -> int:
        """Number of new tokens that the plan will have in addition to the chunks, if it
        gets any.
        """
        if not plan.has_trees:
            return plan.num_tokens
        num_drafts = sum(min(accepted, self._max_chain) for accepted in plan.most_accepted)
        return len(plan.decodes) + len(plan.verifies) + num_drafts

    def _grow_at_once(self, columns: RunningColumns, rows: list[int]) -> bool:
        """Gives each of these running requests the one page that it lacks. False, with nothing
        done, if this would take a page from another request.
        """
        requests, size = [columns.fixed.requests[row] for row in rows], self._page_size
        starts, namespace = columns.starts[rows], requests[0].namespace
        for request, start in zip(requests, starts.tolist(), strict=True):
            held = request.held
            if len(held.pages) * size != start or request.namespace != namespace:
                return False
            if held.num_promised:
                return False
        if len(rows) > self._memory.num_available_pages:
            return False
        self._pages.add_new(requests)
        columns.limits[rows] = starts + size
        return True

    def _grow(self, request: Request, position: int) -> bool:
        """False if the request has to wait: it was preempted itself, or pages come back soon."""
        while self._pages.num_lacking(request, position + 1) > 0:
            if request.held.num_promised:
                self._pages.take_promised(request, 1)
                continue
            try:
                self._pages.add_new((request,))
            except OutOfPages:
                if self._pages.num_returning:
                    return False
                victim = self._preempt()
                if victim is None or victim is request:
                    return False
        return True

    def _verifies(
        self, columns: RunningColumns, rows: list[int], shape: DraftShape
    ) -> list[VerifyItem]:
        requests = [columns.fixed.requests[row] for row in rows]
        starts = columns.starts[rows]
        num_left = (columns.fixed.ends[rows] - starts - 1).tolist()
        each = zip(requests, starts.tolist(), num_left, columns.limits[rows].tolist(), strict=True)
        if shape.is_tree:
            return [self._verify_tree(one, start, shape, left) for one, start, left, _ in each]
        items, most = [], shape.num_drafts
        for request, start, left, limit in each:
            count = most if most < left else left
            if start + count >= limit:
                count = self._grow_for_drafts(request, start, count)
            items.append(VerifyItem(request, start, count))
        return items

    def _verify_tree(
        self, request: Request, start: int, shape: DraftShape, num_left: int
    ) -> VerifyItem:
        # A tree has more places than drafts that can be kept, so some may lie after the request's
        # last position. The tree is grown to its full depth in any case.
        num_places = min(shape.num_places, self._max_context_tokens - start - 1)
        num_places = self._grow_for_drafts(request, start, num_places) if num_left > 0 else 0
        tree = shape._replace(depth=min(shape.depth, num_left))
        return VerifyItem(request, start, min(shape.num_drafts, num_places), tree)

    def _grow_for_drafts(self, request: Request, start: int, num_drafts: int) -> int:
        """Never preempts another request. Returns the number of drafts for which there is room."""
        while self._pages.num_lacking(request, start + num_drafts + 1) > 0:
            if self._memory.num_available_pages < 1:
                return len(request.held.pages) * self._page_size - start - 1
            self._pages.add_new((request,))
        return num_drafts


def _can_go_on(requests: Sequence[Request], *, is_drafting: bool) -> BoolArray:
    """Whether each request can take another step before the one under way is committed. It cannot
    while drafts of it are verified, or while the token is unknown that new drafts would follow.
    """
    return np.array(
        [
            not request.num_verifying
            and not (is_drafting and request.drafts.wanted and request.num_launched)
            for request in requests
        ]
    )
