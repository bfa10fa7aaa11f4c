"""Decides what each step computes. Owns request state; knows no tensors.

A step is plan -> launch -> commit, and the next one may be planned before this one is committed:
what a request will have by then is known, but for the token itself, and whether that ends it. A
request that a step under way may end is planned all the same; what comes of it is dropped. `plan`
gives every running request its next token, and drafts to verify behind it where these pay; then it
continues prompts in page-aligned chunks, then admits waiting requests while tokens, requests and
pages last. Admission promises all pages of a prompt at once, so a started prompt never waits for
memory; only running requests grow, and when pages end the one that loses least is pre-empted. Who
is admitted next is a policy's choice (`weft.engine.scheduler.policies`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from itertools import chain, islice

import numpy as np
from weft.engine.errors import DeadlineExceeded, WeftError
from weft.engine.scheduler.adapters import AdapterDoor, Adapters
from weft.engine.scheduler.estimate import NewTokenEstimate
from weft.engine.scheduler.fills import Fills
from weft.engine.scheduler.limits import SchedulerLimits
from weft.engine.scheduler.pages import RequestPages
from weft.engine.scheduler.plan import Plan, PlanItem
from weft.engine.scheduler.policies.base import AdmissionQueue
from weft.engine.scheduler.running import RunningPlans
from weft.engine.scheduler.sharing import PrefixSharing
from weft.engine.scheduler.state import LEGAL_EDGES, Request, State
from weft.engine.scheduler.step_sizes import fitting_budget
from weft.engine.scheduler.victims import Victims

MAX_PASSED_OVER = 16
"""Candidates that wait for something else than pages and slots, before those behind wait too."""


class Scheduler:
    """All requests of one engine and the order in which they proceed.

    Args:
        limits: budgets.
        pages: what requests have and find.
        waiting: those that are not admitted, in the order of a policy.
        fills: remote fills; None when this engine asks nobody.
        on_finish: called once for each request when it reaches FINISHED, its pages released.
        on_slot_free: called when a slot is given back.
        adapters: of requests; None: they have none.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pages: RequestPages,
        waiting: AdmissionQueue,
        fills: Fills | None,
        on_finish: Callable[[Request], None],
        on_slot_free: Callable[[int], None],
        adapters: Adapters | None = None,
    ) -> None:
        self._limits = limits
        self.pages = pages
        self._memory = pages.memory
        self._fills = fills
        self._on_finish = on_finish
        self._on_slot_free = on_slot_free
        self._adapters = adapters
        self.door = AdapterDoor(waiting, adapters)
        """WAITING and PREEMPTED, not queued before their adapter comes; all others pass."""
        self._victims = Victims(pages.memory, limits.page_size, by_priority=limits.by_priority)
        self.estimate = NewTokenEstimate()
        self.sharing = PrefixSharing(limits.page_size)
        self.waiting = waiting
        """WAITING and PREEMPTED."""
        self.held: list[Request] = []
        """WAITING, and not to be admitted before their `release`."""
        self.filling: list[Request] = []
        """LOADING and FILLING."""
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self._free_slots = list(range(limits.max_running_requests - 1, -1, -1))
        self.preempted: list[Request] = []
        """Pre-empted since the engine last took note (it clears the list)."""
        self.progressed: list[Request] = []
        """Fill jobs with new full pages since the engine last took note (it clears the list)."""
        self.num_preemptions = 0
        self.num_urgent_preemptions = 0
        """Of these, for a more urgent request."""
        self._lacks_pages = False
        self.running_plans = RunningPlans(limits, pages, self._preempt_cheapest)
        self._arriving: list[Request] = []
        """RUNNING, the last chunk of their prompt under way."""
        self.num_prefix_query_tokens = 0
        """Tokens of prompts that were looked up in the prefix cache, since start."""
        self.num_prefix_hit_tokens = 0
        """Of these, tokens found."""
        self.has_draft = False
        """A draft model goes on from states that the model left in a request's slot."""
        self.prompt_tokens_beside_decode: Callable[[], int] | None = None
        """How many prompt tokens a step may bring in which others decode; None: no such bound."""
        self.step_sizes: Sequence[int] = ()
        """Tokens of the steps that others are padded to."""
        self.on_computed: Callable[[Request, int, int], None] | None = None
        """Told of full pages [first, end) that this engine computed, or has and the store lacks."""
        self.on_published: Callable[[Request, int, int], None] | None = None
        """Told of full pages [first, end) that a request has now, whoever made them."""
        self.on_matched: Callable[[Request], None] | None = None
        """Told of each request that is admitted for the first time, with what was found of it."""
        self.on_leaving: Callable[[Request], None] | None = None
        """Told of each request of a session that ends without an error, its pages still its own."""

    # -- queries ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """A plan could contain something."""
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def num_requests(self) -> int:
        """Requests that are not finished."""
        return self.num_waiting + len(self.filling) + len(self.prefilling) + len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted, whatever they wait for."""
        return len(self.waiting) + len(self.held) + len(self.door)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens still to be computed by this engine."""
        return sum(r.num_to_compute for r in chain(self.waiting, self.door, self.prefilling))

    def num_tokens_before(self, adapter: bytes) -> int:
        """Of these, without requests that wait for another adapter than this one to come."""
        waiting = chain(self.waiting, self.door.waiting_for(adapter))
        return sum(request.num_to_compute for request in chain(waiting, self.prefilling))

    @property
    def num_request_tokens(self) -> int:
        """Prompt and generated tokens of all its requests."""
        waiting = (self.waiting, self.held, self.door)
        queues = chain(*waiting, self.filling, self.prefilling, self.running)
        return sum(len(request.tokens) for request in queues)

    def sizes(self) -> dict[str, int]:
        """Lengths of the queues, and slots that are taken."""
        return {
            "waiting": len(self.waiting),
            "held": len(self.held),
            "lacking_adapter": len(self.door),
            "filling": len(self.filling),
            "prefilling": len(self.prefilling),
            "running": len(self.running),
            "slots": self._limits.max_running_requests - len(self._free_slots),
        }

    # -- entry -----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a new request."""
        assert request.state is State.WAITING
        self.door.begin(request)
        self._enqueue(request)

    def hold(self, request: Request) -> None:
        """Keeps a new request out of the queue until `release`."""
        assert request.state is State.WAITING
        self.door.begin(request)
        self.held.append(request)

    def release(self, request: Request) -> None:
        """Queues a request that was held."""
        self.held.remove(request)
        self._enqueue(request)

    def finish(self, request: Request, error: WeftError | None = None) -> None:
        """The one way out: finished, cancelled, expired or failed. Idempotent."""
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
        if error is None and request.session_id and self.on_leaving is not None:
            self.on_leaving(request)
        self.pages.drop(request)
        self._give_slot_back(request)
        self._transition(request, State.FINISHED)
        self.door.end(request)
        self._on_finish(request)

    def expire(self, now: float) -> None:
        """Ends every request whose time ran out."""
        queues = (self.held, self.door, self.filling, self.prefilling, self.running)
        for request in list(chain(self.waiting, *queues)):
            is_late = now >= request.deadline or (
                request.awaits_first_token and now >= request.first_token_deadline
            )
            if is_late:
                which = "total" if now >= request.deadline else "first-token"
                message = f"the {which} deadline passed while the request was {request.state.value}"
                self.finish(request, DeadlineExceeded(message, stage=request.state.value))

    # -- the step --------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """Chooses the next step's tokens and makes sure that their pages exist."""
        if self._limits.preemption_threshold is not None and self.waiting and self.running:
            self._make_room_for_urgent(now, self._limits.preemption_threshold)
        plan = self.running_plans.plan(self.running) if self.running else Plan()
        has_running = len(plan) > 0
        num_tokens = self.running_plans.num_tokens_beside_prompts(plan)
        num_counted = max(0, num_tokens - self._limits.decodes_beside)
        budget = self._limits.max_step_tokens - num_counted
        if has_running and self.prompt_tokens_beside_decode is not None:
            wanted = self.prompt_tokens_beside_decode()
            budget = min(budget, fitting_budget(num_tokens, wanted, self.step_sizes))
        self._start_waiting_fills()
        chunks: list[PlanItem] = []
        for request in self.prefilling:
            budget -= self._plan_chunk(request, budget, chunks)
        if self.waiting:
            self._plan_waiting(now, budget, chunks, is_empty=not has_running)
        self.running_plans.add_prompts(plan, chunks)
        return plan

    def _plan_waiting(
        self, now: float, budget: int, items: list[PlanItem], *, is_empty: bool
    ) -> None:
        """Admits requests, and plans the first chunks of those that are computed here."""
        self.waiting.observe(self.running)
        self._lacks_pages = False
        while budget > 0 and self._free_slots and (request := self._admit_next(now)):
            self.waiting.remove(request)
            self.waiting.on_admitted(request)
            if request.state is State.PREFILLING:
                self._enter_prefilling(request)
                budget -= self._plan_chunk(request, budget, items)
            else:
                self.filling.append(request)
        has_others = items or self.running or self.prefilling or self.filling
        if self._lacks_pages and is_empty and not (has_others or self.pages.num_returning):
            self._strip_waiting()

    def _admit_next(self, now: float) -> Request | None:
        """Admits the first candidate that waits for nothing but pages and a slot."""
        for request in islice(self.waiting.candidates(now), MAX_PASSED_OVER):
            if request.num_launched or now < request.lookup_until:
                continue
            if self.sharing.still_waits(request):
                continue
            has_pages = bool(request.pages)
            if not has_pages:
                found = self.pages.find(request)
                request.num_found_tokens = found.num_tokens(self._limits.page_size)
                makers = chain(self.prefilling, self.filling, self._arriving)
                if self.sharing.waits(request, found, makers):
                    continue
                self.pages.take(request, found)
            if self._admit(request, now, has_pages=has_pages):
                return request
            if not has_pages:
                self.pages.drop(request)
            self._lacks_pages = True
            return None
        return None

    def launch(self, plan: Plan) -> int:
        """A planned step begins: the next one is planned behind it. Returns its number."""
        for request in plan.decodes:
            request.num_launched += 1
        for item in plan.verifies:
            request = item.request
            request.num_launched += 1 + item.max_accepted
            request.decodes_from += 1 + item.max_accepted
            request.timeline.num_steps += 1
            request.num_verifying += 1
        for request, start, num_tokens, samples, _ in plan.chunks:
            request.num_launched += num_tokens
            request.state_end = start + num_tokens
            request.timeline.num_steps += 1
            if request.awaits_first_token:
                request.timeline.local_prefill_tokens += num_tokens
            if samples:
                self._launch_last_chunk(request)
        number = self.pages.begin_step()
        if self._adapters is not None:
            self._adapters.step_began(number)
        return number

    def _launch_last_chunk(self, request: Request) -> None:
        self.prefilling.remove(request)
        self._transition(request, State.RUNNING)
        self.running.append(request)
        self.running_plans.changed()
        self._arriving.append(request)
        request.decodes_from = request.num_computed + request.num_launched

    def commit(self, number: int, plan: Plan) -> None:
        """A step has ended, those before it being committed: its KV is there, and is published.

        Args:
            number: Of the step.
            plan: Its plan; an empty one of a step that failed.
        """
        self.pages.end_step(number)
        if self._adapters is not None:
            self._adapters.step_ended(number)
        for request in plan.decodes:
            request.num_launched -= 1
            if request.state is State.RUNNING:  # Else its pages are gone.
                request.num_computed += 1
        for index in np.flatnonzero((plan.starts + 1) % self._limits.page_size == 0).tolist():
            if plan.decodes[index].state is State.RUNNING:
                self._publish_computed(plan.decodes[index])
        for item in plan.verifies:
            request = item.request
            request.num_launched -= 1 + item.max_accepted
            request.decodes_from -= item.max_accepted
            request.num_verifying -= 1
            if request.state is State.RUNNING:
                # Of its last token for certain; what steps before brought is there.
                request.num_computed = len(request.tokens)
                self._publish_computed(request)
        for request, start, num_tokens, *_ in plan.chunks:
            request.num_launched -= num_tokens
            if request.state is State.RUNNING or request.state is State.PREFILLING:
                request.num_computed = start + num_tokens
                self._publish_computed(request)
        if self._arriving:
            arrived = {item.request for item in plan.drawing_chunks}
            self._arriving = [
                request
                for request in self._arriving
                if request.state is State.RUNNING and request not in arrived
            ]

    def accepted(self, request: Request) -> None:
        """A step has ended in which drafts were verified: the request has all its tokens now, and
        the KV of all but the last."""
        num_more = len(request.tokens) - 1 - request.num_computed
        if request.state is State.RUNNING and num_more:
            request.num_computed += num_more
            request.decodes_from += num_more
            self._publish_computed(request)

    def _publish_computed(self, request: Request) -> None:
        known = request.num_published_pages
        if request.num_computed // self._limits.page_size > known:
            self.publish(request)
            if self.on_computed is not None:
                self.on_computed(request, known, request.num_published_pages)

    def publish(self, request: Request) -> None:
        """Puts the request's full pages into the prefix cache."""
        known = request.num_published_pages
        if not self.pages.publish(request):
            return
        if request.is_fill:
            self.progressed.append(request)
        if self.on_published is not None:
            self.on_published(request, known, request.num_published_pages)

    # -- remote fills ----------------------------------------------------------------------------

    def fill_completed(self, request: Request) -> None:
        """This filler has done its part: another one or this engine does the rest."""
        self._go_on(request)

    def _go_on(self, request: Request) -> None:
        assert self._fills is not None
        state = self._fills.next_state(request)
        if state is not request.state:
            self._transition(request, state)
        if state is State.PREFILLING:
            self.filling.remove(request)
            self._enter_prefilling(request)
        else:
            self._fills.start(request)

    def fill_failed(self, request: Request) -> None:
        """Queues a request again, in its old place, with the pages accepted so far."""
        self.filling.remove(request)
        self.pages.return_promise(request)
        self._give_slot_back(request)
        self._transition(request, State.WAITING)
        self._enqueue(request)

    # -- internals -------------------------------------------------------------------------------

    def _transition(self, request: Request, state: State) -> None:
        assert state in LEGAL_EDGES[request.state], f"{request.state} -> {state}"
        request.state = state

    def _enqueue(self, request: Request) -> None:
        """Queues a request, and looks once what of it is cached: gateways are told what is left."""
        if not request.pages:
            request.num_found_tokens = self.pages.num_cached_tokens(request)
        self.door.enqueue(request)

    def _preempt_cheapest(self) -> Request:
        """Pre-empts the running request that loses least."""
        self.estimate.on_preemption(self.running)
        victim = self._victims.first(self.running)
        self.preempt(victim)
        return victim

    def preempt(self, request: Request) -> None:
        """Takes a RUNNING request's pages (they stay cached while there is room) and queues it."""
        self._leave_running(request)
        self.waiting.on_ended(request)
        self.pages.drop(request)
        self._give_slot_back(request)
        request.candidates.clear()
        request.timeline.num_preemptions += 1
        self.num_preemptions += 1
        self._transition(request, State.PREEMPTED)
        self._enqueue(request)
        self.preempted.append(request)

    def _plan_chunk(self, request: Request, budget: int, items: list[PlanItem]) -> int:
        """Adds the request's next chunk; returns the tokens it takes from the budget."""
        page_size = self._limits.page_size
        start = request.num_computed + request.num_launched
        pending = len(request.tokens) - start
        # One row more than the budget has: with it, a chunk of one page might never fit.
        has_lead = self.has_draft and start > 0 and request.state_end != start
        num_tokens = min(pending, self._limits.chunk_tokens, budget)
        if num_tokens < pending:
            num_tokens = (start + num_tokens) // page_size * page_size - start
        if num_tokens <= 0:
            return 0
        num_pages = -(-(start + num_tokens) // page_size) - len(request.pages)
        if num_pages > 0:
            self.pages.take_promised(request, num_pages)
        is_last = num_tokens == pending
        samples = is_last and not request.is_fill
        items.append(PlanItem(request, start, num_tokens, samples, has_lead))
        return num_tokens

    def _admit(self, request: Request, now: float, *, has_pages: bool) -> bool:
        """Gives a waiting request its promise of pages and a way forward; False: not now.

        Args:
            request: It has taken what was found of it in the cache.
            now: On the engine's clock.
            has_pages: It came with pages of its own instead.
        """
        if not self._promise(request):
            return False
        request.lookup_until = 0.0
        request.slot = self._free_slots.pop()
        self.door.admit(request)
        self.pages.note_hit(request)
        state = State.PREFILLING if self._fills is None else self._fills.next_state(request)
        if state is State.PREFILLING:
            self.pages.use_partial(request)
        else:
            self.pages.forget_partial(request)
        if request.awaits_first_token and not has_pages:
            request.num_cached_tokens = request.num_computed
        self._note_admission(request, now)
        self._transition(request, state)
        if state is not State.PREFILLING:
            assert self._fills is not None
            self._fills.start(request)
        if request.is_fill:
            self.progressed.append(request)
        return True

    def _promise(self, request: Request) -> bool:
        """Sets aside the pages that the request's tokens need; False when there are too few."""
        needed = self._num_pages(request) - len(request.pages)
        wanted = needed + self._num_pages_to_come(request)
        if wanted > self._memory.num_available_pages:
            # The page to be copied may be the very one that is missing.
            self.pages.forget_partial(request)
        if wanted > self._memory.num_available_pages:
            return False
        self.pages.promise(request, needed)
        return True

    def _num_pages(self, request: Request) -> int:
        return -(-request.num_tokens // self._limits.page_size)

    def _num_pages_to_come(self, request: Request) -> int:
        """Pages that admitted requests, and this one beside them, will want beyond their promises.

        Admitting into the last pages only to pre-empt at once would compute the same prompt again
        and again. A request that is alone may have everything.
        """
        active = len(self.running) + len(self.prefilling)
        if not active and not self.filling:
            return 0
        others = chain(self.running, self.prefilling, self.filling, (request,))
        return active + self.estimate.expected_tokens(others) // self._limits.page_size

    def _make_room_for_urgent(self, now: float, threshold: int) -> None:
        """Pre-empts running requests for the first candidate, if it is urgent enough to fit so."""
        urgent = next(self.waiting.candidates(now), None)
        if urgent is None or urgent.num_launched or now < urgent.lookup_until:
            return
        limit = urgent.priority + threshold
        victims = [
            request
            for request in self.running
            # One that has waited for long itself would come back at once.
            if request.priority >= limit and self.waiting.precedes(urgent, request)
        ]
        if not victims or self.sharing.still_waits(urgent):
            return
        wanted = self._num_pages(urgent) - len(urgent.pages)
        if not urgent.pages:
            wanted -= self.pages.num_cached_tokens(urgent) // self._limits.page_size
        gain = sum(self._victims.num_own_pages(request) for request in victims)
        if wanted > self._num_pages_soon + gain:
            return
        for victim in self._victims.order(victims):
            num_pages = wanted + self._num_pages_to_come(urgent)
            if self._free_slots and num_pages <= self._num_pages_soon:
                return
            self.preempt(victim)
            self.num_urgent_preemptions += 1

    @property
    def _num_pages_soon(self) -> int:
        """Available pages, and at most those that come back with the steps under way."""
        return self._memory.num_available_pages + self.pages.num_returning

    def _note_admission(self, request: Request, now: float) -> None:
        timeline = request.timeline
        if timeline.admitted_s is None:
            timeline.admitted_s = now - timeline.submitted_at
            timeline.matched_tokens = request.num_computed
            self.num_prefix_query_tokens += request.num_tokens
            self.num_prefix_hit_tokens += request.num_computed
            self._offer_matched(request)
            if self.on_matched is not None:
                self.on_matched(request)

    def _offer_matched(self, request: Request) -> None:
        """Cached pages that the store lacks (it is new, or has evicted them) are put again."""
        held = request.num_store_pages
        if self.on_computed is None or held is None or held >= request.num_published_pages:
            return
        self.on_computed(request, held, request.num_published_pages)

    def _enter_prefilling(self, request: Request) -> None:
        """Prompts go on in the order of admission, where priorities count the urgent ones first."""
        if self._limits.by_priority:
            insort(self.prefilling, request, key=lambda other: other.priority)
        else:
            self.prefilling.append(request)

    def _strip_waiting(self) -> None:
        """Nothing runs and the head does not fit: pages held by queued requests must go."""
        for request in chain(self.waiting, self.door):
            self.pages.drop(request)

    def _start_waiting_fills(self) -> None:
        if self._fills is not None:
            for request in list(self.filling):
                if not self._fills.start(request):
                    self._go_on(request)

    def _give_slot_back(self, request: Request) -> None:
        if request.slot >= 0:
            self._on_slot_free(request.slot)
            self._free_slots.append(request.slot)
            request.slot = -1
            request.state_end = 0
            self.door.leave(request)

    def _leave_queue(self, request: Request) -> None:
        if request in self.held:
            self.held.remove(request)
        elif request.state in (State.WAITING, State.PREEMPTED):
            self.door.remove(request)
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
        self.running_plans.changed()
        num_made = request.num_computed + request.num_launched
        request.timeline.num_steps += num_made - request.decodes_from
