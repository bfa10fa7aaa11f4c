"""Decides what each step computes. Owns the state of requests and knows no tensors.

A step is planned, launched and committed. The next step may be planned before this one is
committed. Then everything about a request is known except its new token, and whether that token
ends the request. A request that may end with the step under way is planned all the same; if it does
end, its next token is dropped.

`plan` first gives every running request its next token, and drafts to verify where they pay. With
the tokens that are left it continues prompts in page-aligned chunks, then admits waiting requests
while tokens, slots and pages last. Admission reserves all pages of a prompt at once, so a started
prompt never waits for memory. Only running requests grow; when no page is left, the request that
loses the least work is preempted. A policy chooses which request is admitted next
(`weft.engine.scheduler.policies`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from itertools import chain, islice

import numpy as np
from weft.contract.errors import WeftError
from weft.contract.spans import before_span, border_before_span
from weft.engine.requests.media_rows import FilledMedia, MediaRows
from weft.engine.requests.pages import RequestPages
from weft.engine.requests.request import (
    LEGAL_EDGES,
    NO_SESSION,
    Beams,
    Request,
    SharedPrefix,
    State,
)
from weft.engine.scheduler.adapters import AdapterResidency, AdapterWaitlist
from weft.engine.scheduler.deadlines import Deadlines
from weft.engine.scheduler.estimate import NewTokenEstimate
from weft.engine.scheduler.events import SchedulerEvents
from weft.engine.scheduler.limits import SchedulerLimits, fitting_budget
from weft.engine.scheduler.plan import Plan, PlanItem
from weft.engine.scheduler.policies.base import AdmissionQueue
from weft.engine.scheduler.ports import Fills
from weft.engine.scheduler.prompt_budget import PromptTokens
from weft.engine.scheduler.running import Drafting, RunningPlans
from weft.engine.scheduler.sharing import PrefixSharing
from weft.engine.scheduler.victims import Victims

LAST_PIECES = 4
"""Number of last pieces from which on the rest of a fill is worth one more step."""
PIECES_OF_A_LANE = 4
"""A step has one part in so many, times the lanes, of the prompt tokens that are left."""
MAX_PASSED_OVER = 16
"""Candidates that one search for the next request may skip because they wait for something other
than pages and slots.
"""


class Scheduler:
    """Owns all requests of one engine and decides the order in which they proceed.

    Args:
        pages: Pages of requests, and lookups in the prefix cache.
        fills: Other sources of pages; None: there are none.
        on_finish: Called once for each request when it reaches FINISHED, its pages released.
        adapters: Which adapters are on the device; None: none are served.
        events: Callbacks about requests' pages; None: there are none.
        prompt_budget: Returns the most prompt tokens of a step that also decodes; None: the step's
            budget alone counts.
        drafting: How steps have drafts; None: they have none.
        num_leaving_tokens: Returns the tokens of fill jobs that are computed, but whose pages have
            not all left this worker.
        media: Rows of the media in prompts; None: prompts have none.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pages: RequestPages,
        waiting: AdmissionQueue,
        fills: Fills | None,
        on_finish: Callable[[Request], None],
        on_slot_free: Callable[[int], None],
        adapters: AdapterResidency | None = None,
        *,
        events: SchedulerEvents | None = None,
        prompt_budget: PromptTokens | None = None,
        drafting: Drafting | None = None,
        num_leaving_tokens: Callable[[], int] = lambda: 0,
        media: MediaRows | FilledMedia | None = None,
    ) -> None:
        self._limits = limits
        self.pages = pages
        self._memory = pages.memory
        self._fills = fills
        self._on_finish = on_finish
        self._on_slot_free = on_slot_free
        self._events = SchedulerEvents() if events is None else events
        self._prompt_budget = prompt_budget
        self._media = media
        self.waitlist = AdapterWaitlist(waiting, adapters)
        """WAITING and PREEMPTED requests whose adapter is not loaded. They enter `waiting` when it
        is.
        """
        self._victims = Victims(pages.memory, limits.page_size, by_priority=limits.by_priority)
        self.estimate = NewTokenEstimate()
        self._deadlines = Deadlines()
        self.sharing = PrefixSharing(limits.page_size)
        self.waiting = waiting
        """Requests in WAITING and PREEMPTED."""
        self.held: list[Request] = []
        """WAITING requests that are not admitted before their `release`."""
        self.filling: list[Request] = []
        """Requests in LOADING and FILLING."""
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self._num_leaving_tokens = num_leaving_tokens
        self._free_slots = list(range(limits.max_running_requests - 1, -1, -1))
        self.preempted: list[Request] = []
        """Requests preempted since the engine last cleared the list."""
        self.progressed: list[Request] = []
        """Fill jobs with new full pages since the engine last cleared the list."""
        self.num_preemptions = 0
        self.num_urgent_preemptions = 0
        """Preemptions in favour of a more urgent request, part of the number above."""
        self._lacks_pages = False
        self._step_room = 0
        """Prompt tokens that the step being planned can have beside running requests."""
        self.running_plans = RunningPlans(limits, pages, self._preempt_cheapest, drafting)
        self._arriving: list[Request] = []
        """RUNNING requests whose last prompt chunk is under way."""
        self.num_prefix_query_tokens = 0
        """Prompt tokens looked up in the prefix cache, since start."""
        self.num_prefix_hit_tokens = 0
        """Tokens found in the prefix cache, part of the number above."""

    # -- queries ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def num_requests(self) -> int:
        return self.num_waiting + len(self.filling) + len(self.prefilling) + len(self.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not admitted, for whatever reason."""
        return len(self.waiting) + len(self.held) + len(self.waitlist)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens still to be computed by this engine."""
        return sum(r.num_to_compute for r in chain(self.waiting, self.waitlist, self.prefilling))

    def num_prefilling_tokens(self) -> int:
        """Prompt tokens still to be computed of requests in PREFILLING."""
        return sum(request.num_pending for request in self.prefilling)

    def num_tokens_before(self, adapter: bytes) -> int:
        """Queued tokens ahead of a request for `adapter`; those for other adapters do not count."""
        waiting = chain(self.waiting, self.waitlist.waiting_for(adapter))
        return sum(request.num_to_compute for request in chain(waiting, self.prefilling))

    @property
    def num_request_tokens(self) -> int:
        waiting = (self.waiting, self.held, self.waitlist)
        queues = chain(*waiting, self.filling, self.prefilling, self.running)
        return sum(len(request.tokens) for request in queues)

    def sizes(self) -> dict[str, int]:
        """Lengths of the queues, and the number of slots in use."""
        return {
            "waiting": len(self.waiting),
            "held": len(self.held),
            "lacking_adapter": len(self.waitlist),
            "filling": len(self.filling),
            "prefilling": len(self.prefilling),
            "running": len(self.running),
            "slots": self._limits.max_running_requests - len(self._free_slots),
        }

    # -- entry -----------------------------------------------------------------------------------

    def add(self, request: Request, *, is_held: bool = False) -> None:
        """Queues a new request; if `is_held`, only when `release` is called."""
        assert request.state is State.WAITING
        self.waitlist.begin(request)
        if self._media is not None:
            self._media.begin(request)
        self._deadlines.watch(request)
        if is_held:
            self.held.append(request)
        else:
            self._enqueue(request)

    def release(self, request: Request) -> None:
        self.held.remove(request)
        self._enqueue(request)

    def finish(self, request: Request, error: WeftError | None = None) -> None:
        """Ends a request that is finished, cancelled, expired or failed. Idempotent."""
        if request.state is State.FINISHED:
            return
        self._leave_queue(request)
        self.waiting.on_ended(request)
        if error is None and request.state is State.RUNNING:
            self.estimate.on_success()
        if request.state in (State.LOADING, State.FILLING):
            assert self._fills is not None
            self._fills.abandon(request)
        request.error = error
        if error is None and request.chat.id:
            for on_leaving in self._events.leaving:
                on_leaving(request)
        self.pages.drop(request)
        self._give_slot_back(request)
        self._transition(request, State.FINISHED)
        self.waitlist.end(request)
        if self._media is not None:
            self._media.end(request)
        self._on_finish(request)

    def expire(self, now: float) -> None:
        queues = (self.held, self.waitlist, self.filling, self.prefilling, self.running)
        for request, error in self._deadlines.late(now, chain(self.waiting, *queues)):
            self.finish(request, error)

    # -- the step --------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """Chooses the next step's tokens and allocates their pages."""
        if self._limits.preemption_threshold is not None and self.waiting and self.running:
            self._make_room_for_urgent(now, self._limits.preemption_threshold)
        has_prompts = self.prefilling or (self.waiting and self._free_slots)
        room = self._limits.page_size if has_prompts else 0
        plan = self.running_plans.plan(self.running, room) if self.running else Plan()
        self._start_waiting_fills()
        chunks: list[PlanItem] = []
        if self._media is not None:
            self._media.begin_plan(has_running=len(plan) > 0)
        if self.prefilling or self.waiting:
            self._plan_prompts(plan, now, chunks)
        self.running_plans.add_prompts(plan, chunks)
        for chunk in chunks:
            timeline = chunk.request.timeline
            if timeline.local_prefill_began_s is None:
                timeline.local_prefill_began_s = now - timeline.submitted_at
        return plan

    def _plan_prompts(self, plan: Plan, now: float, chunks: list[PlanItem]) -> None:
        has_running = len(plan) > 0
        num_tokens = self.running_plans.num_tokens_beside_prompts(plan)
        budget = self._limits.max_step_tokens - max(0, num_tokens - self._limits.decodes_beside)
        self._step_room = budget
        if has_running and self._prompt_budget is not None:
            num_waiting = len(self.prefilling) + len(self.waiting)
            wanted = self._prompt_budget(
                len(self.running), num_waiting, is_overflow=self._has_overflow()
            )
            budget = min(budget, fitting_budget(num_tokens, wanted, self._limits.step_sizes))
        if self._limits.num_lanes > 1:
            budget = min(budget, self._level_tokens())
        self._admit_ahead(now)
        # Prompts whose pages were filled elsewhere go first: the few tokens that are left of them
        # hardly delay other prompts.
        for request in sorted(self.prefilling, key=self._is_behind_fill, reverse=True):
            if not request.num_pending:
                continue  # Steps under way compute all that is left of it.
            taken = self._plan_chunk(request, budget, chunks)
            # A prompt for which there is no room ends the search, or shorter ones might overtake it
            # for ever.
            budget = self._budget_behind(budget, taken, chunks) if taken else 0
        if self.waiting:
            self._plan_waiting(now, budget, chunks, is_empty=not has_running)

    def _level_tokens(self) -> int:
        """Prompt tokens of a step with which the stages of a pipeline stay level: a small part of
        what is left, since each stage is idle for about one step as the prompts begin and end.
        """
        waiting = islice(self.waiting, self._limits.max_running_requests)
        left = sum(request.num_to_compute for request in chain(self.prefilling, waiting))
        page_size = self._limits.page_size
        piece = left // (PIECES_OF_A_LANE * self._limits.num_lanes) // page_size * page_size
        return max(self._limits.least_piece_tokens, piece)

    def _has_overflow(self) -> bool:
        """Whether the next prompts are computed here only because prefill workers are busy."""
        return any(
            request.sources.may_overflow and not self._is_behind_fill(request)
            for request in chain(self.prefilling, islice(self.waiting, 1))
        )

    def _is_behind_fill(self, request: Request) -> bool:
        is_short = request.num_to_compute <= self._limits.page_size
        return is_short and bool(request.timeline.fills)

    def admit(self, now: float) -> None:
        """Admits requests between two plans, so that prefill workers and stores begin to fill their
        pages at once.

        Prompts that this engine computes wait for the next plan; at most one step's worth is
        admitted.
        """
        self._start_waiting_fills()
        if self.waiting:
            room = self._limits.max_step_tokens - self.num_prefilling_tokens()
            self._plan_waiting(now, room, None, is_empty=False)

    def _plan_waiting(
        self, now: float, budget: int, items: list[PlanItem] | None, *, is_empty: bool
    ) -> None:
        """With `items` None, the chunks of admitted prompts are planned later. `is_empty` says that
        the step has nothing else.
        """
        self.waiting.observe(self.running)
        self._lacks_pages = False
        while budget > 0 and self._free_slots and (request := self._admit_next(now)):
            self._take_in(request)
            if request.state is not State.PREFILLING:
                continue
            if items is None:
                budget -= request.num_pending
            else:
                taken = self._plan_chunk(request, budget, items)
                budget = self._budget_behind(budget, taken, items)
        has_others = items or self.running or self.prefilling or self.filling
        if self._lacks_pages and is_empty and not (has_others or self.pages.num_returning):
            self._strip_waiting()

    def _admit_ahead(self, now: float) -> None:
        """Admits waiting requests that the policy ranks before the last of the admitted prompts,
        which could otherwise fill the steps until it ends. `_may_go_ahead` bounds how many, so that
        slots are left for requests that come later and rank still higher.
        """
        while self.waiting and self.prefilling and self._free_slots:
            request = self._admit_next(now, ahead_of=self.prefilling[-1])
            if request is None:
                return
            self._take_in(request)

    def _take_in(self, request: Request) -> None:
        self.waiting.remove(request)
        self.waiting.on_admitted(request)
        if request.state is State.PREFILLING:
            self._enter_prefilling(request)
        else:
            self.filling.append(request)

    def _admit_next(self, now: float, ahead_of: Request | None = None) -> Request | None:
        """With `ahead_of`, only candidates that go before that prompt are admitted."""
        for request in islice(self.waiting.candidates(now), MAX_PASSED_OVER):
            if ahead_of is not None and not self._goes_before(request, ahead_of):
                return None
            if request.num_launched or now < request.sources.lookup_until:
                continue
            if request.sharing.leader is not None and self.sharing.still_waits(request):
                continue
            if not self._may_take_off(request):
                return None
            if ahead_of is not None and not self._may_go_ahead(request):
                return None
            has_pages = bool(request.held.pages)
            if not has_pages:
                found = self.pages.find(request)
                request.num_found_tokens = found.num_tokens(self._limits.page_size)
                makers = [*self.prefilling, *self.filling, *self._arriving]
                if makers and self.sharing.waits(request, found, makers):
                    assert request.sharing.leader is not None
                    self.pages.note_follower(request.sharing.leader, request)
                    continue
                self.pages.take(request, found)
            if self._admit(request, now, has_pages=has_pages):
                return request
            if not has_pages:
                self.pages.drop(request)
            self._lacks_pages = True
            return None
        return None

    def _goes_before(self, request: Request, other: Request) -> bool:
        """A request that has aged is not overtaken, whatever its rank."""
        queue = self.waiting
        return queue.rank(request) < queue.rank(other) and queue.precedes(request, other)

    def _may_go_ahead(self, request: Request) -> bool:
        """Whether a waiting request would take part in the next step: the admitted prompts that go
        before it, or rank level with it, have less than a full step of tokens left to compute.
        """
        rank = self.waiting.rank(request)
        before = (other for other in self.prefilling if self.waiting.rank(other) <= rank)
        return sum(other.num_pending for other in before) < self._limits.max_step_tokens

    def _may_take_off(self, request: Request) -> bool:
        most = self._limits.max_tokens_in_flight
        if most is None or not request.is_fill:
            return True
        fills = (other for other in chain(self.prefilling, self.filling) if other.is_fill)
        others = sum(len(other.tokens) - other.num_computed for other in fills)
        others += self._num_leaving_tokens()
        return not others or others + request.num_to_compute <= most

    def launch(self, plan: Plan) -> int:
        """Marks a planned step as started, so that the next plan builds on it. Returns the step's
        number.
        """
        self.running_plans.launch(plan)
        for item, most in zip(plan.verifies, plan.most_accepted, strict=True):
            request = item.request
            request.num_launched += 1 + most
            request.decodes_from += 1 + most
            request.timeline.num_steps += 1
            request.num_verifying += most > 0
        for request, start, num_tokens, samples, _ in plan.chunks:
            request.num_launched += num_tokens
            request.state_end = start + num_tokens
            request.timeline.num_steps += 1
            if request.awaits_first_token:
                request.timeline.local_prefill_tokens += num_tokens
            if samples:
                self._launch_last_chunk(request)
        number = self.pages.begin_step()
        self.waitlist.step_began(number)
        if self._media is not None:
            self._media.begin_step(number)
        return number

    def _launch_last_chunk(self, request: Request) -> None:
        self.prefilling.remove(request)
        self._transition(request, State.RUNNING)
        self.running.append(request)
        self.running_plans.joined(request)
        self._arriving.append(request)
        request.decodes_from = request.num_computed + request.num_launched

    def commit(self, number: int, plan: Plan) -> None:
        """Commits a step, after all steps before it: its KV now exists, and full pages are
        published. If the step failed, `plan` is empty.
        """
        self.pages.end_step(number)
        self.waitlist.step_ended(number)
        if self._media is not None:
            self._media.end_step(number)
        # A local name, since looking up the attribute for each decode would double the time that
        # this loop takes.
        running = State.RUNNING
        for request in plan.decodes:
            request.num_launched -= 1
            if request.state is running:  # Otherwise the request has lost its pages meanwhile.
                request.num_computed += 1
        page_size = self._limits.page_size
        for index in ((plan.starts + 1) % page_size == 0).nonzero()[0].tolist():
            if plan.decodes[index].state is State.RUNNING:
                self._publish_computed(plan.decodes[index])
        if plan.is_late is not None:
            for index in np.flatnonzero(plan.is_late).tolist():
                request = plan.decodes[index]
                num_pages = request.num_computed // page_size
                if request.state is running and num_pages > request.held.num_published:
                    self._publish_computed(request)
        for item, most in zip(plan.verifies, plan.most_accepted, strict=True):
            request = item.request
            request.num_launched -= 1 + most
            request.decodes_from -= most
            request.num_verifying -= most > 0
            if request.state is running:
                # The step has computed the KV up to the request's last token; earlier steps did the
                # rest.
                request.num_computed = len(request.tokens)
                if request.num_computed // page_size > request.held.num_published:
                    self._publish_computed(request)
        for request, start, num_tokens, *_ in plan.chunks:
            request.num_launched -= num_tokens
            if request.held.incoming is not None:
                self.retract(request)
            elif request.state is State.RUNNING or request.state is State.PREFILLING:
                request.num_computed = start + num_tokens
                self._publish_computed(request)
        if self._arriving:
            arrived = {item.request for item in plan.drawing_chunks}
            self._arriving = [
                request
                for request in self._arriving
                if request.state is State.RUNNING and request not in arrived
            ]

    def add_beam(self, first: Request, request: Request) -> None:
        """Runs a further text of a search, whose first one has just drawn after its prompt."""
        beams = first.beams
        assert beams is not None
        beams.requests.append(request)
        self.waitlist.begin(request)
        if self._media is not None:
            self._media.begin(request)
        request.slot = beams.slots.pop()
        self.waitlist.admit(request)
        self.pages.share_beam(first, request, beams.num_pages)
        request.decodes_from = request.num_computed
        self._transition(request, State.RUNNING)
        self.running.append(request)
        self.running_plans.joined(request)

    def accepted(self, request: Request) -> None:
        """Counts the accepted tokens of a step with verified drafts. All but the last have their
        KV.
        """
        num_more = len(request.tokens) - 1 - request.num_computed
        if request.state is State.RUNNING and num_more:
            request.num_computed += num_more
            request.decodes_from += num_more
            self._publish_computed(request)

    def _publish_computed(self, request: Request) -> None:
        if request.held.is_private:
            return
        known = request.held.num_published
        if request.num_computed // self._limits.page_size > known:
            self.publish(request)
            for on_computed in self._events.computed:
                on_computed(request, known, request.held.num_published)
        self.pages.committed(request)
        self._note_states(request, known)

    def arrived(self, request: Request) -> None:
        """Publishes pages that have come from elsewhere."""
        known = request.held.num_published
        self.publish(request)
        if request.held.incoming is None and not request.held.is_private:
            self._note_states(request, known)

    def _note_states(self, request: Request, num_published: int) -> None:
        """A fill also makes progress by states alone, whose pages were published before."""
        if request.is_fill and num_published == request.held.num_published:
            self.progressed.append(request)

    def publish(self, request: Request) -> None:
        if request.held.is_private:
            return
        known = request.held.num_published
        if not self.pages.publish(request):
            return
        if request.is_fill:
            self.progressed.append(request)
        for on_published in self._events.published:
            on_published(request, known, request.held.num_published)

    # -- versions of the weights -----------------------------------------------------------------

    def not_admitted(self) -> list[Request]:
        """Requests that wait for their first step, or for another one after a preemption."""
        return [*self.held, *self.waiting, *self.waitlist]

    def change_version(
        self, rename: Callable[[Request], None], old: str, *, retracts: bool
    ) -> None:
        """The weights have changed, and no step is under way. Requests that generate keep their
        pages, which become private, unless `retracts`; the others begin anew.

        Args:
            rename: Gives a request the namespace of the new weights.
            old: Name of the old weights' version.
        """
        for request in chain(self.not_admitted(), self.filling, self.prefilling, self.running):
            if request.num_generated:
                request.old_versions.append((old, request.num_generated))
        for request in list(chain(self.filling, self.prefilling)):
            self._begin_anew(request)
        # Companions' pieces are published with every step, so that such requests are retracted.
        if retracts or self.pages.companions:
            for request in list(self.running):
                self.preempt(request)
        for request in self.running:
            request.held.keep_private()
            request.chat = NO_SESSION
            rename(request)
        for request in self.not_admitted():
            self.pages.drop(request)
            request.sharing = SharedPrefix()
            rename(request)
            request.num_found_tokens = self.pages.num_cached_tokens(request)

    def _begin_anew(self, request: Request) -> None:
        self._leave_queue(request)
        if request.state is not State.PREFILLING:
            assert self._fills is not None
            self._fills.abandon(request)
        self.waiting.on_ended(request)
        self.pages.drop(request)
        request.sources.candidates.clear()
        self._give_slot_back(request)
        self._transition(request, State.WAITING)
        self._enqueue(request)

    # -- remote fills ----------------------------------------------------------------------------

    def fill_completed(self, request: Request) -> None:
        """A filler has done its part, or cannot begin. Another one or this engine does the rest."""
        assert self._fills is not None
        state = self._fills.next_state(request)
        if state is State.PREFILLING and self.pages.has_uncontinuable(request):
            self.fill_failed(request)
            return
        if state is not request.state:
            self._transition(request, state)
        if state is State.PREFILLING:
            self.filling.remove(request)
            self._enter_prefilling(request)
        else:
            self._fills.start(request)

    def fill_failed(self, request: Request) -> None:
        """Queues a request again, in its old place, with the candidates that are left. It keeps the
        accepted pages that it can continue from.
        """
        self.filling.remove(request)
        self.pages.drop_uncontinuable(request)
        self.pages.return_promise(request)
        self._give_slot_back(request)
        self._transition(request, State.WAITING)
        self._enqueue(request)

    def retract(self, request: Request) -> None:
        """Begins a request anew whose load by layer has failed. No step is under way that it is
        part of, and what the last one computed for it is dropped.
        """
        request.sources.loads_whole = True
        if request.state is State.RUNNING:
            self.preempt(request)
        else:
            self._begin_anew(request)

    # -- internals -------------------------------------------------------------------------------

    def _transition(self, request: Request, state: State) -> None:
        assert state in LEGAL_EDGES[request.state], f"{request.state} -> {state}"
        request.state = state

    def _enqueue(self, request: Request) -> None:
        """The lookup in the prefix cache serves the reported queue length."""
        if not request.held.pages:
            request.num_found_tokens = self.pages.num_cached_tokens(request)
        self.waitlist.enqueue(request)

    def _preempt_cheapest(self) -> Request | None:
        victim = self._victims.first(self.running)
        if self._limits.num_lanes > 1 and victim.num_launched:
            return None  # Its step in another lane has still to draw by its row of the sampler.
        self.estimate.on_preemption(self.running)
        self.preempt(victim)
        return victim

    def preempt(self, request: Request) -> None:
        """Releases a RUNNING request's pages (they stay cached while there is room) and
        queues it. The texts of a beam search go together, and it begins anew.
        """
        if request.beams is not None:
            if request.state is State.FINISHED:
                return
            request = self._without_beams(request.beams)
        self._leave_running(request)
        self.waiting.on_ended(request)
        self.pages.drop(request)
        self._give_slot_back(request)
        request.sources.candidates.clear()
        request.timeline.num_preemptions += 1
        self.num_preemptions += 1
        self._transition(request, State.PREEMPTED)
        self._enqueue(request)
        self.preempted.append(request)

    def _without_beams(self, beams: Beams) -> Request:
        """Ends all texts of a search but the first, which then has the prompt alone."""
        first, *others = beams.requests
        beams.requests = [first]
        beams.search.restart()
        for other in others:
            self.finish(other)
        del first.tokens[first.num_prompt_tokens :]
        return first

    def _plan_chunk(self, request: Request, budget: int, items: list[PlanItem]) -> int:
        page_size = self._limits.page_size
        start = request.num_computed + request.num_launched
        pending = len(request.tokens) - start
        # The leading row is not counted in the budget, or a chunk of one page might never fit.
        has_lead = self._limits.needs_lead and start > 0 and request.state_end != start
        has_lead = has_lead and not self.pages.has_last_rows
        num_tokens = min(pending, self._limits.chunk_tokens, budget)
        if request.uncut_spans and num_tokens > 0:
            num_tokens = self._whole_spans(request, start, num_tokens, is_first=not items)
        if self._media is not None and (request.spans or request.tail_spans):
            num_tokens = self._media.limit(request, start, num_tokens)
        if num_tokens == pending and request.is_fill and not items:
            end = before_span(
                request.uncut_spans, start + pending - self._last_piece(request, pending)
            )
            num_tokens = end - start if end > start else pending
        if num_tokens < pending and self._limits.has_whole_prompts:
            return 0
        if num_tokens < pending:
            end = border_before_span(request.uncut_spans, start + num_tokens, page_size)
            to_border = end - start
            # If the budget ends inside a page, the first prompt of a step takes all of the budget.
            num_tokens = to_border if to_border > 0 or items else num_tokens
        if num_tokens <= 0:
            return 0
        num_pages = self.pages.num_lacking(request, start + num_tokens)
        if num_pages > 0:
            self.pages.take_promised(request, num_pages)
        is_last = num_tokens == pending
        samples = is_last and request.draws
        items.append(PlanItem(request, start, num_tokens, samples, has_lead))
        return num_tokens

    def _whole_spans(self, request: Request, start: int, num_tokens: int, *, is_first: bool) -> int:
        """Tokens of a chunk of at most so many that ends within no medium whose tokens attend to
        one another both ways. The first chunk of a step may have more if it has to, up to the
        step's size.
        """
        end = before_span(request.uncut_spans, start + num_tokens)
        if end > start or not is_first:
            return max(0, end - start)
        end = next(span.end for span in request.uncut_spans if span.end > start)
        page_size, last = self._limits.page_size, len(request.tokens)
        border = min(last, -(-end // page_size) * page_size)
        if border - start <= self._step_room and before_span(request.uncut_spans, border) == border:
            end = border
        return end - start if end - start <= self._step_room else 0

    def _last_piece(self, request: Request, pending: int) -> int:
        """Leaves the last tokens of a long fill for one more step, so that few pages are still to
        be shipped after the computation. That step has a cost, so this is done only when no other
        prompt waits.
        """
        last = self._limits.last_piece_tokens
        if self.waiting or pending < LAST_PIECES * last:
            return 0
        return 0 if any(r.num_pending and r is not request for r in self.prefilling) else last

    def _budget_behind(self, budget: int, taken: int, items: list[PlanItem]) -> int:
        if self._media is not None and self._media.fills_step:
            return 0
        budget -= taken
        if self._limits.shared_step_tokens is not None:
            num_planned = sum(item.num_tokens for item in items)
            budget = min(budget, self._limits.shared_step_tokens - num_planned)
        return max(0, budget)

    def _admit(self, request: Request, now: float, *, has_pages: bool) -> bool:
        """With `has_pages`, the request came with its own pages instead of a cached prefix."""
        if len(self._free_slots) < request.num_slots or not self._promise(request):
            return False
        request.sources.lookup_until = 0.0
        request.slot = self._free_slots.pop()
        if request.beams is not None:
            request.beams.slots = [self._free_slots.pop() for _ in range(request.num_slots - 1)]
        self.waitlist.admit(request)
        self.pages.note_hit(request)
        state = self._choose_source(request)
        if state is State.PREFILLING:
            self.pages.use_partial(request)
        else:
            self.pages.forget_partial(request)
        if request.awaits_first_token and not (has_pages or request.is_sibling):
            request.num_cached_tokens = request.num_computed
        self._note_admission(request, now)
        self._transition(request, state)
        if state is not State.PREFILLING:
            assert self._fills is not None
            self._fills.start(request)
        if request.is_fill:
            self.progressed.append(request)
        return True

    def _choose_source(self, request: Request) -> State:
        """The cached pages that follow the match are taken first, so that the choice knows what a
        fill or load would bring. Only a fill or load keeps them.
        """
        may_be_filled = request.num_reusable_tokens and (
            request.sources.candidates or self._limits.has_tiers
        )
        if self._fills is None or not may_be_filled:
            return State.PREFILLING
        end_token = request.num_reusable_tokens
        if request.sources.candidates and request.sources.candidates[0].kind == "kvstore":
            end_token = request.sources.candidates[0].match_tokens
        self.pages.take_uncontinuable(request, end_token)
        if request.sources.candidates and not self._fills.has_room(request):
            # Without these pages, smaller pieces of the prompt can be filled one after another.
            self.pages.untake_uncontinuable(request)
        state = self._fills.next_state(request)
        if state is State.PREFILLING:
            self.pages.untake_uncontinuable(request)
        return state

    def _promise(self, request: Request) -> bool:
        needed = self.pages.num_to_reserve(request)
        wanted = needed + self._num_pages_to_come(request)
        if wanted > self._memory.num_available_pages:
            # Without the copy, one page less may be needed.
            self.pages.forget_partial(request)
        if wanted > self._memory.num_available_pages or not self.pages.has_room_beside(request):
            return False
        self.pages.promise(request, needed)
        return True

    def _num_pages_to_come(self, request: Request) -> int:
        """Pages that admitted requests and this one will probably need beyond their reservations.

        A request that is admitted into the last pages and preempted at once would be computed again
        and again. A request that runs alone may use all pages.
        """
        active = len(self.running) + len(self.prefilling)
        if not active and not self.filling:
            return 0
        others = chain(self.running, self.prefilling, self.filling, (request,))
        return active + self.estimate.expected_tokens(others) // self._limits.page_size

    def _make_room_for_urgent(self, now: float, threshold: int) -> None:
        urgent = next(self.waiting.candidates(now), None)
        if urgent is None or urgent.num_launched or now < urgent.sources.lookup_until:
            return
        limit = urgent.priority + threshold
        victims = [
            request
            for request in self.running
            # A running request that has aged enough would precede the candidate again at once.
            if request.priority >= limit and self.waiting.precedes(urgent, request)
            if not (self._limits.num_lanes > 1 and request.num_launched)
        ]
        if not victims or (urgent.sharing.leader is not None and self.sharing.still_waits(urgent)):
            return
        wanted = self.pages.num_to_reserve(urgent)
        if not urgent.held.pages:
            wanted -= self.pages.num_cached_tokens(urgent) // self._limits.page_size
        gain = sum(self._victims.num_own_pages(request) for request in victims)
        if wanted > self._num_pages_soon + gain:
            return
        for victim in self._victims.order(victims):
            num_pages = wanted + self._num_pages_to_come(urgent)
            has_pages = num_pages <= self._num_pages_soon
            if (
                len(self._free_slots) >= urgent.num_slots
                and has_pages
                and self.pages.has_room_beside(urgent, soon=True)
            ):
                return
            self.preempt(victim)
            self.num_urgent_preemptions += 1

    @property
    def _num_pages_soon(self) -> int:
        """Available pages, plus the most that the steps under way can release."""
        return self._memory.num_available_pages + self.pages.num_returning

    def _note_admission(self, request: Request, now: float) -> None:
        timeline = request.timeline
        if timeline.admitted_s is None:
            timeline.admitted_s = now - timeline.submitted_at
            timeline.matched_tokens = request.num_computed
            self.num_prefix_query_tokens += request.num_tokens
            self.num_prefix_hit_tokens += request.num_computed
            self._offer_matched(request)
            for on_matched in self._events.matched:
                on_matched(request)

    def _offer_matched(self, request: Request) -> None:
        """The store may lack pages that are cached here, so they are offered again."""
        held = request.sources.num_stored_pages
        if held is None or held >= request.held.num_published:
            return
        for on_computed in self._events.computed:
            on_computed(request, held, request.held.num_published)

    def _enter_prefilling(self, request: Request) -> None:
        insort(self.prefilling, request, key=self.waiting.rank)
        for on_computing in self._events.computing:
            on_computing(request)

    def _strip_waiting(self) -> None:
        """Releases the pages of queued requests, when nothing runs and the first candidate does not
        fit.
        """
        for request in chain(self.waiting, self.waitlist):
            self.pages.drop(request)

    def _start_waiting_fills(self) -> None:
        if self._fills is not None:
            for request in list(self.filling):
                if not self._fills.start(request):
                    self.fill_completed(request)

    def _give_slot_back(self, request: Request) -> None:
        if request.slot >= 0:
            self._on_slot_free(request.slot)
            self._free_slots.append(request.slot)
            if request.beams is not None and request is request.beams.requests[0]:
                self._free_slots += request.beams.slots
                request.beams.slots = []
            request.slot = -1
            request.state_end = 0
            self.waitlist.leave(request)

    def _leave_queue(self, request: Request) -> None:
        if request in self.held:
            self.held.remove(request)
        elif request.state in (State.WAITING, State.PREEMPTED):
            self.waitlist.remove(request)
        elif request.state is State.RUNNING:
            self._leave_running(request)
        else:
            queues = {
                State.LOADING: self.filling,
                State.FILLING: self.filling,
                State.PREFILLING: self.prefilling,
            }
            queues[request.state].remove(request)

    def _leave_running(self, request: Request) -> None:
        self.running.remove(request)
        self.running_plans.left(request)
        num_made = request.num_computed + request.num_launched
        request.timeline.num_steps += num_made - request.decodes_from
