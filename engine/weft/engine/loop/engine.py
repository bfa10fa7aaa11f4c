"""The engine: takes requests, returns tokens and filled pages, one step at a time.

`Engine.turn(inbox)` takes the messages that came in, plans a step, runs the model, samples,
commits, and returns the messages that go out. It never waits for other processes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from weft.contract import faults
from weft.contract.clock import Clock, monotonic
from weft.contract.errors import Draining, Internal, MediaMissing, Overloaded, WeftError
from weft.contract.fills import LeaseReply
from weft.contract.messages import Inbox, Outbox
from weft.contract.reports import QUIET_REPORT_S
from weft.contract.submits import Ping, Pong, Submit
from weft.contract.tasks import TOKEN_OUTPUTS
from weft.contract.weights import WeightCommand
from weft.engine.base.config import EngineConfig
from weft.engine.executor.orders import PoisonPages, ZeroPages
from weft.engine.executor.ranks.attention_dp import LockstepExecutor
from weft.engine.loop.draws import SampledTokens
from weft.engine.loop.flight import FlightRecorder
from weft.engine.loop.groups import first_to_run
from weft.engine.loop.parts import EngineComponents
from weft.engine.loop.reports import engine_counters, load_report, retry_after_s, wants_report
from weft.engine.loop.snapshot import engine_snapshot
from weft.engine.loop.wiring import EngineWiring
from weft.engine.requests.media_rows import FilledMedia, check_media
from weft.engine.requests.request import Request, RequestKey, State
from weft.engine.scheduler.plan import LaterVectors, Plan, Run
from weft.pages.transfer.chunks import ChunkPosted, PeerOpened, ShipResult
from weft.pages.transfer.nixl_wire import Notification

logger = logging.getLogger(__name__)

EXPIRY_INTERVAL_S = 0.02
REPORT_INTERVAL_S = 0.1
IDLE_S = 0.1
"""Longest time between two turns; once the engine is idle and has reported that, `QUIET_REPORT_S`
holds.
"""
STANDSTILL_S = 0.001
"""Longest time between two turns while requests wait for something that no message announces."""
ARRIVAL_POLL_S = 2e-4
"""Interval between two looks for NIXL's notifications, which do not wake this process. The engine
looks only while a notification is due, or, if a device computes and not this process, while any may
come.
"""
MOVE_POLL_S = 5e-5
"""Interval between two looks whether pages have moved into the pool, which takes microseconds."""
DISTANT_POLL_S = 5e-3
"""Interval between looks for notifications on a CPU, where each look takes a core from computing.
The filler's own message follows a notification within milliseconds, and wakes this process.
"""


class Engine:
    """Scheduler, memory, model, sampler and fills of one worker, in one thread.

    Args:
        parts: Loaded model, pool and transport (`weft.engine.loop.build.load_parts`).
    """

    def __init__(
        self, config: EngineConfig, parts: EngineComponents, clock: Clock = monotonic
    ) -> None:
        self.config = config
        self._clock = clock
        self.parts = parts
        self._executor = parts.executor
        self._intake = parts.intake
        self._constraints = parts.constraints
        self.info = parts.info
        self.wired = wired = EngineWiring(config, parts, self, clock)
        self._out = wired.out
        self._kv_events = wired.kv_events
        self.memory, self.memories = parts.memory, wired.memories
        self.costs = wired.costs
        self.fills = wired.owner_fills
        self.tiers, self.tier_policy = wired.tiers, wired.tier_policy
        self.layers, self.store_loads = wired.layers, wired.store_loads
        self.store = wired.store
        self.audit = wired.audit
        self.media, self._filled_media = wired.media, wired.filled_media
        self.adapters = parts.adapters
        self.sessions = wired.sessions
        self.scheduler = wired.scheduler
        self._groups = wired.groups
        self._new_tokens = wired.new_tokens
        self._beams = wired.beams
        self.filler = wired.filler
        self._step_sampler = wired.step_sampler
        self.drafter = parts.drafter
        self.pipeline = wired.pipeline
        self._profiles = wired.profiles
        self.weights = wired.weights
        self.experts = wired.experts
        self._weight_commands: list[WeightCommand] = []
        """Commands that came while ranks copy experts, to be carried out when these are done."""
        self.stats = wired.stats
        self._pace, self._fill_pace = wired.pace, wired.fill_pace
        self._look_up, self._fail = wired.look_up, wired.fail
        self._flush_pages = wired.flush
        self.ran_step = False
        """The result of the last `StepPipeline.turn`."""
        self._expire_at = self._report_at = 0.0
        self._is_reported = False
        """Whether the last turn reported the load, and nothing has happened since."""

    # -- one turn --------------------------------------------------------------------------------

    @property
    def flight(self) -> FlightRecorder | None:
        return self.pipeline.flight

    @flight.setter
    def flight(self, recorder: FlightRecorder | None) -> None:
        self.pipeline.flight = recorder

    @property
    def has_work(self) -> bool:
        """Whether the next turn would run a step."""
        return self.pipeline.num_steps > 0 or (
            self.scheduler.has_work and not self.weights.stops_steps
        )

    @property
    def is_idle(self) -> bool:
        """Whether no request, fill or lease exists, so that stopping the engine
        interrupts nothing.
        """
        return not (
            self.scheduler.num_requests
            or self.pipeline.num_steps
            or self.fills.num_open
            or self.filler.num_active
            or self.wired.num_copies
        )

    def leave_steps(self) -> None:
        """Lets a turn return while the device computes, so that messages to other workers do not
        wait for the step. The caller of `turn` then waits for `rest_s`.
        """
        facts = self._executor.facts
        # With several lanes a turn waits for the oldest step while the next one is under way.
        can_leave = facts.is_asynchronous and facts.num_lanes == 1
        self.pipeline.leaves = can_leave and self.config.ships_pages

    def rest_s(self) -> float:
        """Longest time in seconds that the caller may wait for messages or a wake-up before the
        next turn; 0: it calls `turn` at once.
        """
        if self.ran_step:
            return 0.0
        if self.pipeline.num_steps:
            return min(IDLE_S, self.pipeline.rest_s())
        if self.has_work:
            pause_s = self._fill_pace.left_s(self._clock())
            return min(pause_s, EXPIRY_INTERVAL_S) if pause_s else STANDSTILL_S
        if self.fills.num_open or self.weights.is_busy or self.experts.job is not None:
            return EXPIRY_INTERVAL_S
        return QUIET_REPORT_S if self._is_reported and self.is_idle else IDLE_S

    def arrival_poll_s(self) -> float | None:
        """Interval in seconds at which a resting caller asks `has_arrived`; None: not at all."""
        if self.parts.transport.port.is_moving:
            return MOVE_POLL_S
        if not self.fills.may_be_notified:
            return None
        is_near = self._executor.facts.is_asynchronous or self.fills.awaits_arrival
        return ARRIVAL_POLL_S if is_near else DISTANT_POLL_S

    def has_arrived(self) -> bool:
        """Whether pages of a peer have arrived since the last turn. Takes microseconds."""
        return self.parts.transport.has_arrived()

    def turn(self, inbox: Inbox | None = None) -> Outbox:
        """Takes the inbox, begins at most one step, commits at most one, and returns
        what to send.
        """
        self.pipeline.host_goes_on()
        self._executor.check()
        if inbox is not None:
            self._take_inbox(inbox)
        if self.parts.lockstep is not None:
            self._follow_group(self.parts.lockstep)
        if self.tiers is not None:
            self.tiers.take()
        if self.store_loads is not None:
            self.store_loads.take()
        if self.layers is not None:
            self.layers.give()
        self._take_transfers()
        self._groups.take_compiled()
        self.adapters.turn()
        now = self._clock()
        if now >= self._expire_at:
            self._expire_at = now + EXPIRY_INTERVAL_S
            self.scheduler.expire(now)
            self.fills.tick()
            if self.sessions is not None:
                self.sessions.tick()
            self.filler.tick()
        experts = self.experts
        if self._weight_commands or experts.job is not None or now >= experts.due_at:
            self._turn_experts()
        elif self.weights.turn(self.pipeline.num_steps):
            experts.reset()
        if self.weights.stops_steps:
            plan = Plan()
        elif self.pipeline.may_begin() and not self._fill_pace.left_s(now):
            plan = self.scheduler.plan(now)
        else:
            plan = Plan()
            self.scheduler.admit(now)
        self._note_plan()
        if self.parts.lockstep is not None and not len(plan) and self.pipeline.may_begin():
            self.parts.lockstep.take_empty_step()
        self._profiles.turn(begins_step=len(plan) > 0, num_under_way=self.pipeline.num_steps)
        self.ran_step = self.pipeline.turn(plan)
        if self.ran_step:
            self._fill_pace.stepped(self._clock())
        if plan.chunks and self.filler.reads_early:
            self._read_early(plan)
        self.adapters.turn()
        if self.store is not None:
            self.store.tick(is_computing=self.ran_step or self.pipeline.num_steps > 0)
        if self.tiers is not None:
            self.tiers.tick()
        if self.config.poison_free_pages:
            if freed := self.memory.take_freed():
                self._executor.order(PoisonPages(freed))
            for carrier in self.parts.carriers:
                carrier.poison()
            if self.tiers is not None:
                # Loads run during steps, so the device must have poisoned the pages before one
                # begins.
                self._executor.mark().wait()
        goes = self._pace.should_flush(self._out.gather(), len(self.scheduler.running))
        is_due = goes and now >= self._report_at
        self._is_reported = is_due or (inbox is not None and wants_report(inbox))
        if self._is_reported:
            self._report_at = now + REPORT_INTERVAL_S
            self._out.outbox.load = load_report(self.wired)
        if goes:
            self._out.outbox.kv_changes = self._kv_events.take()
        self.pipeline.host_rests()
        return self._out.take(with_batches=goes)

    def _turn_experts(self) -> None:
        """Goes on with updates of weights and with moves of experts. Both write weights on all
        ranks, so one begins only when the other has ended.
        """
        if not self.experts.is_busy:
            for command in self._weight_commands:
                self.weights.obey(command, has_moved_experts=self.experts.has_moved)
            self._weight_commands.clear()
            if self.weights.turn(self.pipeline.num_steps):
                self.experts.reset()
        self.experts.turn(may_begin=self.weights.is_quiet and not self._weight_commands)

    def close(self) -> None:
        """Stops the threads of the transport, the adapters, the drafter and the constraints."""
        self._constraints.close()
        self.adapters.close()
        if self.drafter is not None:
            self.drafter.close()
        if self.tiers is not None:
            self.tiers.close()
        if self.store_loads is not None:
            self.store_loads.close()
        self.parts.transport.close()
        self._executor.close()

    # -- what came in ----------------------------------------------------------------------------

    def _take_inbox(self, inbox: Inbox) -> None:
        for order in inbox.adapter_orders:
            self.adapters.order(order)
        for drains in inbox.drains:
            self._set_drain(drains)
            if self.parts.lockstep is not None:
                self.parts.lockstep.set_drain(drains)
        for media in inbox.media:
            if self.media is not None:
                self.media.store.put(media)
        for submit in inbox.submits:
            self._submit(submit)
        for cancel in inbox.cancels:
            key = RequestKey(cancel.gateway, cancel.request_id, cancel.attempt)
            self._groups.cancel(key, cancel.sample)
        for gateway in inbox.closed_gateways:
            self._groups.cancel_all(gateway)
        for ping in inbox.pings:
            self._answer(ping)
        for start in inbox.fill_starts:
            self.filler.on_start(start)
        for lease_id in inbox.fill_renewals:
            self.filler.on_renew(lease_id)
        for lease_id in inbox.fill_stops:
            self.filler.on_stop(lease_id)
        for stream, num_events in inbox.taken_fill_events:
            self.filler.on_taken(stream, num_events)
        for stream in inbox.broken_fill_streams:
            self.filler.on_stream_broken(stream)
        for query in inbox.lease_queries:
            reply = LeaseReply(query=query.query, state=self.filler.on_query(query))
            self._out.outbox.lease_replies.append(reply)
        if inbox.hand_back:
            self._hand_back()
            if self.parts.lockstep is not None:
                self.parts.lockstep.order_hand_back()
        for event in inbox.filler_events:
            self.fills.on_event(event.lease_id, event.event)
        for answer in inbox.lease_answers:
            self.fills.on_lease_answer(answer)
        for exited in inbox.exits:
            released = self.fills.on_process_exited(exited.worker_id, exited.epoch)
            self._out.outbox.exit_replies.append((exited.query, released))
        if self.store is not None:
            for found in inbox.store_answers:
                self.store.on_answer(found)
            for result in inbox.store_put_results:
                self.store.on_result(result)
        if self.store_loads is not None:
            for held in inbox.store_held:
                self.store_loads.on_held(held)
        if self.sessions is not None:
            for end in inbox.session_ends:
                self.sessions.release(end.cache_salt, end.session_id)
        for query_id in inbox.flush_cache:
            self._out.outbox.flush_replies.append((query_id, self._flush()))
        for query_id, max_entries in inbox.dump_state:
            state = json.dumps(self.snapshot(max_entries))
            self._out.outbox.state_replies.append((query_id, state))
        for command in inbox.profile_commands:
            self._profiles.obey(command)
        self._weight_commands += inbox.weight_commands
        for about_experts in inbox.expert_commands:
            self.experts.obey(about_experts)

    def _set_drain(self, drains: bool) -> None:
        self.filler.is_draining = drains
        if drains:
            self._groups.hand_back(is_running_too=False)

    def _hand_back(self) -> None:
        self._groups.hand_back(is_running_too=True)
        for lease in list(self.filler.leases):
            self.filler.on_stop(lease.handle.lease_id)

    def _follow_group(self, lockstep: LockstepExecutor) -> None:
        """Drains with the workers that share this one's experts."""
        if lockstep.drains != self.filler.is_draining:
            self._set_drain(lockstep.drains)
        if lockstep.takes_hand_back():
            self._hand_back()

    def _take_transfers(self) -> None:
        transport = self.parts.transport
        if self.fills.num_open:
            for notification in transport.notifications():
                arrived: Sequence[Notification] = (notification,)
                if faults.FILL_NOTIFY.is_armed:
                    arrived = faults.FILL_NOTIFY.repeat(notification)
                for found in arrived:
                    self.fills.on_notification(found)
        for tag, digests, pages in transport.port.take():
            if isinstance(tag, tuple):
                self.fills.on_digested(*tag, digests)
            elif self.store is not None:
                self.store.on_digested(tag, digests, pages)
        for item in transport.shipper.take():
            if isinstance(item, ShipResult):
                self.filler.on_shipped(item)
            elif isinstance(item, ChunkPosted):
                self.filler.on_posted(item)
            elif isinstance(item, PeerOpened):
                self.filler.on_opened(item)
            else:
                self.filler.on_data(*item)

    def _flush(self) -> int:
        num_pages = self._flush_pages()
        return num_pages + (self.tiers.flush() if self.tiers is not None else 0)

    def _submit(self, submit: Submit) -> None:
        key = RequestKey(submit.gateway, submit.request_id, submit.attempt)
        if key in self._groups:
            self._groups.repeat_state(key)
            return
        try:
            if self.filler.is_draining:
                raise Draining("this worker is draining", stage="queue")
            self.weights.check()
            self._check_queue()
            self.adapters.check(submit)
            media = self.media or self._filled_media
            check_media(media, submit.spans, len(submit.prompt))
            request = self._intake.from_submit(submit, self._clock())
            can_run = submit.sampling.constraint is None or self._constraints.admit(request)
        except WeftError as error:
            self._out.failed(key, error)
            return
        self._out.accepted(key)
        first: Request | None = request
        if submit.progress:
            first = first_to_run(request, self._intake, self._out, self._clock())
        if first is not None:
            self._groups.add(first)
            self._look_up(first)
            self.scheduler.add(first, is_held=not can_run)
        elif request.params.constraint is not None:
            self._constraints.end(request, is_last=True)

    def _check_queue(self) -> None:
        """Raises Overloaded if too many samples wait, counting those to be forked later."""
        num_waiting = self.scheduler.num_waiting + self._groups.num_unforked()
        if num_waiting >= self.config.max_waiting_requests:
            message = f"{num_waiting} requests are waiting"
            raise Overloaded(message, stage="queue", retry_after_s=retry_after_s(self.wired))

    def _answer(self, ping: Ping) -> None:
        if ping.expects_constraints:
            self._constraints.expect()
        keys = [RequestKey(ping.gateway, *asked) for asked in ping.asked]
        unknown = [(key.request_id, key.attempt) for key in keys if key not in self._groups]
        self._out.gateway(ping.gateway).pongs.append(Pong(nonce=ping.nonce, unknown=unknown))

    # -- the step --------------------------------------------------------------------------------

    def _fail_stranded(self, filled: FilledMedia) -> None:
        problem = (
            "no prefill worker has computed the prompt's images, and this worker has no image "
            "tower (language_model_only)"
        )
        for request in filled.take_stranded():
            self._fail(request, MediaMissing(problem, stage="prefill"))

    def _note_plan(self) -> None:
        if self._filled_media is not None:
            self._fail_stranded(self._filled_media)
        for request in self.scheduler.preempted:
            self._out.preempted(request)
        self.scheduler.preempted.clear()
        self._note_progress()
        if self.tiers is not None:
            self.tiers.write_back()
        if wipes := self.memory.take_wipes():
            self._executor.order(ZeroPages(wipes))
        of_companions = [carrier.zero() for carrier in self.parts.carriers]
        if wipes or any(of_companions):
            is_written_by_fills = self.fills.num_open and self.parts.transport.staging is None
            if is_written_by_fills or (self.tiers is not None and self.tiers.num_due):
                # Fills and loads write to pages without waiting for steps. A page must not be
                # zeroed after such a write.
                self._executor.mark().wait()
        if self.tiers is not None:
            if self.tiers.num_due and self.store is not None:
                # A copy for the store may still read a page that a load has been given since.
                self.store.settle()
            self.tiers.begin_loads()

    def _read_early(self, plan: Plan) -> None:
        """Lets pages for other workers be read as soon as the step that was just begun ends."""
        fills = [item for item in plan.chunks if item.request.is_fill]
        if fills:
            mark = self._executor.mark()
            for request, start, num_tokens, *_ in fills:
                self.filler.on_launched(request, start + num_tokens, mark)

    def _note_progress(self) -> None:
        progressed, self.scheduler.progressed = self.scheduler.progressed, []
        for request in progressed:
            self.filler.on_progress(request)

    def step_done(self, plan: Plan, drawn: SampledTokens | None, duration_s: float) -> None:
        self._note_progress()
        num_surplus = 0
        runs: Sequence[Run] = ()
        if plan.scores is not None:
            self._new_tokens.take_prompt(plan, plan.scores)
        if plan.vectors is not None:
            self._take_vectors(plan, plan.vectors)
        if drawn is not None:
            num_surplus, runs = self._take_tokens(drawn, plan), drawn.runs
        self.stats.step(plan, duration_s, self.costs, num_surplus, runs)
        if (gate := self.scheduler.running_plans.gate) is not None:
            gate.observe(plan, runs, duration_s)

    def _take_vectors(self, plan: Plan, vectors: LaterVectors) -> None:
        before = len(plan.decodes) + len(plan.verifies)
        for pooled, made in vectors.wait():
            request, start, *_ = plan.chunks[pooled.request - before]
            if request.state is State.FINISHED:
                continue
            is_by_token = pooled.pool.output in TOKEN_OUTPUTS
            self._out.vectors(request.key, start if is_by_token else 0, made)
            if pooled.is_last:
                self._groups.end_sample(request, "stop", None)

    def _take_tokens(self, drawn: SampledTokens, plan: Plan) -> int:
        """Appends and sends new tokens; ends samples where they end, and forks others. The tokens
        of the plan's decodes are not first tokens. Returns tokens of requests that had ended while
        the step was under way.
        """
        num_surplus = 0
        for failed, error in drawn.errors:
            if failed.state is not State.FINISHED:
                # `OutputProcessor.take` will count the failed request's missing token as
                # surplus, which it is not.
                num_surplus -= 1
                self._groups.fail(failed.key, error)
        now = self._clock()
        firsts = drawn.requests[len(plan.decodes) :]
        for request in firsts:
            timeline = request.timeline
            if timeline.first_token_s is None:
                timeline.first_token_s = now - timeline.submitted_at
                self.costs.observe_first_token(timeline)
        ends, num_ended = self._new_tokens.take(drawn, plan)
        for end in ends:
            self._groups.end_sample(*end)
        for request in firsts:
            if request.unforked_samples and request.state is not State.FINISHED:
                self._groups.fork(request, now)
        ends, num_behind = self._new_tokens.take_runs(drawn.runs, self.scheduler.accepted)
        for end in ends:
            self._groups.end_sample(*end)
        if any(request.beams is not None for request in firsts) or (
            plan.columns is not None and plan.columns.has_beams
        ):
            num_surplus -= self._beams.take(drawn)
        return num_surplus + num_ended + num_behind

    def step_failed(self, plan: Plan, error: Exception) -> None:
        failure = Internal(f"a step failed: {type(error).__name__}", stage="decode")
        for request, *_ in plan:
            self._fail(request, failure)

    # -- state -----------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        return engine_counters(self.wired)

    def sizes(self) -> dict[str, int]:
        """Sizes of everything that grows with requests, by name, as `snapshot` reports them."""
        return {
            "groups": len(self._groups),
            "sampling_slots": self._step_sampler.num_slots,
            "steps_under_way": self.pipeline.num_steps,
            **self.scheduler.sizes(),
            **{f"{each.name}_requests": len(each) for each in self.parts.companions},
            **self.fills.sizes(),
            **self.filler.sizes(),
            **(self.store.sizes() if self.store is not None else {}),
            **(self.store_loads.sizes() if self.store_loads is not None else {}),
            **(self.tiers.sizes() if self.tiers is not None else {}),
            **self.adapters.sizes(),
            **(self.drafter.sizes() if self.drafter is not None else {}),
            **self._constraints.sizes(),
            **(self.media.sizes() if self.media is not None else {}),
            **self.parts.transport.sizes(),
        }

    def snapshot(self, max_entries: int) -> dict[str, Any]:
        """The engine's current state as JSON values, for operators: ids and numbers, no tokens.

        Args:
            max_entries: Most entries of each list; `sizes` has the whole lengths.
        """
        return engine_snapshot(
            self.wired, self._clock(), max_entries, is_idle=self.is_idle, sizes=self.sizes()
        )
