"""Overlap: the host plans and starts a step while the device still runs the previous one.

    host     plan 2, start 2 | wait 1, commit 1 | masks 2, draw 2 | plan 3, start 3 | wait 2, ...
    device   ......forward 1, draw 1.......|........forward 2........, draw 2.|....forward 3....

With stages, as many steps are under way as there are lanes (`ExecutorFacts.num_lanes`), none of
which needs another's tokens. A turn begins steps until all lanes are taken or nothing is left to
plan, and then commits the oldest.

A step's forward pass needs only the sampled tokens of the step before, and these stay on the
device. Sampling may need those tokens on the host, where masks of constraints follow them. So it
begins when the step before is committed; the device runs the forward pass meanwhile.

Without overlap, a step is committed in the turn in which it begins. Everything else is the same.

On a worker that exchanges pages, a turn may leave the step under way (`leaves`): it returns, and a
later turn commits the step once it has ended. The step that follows a step of decodes then begins
as late as possible (`lead_s`), so that requests that arrive meanwhile take part in it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.contract import faults
from weft.contract.arrays import Int64Array
from weft.contract.clock import Clock
from weft.contract.give_way import HostPriority
from weft.contract.pages import PageCopy
from weft.contract.spans import Media
from weft.engine.base.device_copies import Mark
from weft.engine.executor.orders import CopyPages, ShiftRotations
from weft.engine.executor.port import Executor, Logits
from weft.engine.loop.draws import SampledTokens, StepSampler, wait_for_tokens
from weft.engine.loop.encode import media_order, step_input
from weft.engine.loop.flight import FlightRecorder
from weft.engine.loop.step_ends import StepEnds
from weft.engine.requests.media_rows import FilledMedia, MediaRows
from weft.engine.requests.request import Request
from weft.engine.sampling.pending import PendingTokens
from weft.engine.scheduler.plan import Plan
from weft.engine.scheduler.ports import Drafter
from weft.engine.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class StepOwner(Protocol):
    def step_done(self, plan: Plan, drawn: SampledTokens | None, duration_s: float) -> None:
        """Called when a step was computed and its KV committed, in the order in which steps began.

        Args:
            plan: The step's plan, empty if the step failed. Requests may have ended since.
            drawn: The sampled tokens, those of decodes first; None if the step sampled none.
            duration_s: Time since the end of the step before, or since the step's own begin if the
                engine was idle until then.
        """
        ...

    def step_failed(self, plan: Plan, error: Exception) -> None:
        """Called when a step has failed. All its requests fail, since they share the
        computation.
        """
        ...


@dataclass(slots=True)
class _Step:
    number: int
    plan: Plan
    began_at: float
    """When the step began; the end of the step before, if the host was not idle in between."""
    drawing: Sequence[Request]
    """Requests that get a token."""
    logits: Logits | None = None
    pending: PendingTokens | None = None
    mark: Mark | None = None
    """Mark of the step's device work that follows the sampling; None: there is none."""
    ended_at: float = 0.0
    is_ready: bool = True
    """Whether no other step was under way when this one began."""
    is_plain: bool = False
    """Whether the step should take as long as a step of decodes without drafts."""
    end: Mark | None = None
    """Mark of all of the step's device work; set where turns may leave the step."""
    incoming: Sequence[Request] = ()
    """Requests whose pages are loaded while the step computes."""


INCOMING_TIMEOUT_S = 1.0
"""Longest wait, after a step, for the outcome of a load whose pages the step has read."""
MAX_PLAIN_TOKENS = 32
"""Most prompt tokens with which a step still counts as one of decodes. Shipped prompts end with a
few tokens.
"""


class StepPipeline:
    """Runs plans, with at most one further step enqueued while one is under way.

    Args:
        is_overlapped: Whether a step begins before the one before it is committed.
        drafter: Drafter of requests with drafts; None: there are none.
        media: The media in prompts; None: prompts have none.
        host: The lock that other threads yield; released while this thread waits for the device.
        lead_s: If turns leave steps: time before the expected end of a step of decodes at which the
            next one begins, at the latest (`StepEnds`).
    """

    def __init__(
        self,
        executor: Executor,
        step_sampler: StepSampler,
        scheduler: Scheduler,
        owner: StepOwner,
        clock: Clock,
        *,
        is_overlapped: bool,
        drafter: Drafter | None = None,
        media: MediaRows | FilledMedia | None = None,
        host: HostPriority,
        lead_s: float = math.inf,
    ) -> None:
        self._drafter = drafter
        self._media = media
        self._executor = executor
        self._step_sampler = step_sampler
        self._scheduler = scheduler
        self._owner = owner
        self._clock = clock
        self._is_overlapped = is_overlapped
        self._is_asynchronous = executor.facts.is_asynchronous
        self._host = host
        self._ends = StepEnds(lead_s)
        self.leaves = False
        """Whether a turn may return while a step is under way, to be called again."""
        self._under_way: _Step | None = None
        self._next: _Step | None = None
        """The step that follows `_under_way` on the device. Its sampling begins once that one is
        committed. None after a turn that waited for a step.
        """
        self._num_lanes = executor.facts.num_lanes
        self._in_lanes = deque[_Step]()
        """Steps under way where there are several lanes, oldest first."""
        self._last_ended_at = 0.0
        self._goes_on = False
        """Whether the last turn ran a step and left work. The next step's time then counts from the
        end of that step.
        """
        self.flight: FlightRecorder | None = None
        """Records each plan for crash dumps."""

    @property
    def num_steps(self) -> int:
        few = (self._under_way is not None) + (self._next is not None)
        return few + len(self._in_lanes)

    @property
    def num_chunk_tokens(self) -> int:
        """Prompt tokens that the device has still to compute in steps that have begun. The step
        under way counts half, as it is half done on average.
        """
        of_next = self._next.plan.num_chunk_tokens if self._next is not None else 0
        current = self._under_way.plan.num_chunk_tokens if self._under_way is not None else 0
        in_lanes = sum(step.plan.num_chunk_tokens for step in self._in_lanes)
        return of_next + current // 2 + in_lanes

    def may_begin(self) -> bool:
        """Whether this turn may begin a step: none follows the one under way, and that one ends
        soon or at an unknown time. None follows a step that reads pages which are being loaded,
        since what that step computes may have to be dropped.
        """
        step = self._under_way
        if self._next is not None or (step is not None and step.incoming):
            return False
        if step is None or not self.leaves:
            return True
        return self._ends.begins_in_s(self._passed_s(step), is_plain=step.is_plain) <= 0.0

    def rest_s(self) -> float:
        """Seconds that the caller may wait after a turn that left a step under way. It may return
        earlier to look whether the step has ended.
        """
        step = self._under_way
        if step is None:
            return 0.0
        return self._ends.rest_s(
            self._passed_s(step),
            step.plan.num_tokens,
            is_plain=step.is_plain,
            is_followed=self._next is not None,
        )

    def _passed_s(self, step: _Step) -> float:
        return self._clock() - max(step.began_at, self._last_ended_at)

    def _is_left(self, step: _Step) -> bool:
        if step.end is None or step.end.is_reached():
            return False
        return self.rest_s() > 0.0

    def host_goes_on(self) -> None:
        """Makes background threads yield to this one. Does nothing on a CPU, where this thread
        computes.
        """
        if self._is_asynchronous:
            self._host.take_cores()

    def host_rests(self) -> None:
        """Lets background threads run."""
        if self._is_asynchronous:
            self._host.yield_cores()

    def turn(self, plan: Plan) -> bool:
        """Starts a step, if `plan` has any work, and commits the previous one if it has ended.
        `plan` is empty unless `may_begin`.

        Returns:
            Whether the turn got past the step under way: committed it, or began one with none under
                way. If not, that step and a step that follows it may still be under way
                (`num_steps`).
        """
        if self._num_lanes > 1:
            return self._turn_lanes(plan)
        if len(plan):
            # With no step under way, tokens that masks depend on are known before the forward pass.
            self._next = self._start(plan, is_ready=self._under_way is None)
        before = self._under_way
        if before is not None:
            if self.leaves and self._is_left(before):
                return False
            self._under_way = None
            self._end(before)
        step, self._next = self._next, None
        if step is not None:
            self._draw(step, is_ready=step.is_ready)
            if self._is_overlapped:
                self._under_way = step
            else:
                self._end(step)
        has_worked = step is not None or before is not None
        self._goes_on = has_worked and self._scheduler.has_work
        if self.flight is not None and has_worked and self._under_way is None:
            self.flight.end()
        return has_worked

    def _turn_lanes(self, plan: Plan) -> bool:
        steps = self._in_lanes
        if len(plan):
            step = self._start(plan, is_ready=not steps)
            if self._is_asynchronous and not steps:
                self._draw(step, is_ready=True)
            steps.append(step)
            if len(steps) < self._num_lanes:
                return True
        if not steps:
            return False
        step = steps.popleft()
        if not self._is_asynchronous:
            self._draw(step, is_ready=step.is_ready)
        self._end(step)
        if self._is_asynchronous and steps:
            # All steps sample into the same memory, so the next one's sampling begins only now that
            # the tokens of this step have been read.
            self._draw(steps[0], is_ready=False)
        self._goes_on = bool(steps) or self._scheduler.has_work
        if self.flight is not None and not steps:
            self.flight.end()
        return True

    def _start(self, plan: Plan, *, is_ready: bool) -> _Step:
        drawing = plan.decodes
        if plan.verifies or plan.chunks:
            drawing = [*drawing, *(item.request for item in plan.verifies)]
            drawing += [item.request for item in plan.drawing_chunks]
        started_at = self._clock() if self.leaves else 0.0
        # Without overlap, a step's duration includes the time since the step before. The gate of
        # drafts compares the durations of steps.
        began_at = self._last_ended_at if self._goes_on else self._clock()
        step = _Step(self._scheduler.launch(plan), plan, began_at, drawing, is_ready=is_ready)
        if self.leaves:
            step.is_plain = not plan.verifies and plan.num_chunk_tokens <= MAX_PLAIN_TOKENS
        if self.flight is not None:
            self.flight.begin(plan)
        try:
            if faults.ENGINE_STEP.is_armed:
                faults.ENGINE_STEP.fire()
            if is_ready:
                self._step_sampler.prepare(plan, drawing)
            self._scheduler.pages.make_copies(self._copy)
            if plan.verifies:
                assert self._drafter is not None
                drafting_at = self._clock()
                plan.drafts = self._drafter.draft(plan.verifies)
                plan.drafting_s = self._clock() - drafting_at
            if self._media is not None:
                self._media.encode(self._encode)
                self._media.axes.shift((item.request for item in plan.chunks), self._shift)
            made = step_input(
                plan,
                self._executor.page_table,
                self._executor.facts.page_size,
                self._media,
                brings_tokens=self._num_lanes > 1,
            )
            for companion in self._scheduler.pages.companions:
                companion.begin_step(plan.companion_rows, made)
            if made.waits_for_layers:
                step.incoming = [each.request for each in plan.chunks if each.request.held.incoming]
                plan.waits_for_layers = True
            launched = self._executor.launch(made)
            step.logits, plan.scores, plan.vectors = launched
        except Exception as error:
            self._fail(step, error)
        if self.leaves:
            self._ends.learn_start(self._clock() - started_at)
        return step

    def _encode(self, due: Sequence[tuple[Media, Int64Array]]) -> None:
        self._executor.order(media_order(due))

    def _shift(self, slot: int, shift: int) -> None:
        self._executor.order(ShiftRotations(slot, shift))

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        self._executor.order(CopyPages(*zip(*copies, strict=True)))

    def _draw(self, step: _Step, *, is_ready: bool) -> None:
        """All earlier steps must be committed."""
        try:
            if step.logits is None:
                step.mark = step.mark or self._executor.mark()
            else:
                if not is_ready:
                    plan, slots = step.plan, None
                    none_ended = self._scheduler.running_plans.has_exactly(plan.columns)
                    if none_ended and step.drawing is plan.decodes:
                        slots = plan.slots
                    self._step_sampler.prepare(plan, step.drawing, slots, is_late=True)
                step.pending = self._step_sampler.begin(step.plan, step.drawing, step.logits)
                step.logits = None
                if not step.pending.are_kept:
                    self._executor.keep(step.pending.tokens)
                if step.plan.has_trees or self._executor.facts.writes_after_draw:
                    # Pages are still written after the sampling: K and V of the drafts that were
                    # accepted in trees are moved, or other ranks write theirs.
                    step.mark = self._executor.mark()
            if self.leaves:
                # The step has no work after its mark, which therefore also marks its end.
                step.end = step.mark or self._executor.mark()
        except Exception as error:
            self._fail(step, error)
        step.ended_at = self._clock()

    def _end(self, step: _Step) -> None:
        drawn: SampledTokens | None = None
        self.host_rests()
        try:
            if step.mark is not None:
                step.mark.wait()
            if step.pending is not None:
                drawn = wait_for_tokens(step.plan, step.drawing, step.pending)
            if step.incoming:
                drawn = self._settle(step, drawn)
            self._executor.check()  # Before any result of the step is sent.
        except Exception as error:
            self._fail(step, error)
        self.host_goes_on()
        self._scheduler.commit(step.number, step.plan)
        if self._is_asynchronous:
            step.ended_at = self._clock()
        # The time that a slow grammar took is not part of the step's duration. It must not change
        # the forecast of later steps, or the age at which the engine counts as stalled.
        lost_s = self._step_sampler.take_lost_s()
        duration_s = max(0.0, step.ended_at - max(step.began_at, self._last_ended_at) - lost_s)
        self._last_ended_at = step.ended_at
        if self.leaves and not step.incoming:
            self._ends.learn(duration_s, step.plan.num_tokens, is_plain=step.is_plain)
        self._owner.step_done(step.plan, drawn, duration_s)

    def _settle(self, step: _Step, drawn: SampledTokens | None) -> SampledTokens | None:
        """Publishes pages that were loaded while the step computed. Drops the tokens of requests
        whose pages did not come whole; `Scheduler.commit` begins these anew.
        """
        lost = list[Request]()
        for request in step.incoming:
            incoming = request.held.incoming
            if incoming is None:
                continue  # All pages came before the step, or the request has ended.
            if incoming.wait(INCOMING_TIMEOUT_S):
                request.held.end_load()
                self._scheduler.publish(request)
            else:
                lost.append(request)
        return drawn.without(lost) if lost and drawn is not None else drawn

    def _fail(self, step: _Step, error: Exception) -> None:
        """Fails the step's requests. The step itself stays, since the device may still
        work on it.
        """
        logger.exception("a step failed", exc_info=error)
        self._step_sampler.give_up()
        plan, step.plan = step.plan, Plan()
        step.logits = step.pending = None
        self._owner.step_failed(plan, error)
        try:
            step.mark = self._executor.mark()
        except RuntimeError:
            logger.exception("the device takes no more work")
