"""The requests that gateways submitted. Each is a group of samples that share its prompt."""

from __future__ import annotations

from weft.contract.clock import Clock
from weft.contract.errors import Draining, WeftError
from weft.engine.executor.routes import PageRoutes
from weft.engine.loop.intake import Intake
from weft.engine.loop.outgoing import Outgoing
from weft.engine.requests.request import Request, RequestKey, State, end_of
from weft.engine.scheduler.ports import MaskSource
from weft.engine.scheduler.scheduler import Scheduler


class RequestGroups:
    """Follows the samples of each request to their ends, and reports to its gateway."""

    def __init__(
        self,
        intake: Intake,
        scheduler: Scheduler,
        constraints: MaskSource,
        out: Outgoing,
        clock: Clock,
        routes: PageRoutes | None = None,
    ) -> None:
        self._intake = intake
        self._scheduler = scheduler
        self._constraints = constraints
        self._out = out
        self._clock = clock
        self._routes = routes
        self._groups: dict[RequestKey, list[Request]] = {}
        self._forking: set[RequestKey] = set()
        """Requests whose samples are still to be forked. A request that was forked may still be in
        it.
        """

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._groups

    def add(self, first: Request) -> None:
        """Adds a request by its first sample; its other samples are forked from it later."""
        self._groups[first.key] = [first]
        if first.unforked_samples:
            self._forking.add(first.key)

    def join(self, request: Request) -> None:
        """Adds a further text of a beam search, which ends and fails with the first one."""
        self._groups[request.key].append(request)

    def num_unforked(self) -> int:
        firsts = {key: self._groups[key][0] for key in self._forking if key in self._groups}
        self._forking = {key for key, first in firsts.items() if first.unforked_samples}
        return sum(len(firsts[key].unforked_samples) for key in self._forking)

    def take_compiled(self) -> None:
        """Releases the requests whose constraints have been compiled. Fails those with an error."""
        for key, error in self._constraints.take_compiled():
            if error is not None:
                self.fail(key, error)
            else:
                for request in self._groups[key]:
                    if request in self._scheduler.held:
                        self._scheduler.release(request)

    def hand_back(self, *, is_running_too: bool) -> None:
        """Hands requests back to their gateways, which resume them on other workers."""
        queued = (State.WAITING, State.PREEMPTED, State.FINISHED)
        for key, group in list(self._groups.items()):
            if is_running_too or all(request.state in queued for request in group):
                self.fail(key, Draining("this worker is draining", stage="queue"))

    def repeat_state(self, key: RequestKey) -> None:
        """Answers a duplicate submit with the state of its request."""
        self._out.accepted(key)
        for request in self._groups[key]:
            if request.beams is None:
                self._out.all_tokens(request)

    def cancel(self, key: RequestKey, sample: int | None = None) -> None:
        if sample is None:
            self._cancel_all_of(key)
            return
        for request in self._groups.get(key, []):
            if request.sample == sample and request.state is not State.FINISHED:
                self.end_sample(request, "cancelled", None)
                return
            if sample in request.unforked_samples:
                self._end_unforked(request, sample)
                return

    def cancel_all(self, gateway: int) -> None:
        for key in [key for key in self._groups if key.gateway == gateway]:
            self.cancel(key)

    def cancel_everything(self) -> None:
        for key in list(self._groups):
            self._cancel_all_of(key)

    def fail_all(self, error: WeftError) -> None:
        for key in list(self._groups):
            self.fail(key, error)

    def fork(self, first: Request, now: float) -> None:
        """Creates the other samples of a prompt whose KV exists now. They share its full pages."""
        group = self._groups.get(first.key)
        samples, first.unforked_samples = first.unforked_samples, {}
        if group is None:
            return
        for sample, generated in reversed(samples.items()):
            request = self._intake.sibling(first, sample, generated, now)
            if first.state is State.RUNNING:
                self._scheduler.pages.share(first, request)
            else:  # The first sample ended early: another one takes over its candidates.
                request.sources.candidates, first.sources.candidates = first.sources.candidates, []
            group.append(request)
            self._scheduler.add(request, is_held=first in self._scheduler.held)

    def end_sample(self, request: Request, reason: str, stop_token_id: int | None) -> None:
        if request.beams is not None:
            request, *others = request.beams.requests
            for other in others:
                self._scheduler.finish(other)
        request.timeline.finish_s = self._clock() - request.timeline.submitted_at
        if request.unforked_samples:
            self.fork(request, self._clock())
        if request.routes_from is not None and request.state is State.RUNNING:
            self._report_routes(request, request.routes_from)
        self._out.finished(request, reason, stop_token_id)
        self._scheduler.finish(request)

    def _report_routes(self, request: Request, begin: int) -> None:
        assert self._routes is not None, "the intake refuses such requests"
        # The last token has not been through the model.
        end = min(request.num_tokens - 1, request.num_computed)
        if begin < end:
            self._out.routes(request, begin, self._routes.read(request.held.pages, begin, end))

    def fail(self, key: RequestKey, error: WeftError) -> None:
        """Fails a whole request: one event, and all its samples end."""
        group = self._groups.pop(key, None)
        if group is None:
            return
        timeline = group[0].timeline
        timeline.finish_s = self._clock() - timeline.submitted_at
        self._out.failed(key, error, timeline)
        for request in group:
            self._scheduler.finish(request, error)

    def on_finished(self, request: Request) -> None:
        group = self._groups.get(request.key)
        if request.error is not None:
            self.fail(request.key, request.error)
        elif group and all(sample.state is State.FINISHED for sample in group):
            del self._groups[request.key]
        if request.params.constraint is not None:
            self._constraints.end(request, is_last=request.key not in self._groups)

    def _end_unforked(self, first: Request, sample: int) -> None:
        generated = first.unforked_samples.pop(sample)
        never = self._intake.sibling(first, sample, generated, self._clock())
        never.timeline.finish_s = self._clock() - never.timeline.submitted_at
        self._out.finished(never, "cancelled", None)

    def _cancel_all_of(self, key: RequestKey) -> None:
        for request in self._groups.pop(key, []):
            for sample in list(request.unforked_samples):
                self._end_unforked(request, sample)
            if request.state is not State.FINISHED:
                self.end_sample(request, "cancelled", None)


def first_to_run(first: Request, intake: Intake, out: Outgoing, now: float) -> Request | None:
    """Reports the samples of a resumed request whose last tokens had already ended them. Returns
    the first sample that still has to run, from which the rest will be forked; None: all had ended.
    `intake` makes the siblings of `first`.
    """
    unforked, first.unforked_samples = first.unforked_samples, {}
    siblings = [intake.sibling(first, sample, ids, now) for sample, ids in unforked.items()]
    running: list[Request] = []
    for request in (first, *siblings):
        count = request.num_generated
        end = end_of(request, request.tokens[-1], count) if count else None
        if end is None:
            running.append(request)
        else:
            request.timeline.finish_s = 0.0
            out.finished(request, *end)
    if not running:
        return None
    leader, *others = running
    leader.is_sibling = False
    leader.sources.candidates = first.sources.candidates
    leader.unforked_samples = {other.sample: unforked[other.sample] for other in others}
    return leader
