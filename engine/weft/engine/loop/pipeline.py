"""Overlap: the host plans and starts a step while the device still runs the previous one.

    host     plan 2, start 2 | wait 1, commit 1 | masks 2, draw 2 | plan 3, start 3 | wait 2, ...
    device   ......forward 1, draw 1.......|........forward 2........, draw 2.|....forward 3....

A step's forward needs of the step before only the tokens that it draws, and these stay on the
device. Its drawing may need them on the host (masks of constraints follow them), so it begins when
the step before is committed; the device has the forward to do meanwhile.

Not overlapped, a step is committed in the turn in which it begins. All else is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.engine.base import faults
from weft.engine.base.clock import Clock
from weft.engine.base.device_copies import Mark
from weft.engine.base.give_way import HostPriority
from weft.engine.drawing.draws import Draw, Drawing, Drawn
from weft.engine.drawing.encode import step_input
from weft.engine.executor.port import Drawable, Executor
from weft.engine.loop.flight import FlightRecorder
from weft.engine.scheduler.plan import Plan
from weft.engine.scheduler.ports import Drafter
from weft.engine.scheduler.scheduler import Scheduler
from weft.engine.scheduler.state import Request

logger = logging.getLogger(__name__)


class StepOwner(Protocol):
    """Receives the results of steps."""

    def step_done(self, plan: Plan, drawn: Drawn | None, duration_s: float) -> None:
        """Called when a step was computed and its KV committed, in the order in which steps began.

        Args:
            plan: Its plan; an empty one if it failed. Requests may have ended since.
            drawn: Tokens, of the decodes first; None if none were.
            duration_s: From the end of the step before, what the host did in between included, or
                from its own begin if there was nothing to do until then.
        """
        ...

    def step_failed(self, plan: Plan, error: Exception) -> None:
        """Called when a step has failed. Its requests share the computation, so none can go on."""
        ...


@dataclass(slots=True)
class _Step:
    number: int
    plan: Plan
    began_at: float
    """When the step began; if the host went on at once, the end of the step before."""
    drawing: Sequence[Request]
    """Requests that draw a token."""
    drawable: Drawable | None = None
    draw: Draw | None = None
    mark: Mark | None = None
    """Work of the device for this step that does not end with drawing."""
    ended_at: float = 0.0


class StepPipeline:
    """Runs plans, with at most one step enqueued behind another.

    Args:
        executor: The device.
        drawing: Tokens.
        scheduler: Made the plans.
        owner: Is told the outcomes.
        clock: Monotonic seconds.
        is_overlapped: A step begins before the one before it is committed.
        drafter: Drafter of requests with drafts; None: there are none.
        host: Is told when this thread waits, if the device works by itself.
    """

    def __init__(
        self,
        executor: Executor,
        drawing: Drawing,
        scheduler: Scheduler,
        owner: StepOwner,
        clock: Clock,
        *,
        is_overlapped: bool,
        drafter: Drafter | None = None,
        host: HostPriority,
    ) -> None:
        self._drafter = drafter
        self._executor = executor
        self._drawing = drawing
        self._scheduler = scheduler
        self._owner = owner
        self._clock = clock
        self._is_overlapped = is_overlapped
        self._host = host
        self._flying: _Step | None = None
        self._last_ended_at = 0.0
        self._goes_on = False
        """Whether the last turn had work and left some."""
        self.flight: FlightRecorder | None = None
        """Records each plan for crash dumps."""

    @property
    def num_steps(self) -> int:
        """Number of steps that have begun and are not committed."""
        return int(self._flying is not None)

    def host_goes_on(self) -> None:
        """Other threads give way to this one; not where it computes the steps itself, on a CPU."""
        if self._executor.is_asynchronous:
            self._host.begin()

    def host_rests(self) -> None:
        """Other threads may go on."""
        self._host.end()

    def turn(self, plan: Plan) -> bool:
        """Starts a step, if there is anything to do, and commits the previous one.

        Returns:
            There was a step to begin or to commit.
        """
        before, self._flying = self._flying, None
        # If no step is under way, masks depend on nothing that is still to come.
        is_ready = before is None
        step = self._start(plan, is_ready=is_ready) if len(plan) else None
        if before is not None:
            self._end(before)
        if step is not None:
            self._draw(step, is_ready=is_ready)
            if self._is_overlapped:
                self._flying = step
            else:
                self._end(step)
        has_worked = step is not None or before is not None
        self._goes_on = has_worked and self._scheduler.has_work
        if self.flight is not None and has_worked and self._flying is None:
            self.flight.end()
        return has_worked

    def _start(self, plan: Plan, *, is_ready: bool) -> _Step:
        """Enqueues the forward pass of a step."""
        drawing = plan.decodes
        if plan.verifies or plan.chunks:
            drawing = [*drawing, *(item.request for item in plan.verifies)]
            drawing += [item.request for item in plan.drawing_chunks]
        # Without overlap a step also costs the time since the step before, and gates compare that.
        began_at = self._last_ended_at if self._goes_on else self._clock()
        step = _Step(self._scheduler.launch(plan), plan, began_at, drawing)
        if self.flight is not None:
            self.flight.begin(plan)
        try:
            if faults.ENGINE_STEP.is_armed:
                faults.ENGINE_STEP.fire()
            if is_ready:
                self._drawing.prepare(plan, drawing)
            self._scheduler.pages.make_copies(self._executor.copy)
            if plan.verifies:
                assert self._drafter is not None
                began_at = self._clock()
                plan.drafts = self._drafter.draft(plan.verifies)
                plan.drafting_s = self._clock() - began_at
            launched = self._executor.launch(
                step_input(plan, self._executor.page_table, self._executor.page_size)
            )
            step.drawable, plan.scores = launched
        except Exception as error:
            self._fail(step, error)
        return step

    def _draw(self, step: _Step, *, is_ready: bool) -> None:
        """Enqueues the drawing of tokens; all earlier steps are committed."""
        try:
            if step.drawable is None:
                step.mark = step.mark or self._executor.mark()
            else:
                if not is_ready:
                    plan, slots = step.plan, None
                    none_ended = self._scheduler.running_plans.has_exactly(plan.columns)
                    if none_ended and step.drawing is plan.decodes:
                        slots = plan.slots
                    self._drawing.prepare(plan, step.drawing, slots, is_late=True)
                step.draw = self._drawing.begin(step.plan, step.drawing, step.drawable)
                step.drawable = None
                if not step.draw.are_kept:
                    self._executor.keep(step.draw.tokens)
                if step.plan.has_trees:
                    # K and V of accepted drafts are moved after the drawing.
                    step.mark = self._executor.mark()
        except Exception as error:
            self._fail(step, error)
        step.ended_at = self._clock()

    def _end(self, step: _Step) -> None:
        """Waits for the device and commits the step."""
        drawn: Drawn | None = None
        self.host_rests()
        try:
            if step.mark is not None:
                step.mark.wait()
            if step.draw is not None:
                drawn = step.draw.wait()
        except Exception as error:
            self._fail(step, error)
        self.host_goes_on()
        self._scheduler.commit(step.number, step.plan)
        if self._executor.is_asynchronous:
            step.ended_at = self._clock()
        # Time lost to a slow grammar is no measure of a step: it must neither enter the forecast of
        # the next steps nor raise the limit after which the engine counts as stalled.
        lost_s = self._drawing.take_lost_s()
        duration_s = max(0.0, step.ended_at - max(step.began_at, self._last_ended_at) - lost_s)
        self._last_ended_at = step.ended_at
        self._owner.step_done(step.plan, drawn, duration_s)

    def _fail(self, step: _Step, error: Exception) -> None:
        """Fails the step's requests; the step is kept, since the device may still work on it."""
        logger.exception("a step failed", exc_info=error)
        self._drawing.give_up()
        plan, step.plan = step.plan, Plan()
        step.drawable = step.draw = None
        self._owner.step_failed(plan, error)
        try:
            step.mark = self._executor.mark()
        except RuntimeError:
            logger.exception("the device takes no more work")
