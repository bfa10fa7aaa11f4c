"""The stages of a request in the gateway: check, admit, prepare, route, run, render."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain, islice

from weft.checkpoint.pooling import PoolingConfig
from weft.common.telemetry.logging import trace_id as current_trace_id
from weft.common.telemetry.spans import Tracer
from weft.contract.codec.walk import duration
from weft.contract.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    Overloaded,
    PeerUnavailable,
    WeftError,
)
from weft.contract.keys import RecentPages
from weft.contract.tasks import TOKEN_OUTPUTS
from weft.gateway.admission.admission import Admission, shutting_down
from weft.gateway.admission.keys import Tenant
from weft.gateway.admission.limits import ASSUMED_OUTPUT_TOKENS, RateLimits
from weft.gateway.admission.slo import SloTicket
from weft.gateway.admission.tenants import Rates, Tenants
from weft.gateway.catalogue import Catalogue, ResolvedModel, ServedModel
from weft.gateway.generation.answer import Answer, Deliveries
from weft.gateway.generation.complete import complete
from weft.gateway.generation.generation import Generation, ResumeLimits
from weft.gateway.request import (
    CallFacts,
    ChatPrompt,
    GenerateRequest,
    PoolingOptions,
    PreparedPrompt,
    RawRequest,
    ResolvedAdapter,
    WorkerChoice,
    earliest,
)
from weft.gateway.routing import RoutingRequest
from weft.gateway.settings import GatewaySettings
from weft.gateway.telemetry.load_header import load_header
from weft.gateway.telemetry.metrics import GatewayMetrics
from weft.gateway.telemetry.request_log import GatewayRequestLog
from weft.gateway.telemetry.request_trace import RequestTrace
from weft.gateway.text.answer.demand import blame_constraint
from weft.gateway.text.answer.make import reasoning_of
from weft.gateway.text.model_card import ModelCard
from weft.gateway.text.render import RenderPlan
from weft.gateway.text.stop_patterns import stop_patterns
from weft.gateway.text.stops import StopAutomaton
from weft.gateway.validate import num_prompt_logprobs, unsupported
from weft.v1 import gateway_pb2, worker_pb2

_log = logging.getLogger(__name__)

_FIND_WORKER_S = 1.0
_FIND_HOLDER_S = 2.0
_LOOK_EVERY_S = 0.02

MAX_SCORES = 1 << 21
"""Most log-probabilities of prompts, alternatives included, that all requests together may wait
for: some hundred bytes each.
"""


class RequestPipeline:
    """Runs requests of both faces."""

    def __init__(
        self,
        settings: GatewaySettings,
        models: Catalogue,
        admission: Admission,
        metrics: GatewayMetrics,
        tracer: Tracer,
        tenants: Tenants,
        log: GatewayRequestLog | None = None,
        on_ended: Sequence[Callable[[Answer], None]] = (),
    ) -> None:
        self._settings = settings
        self._models = models
        self._admission = admission
        self._metrics = metrics
        self._tracer = tracer
        self._tenants = tenants
        self.limits = RateLimits(
            Rates(
                requests_per_minute=settings.requests_per_minute,
                tokens_per_minute=settings.tokens_per_minute,
            ),
            settings.replicas,
            settings.limit_backlog_s,
            self._backlog_s,
            lambda scope, kind: metrics.rate_limited.labels(scope, kind).inc(),
        )
        """Rates of requests and tokens."""
        self._log = log
        self._on_ended = on_ended
        self._open: dict[str, Answer] = {}
        """Requests that wait or run, by their ids, oldest first."""
        self._deliveries = Deliveries()
        self._has_ended = False
        self._recent = RecentPages()
        """Prompts of earlier requests."""
        self._num_scores = 0
        """Log-probabilities of prompts that requests have room for."""

    def _backlog_s(self) -> float | None:
        """The largest backlog of a model's workers."""
        known = [one.router.forecaster.backlog_s() for one in self._models]
        return max((seconds for seconds in known if seconds is not None), default=None)

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because this gateway shuts down."""
        return self._admission.is_draining

    def load(self) -> gateway_pb2.GatewayLoad:
        """The gateway's load, and how many requests meet their latency targets."""
        gates, metrics = [one.latency_admission.gate for one in self._models], self._metrics
        now = asyncio.get_running_loop().time()
        firsts = [seconds for gate in gates if (seconds := gate.first_token_s(now)) is not None]
        return gateway_pb2.GatewayLoad(
            running_prompts=self._admission.num_running,
            queued_prompts=self._admission.num_queued,
            held_requests=sum(gate.num_held for gate in gates),
            first_token=duration(max(firsts)) if firsts else None,
            requests_with_target=metrics.num_with_target,
            requests_within_target=metrics.num_within_target,
            limit_scale=self.limits.scale,
        )

    @property
    def num_queued(self) -> int:
        """Requests that wait here: for a place, or so that others keep their targets."""
        held = sum(served.latency_admission.gate.num_held for served in self._models)
        return self._admission.num_queued + held

    def reports(self) -> Iterator[worker_pb2.WatchLoadResponse]:
        """The newest reports of all decode workers."""
        workers = chain.from_iterable(served.fleet.workers("decode") for served in self._models)
        return (report for worker in workers if (report := worker.report) is not None)

    @property
    def running_ids(self) -> list[str]:
        """Ids of the requests that run, oldest first."""
        return [id_ for id_, answer in self._open.items() if answer.has_begun]

    def num_using(self, digest: bytes) -> int:
        """Number of requests that wait or run with an adapter of this content."""
        adapters = (answer.adapter for answer in self._open.values())
        return sum(one is not None and one.digest == digest for one in adapters)

    def open_requests(self, limit: int) -> list[Answer]:
        """The requests that wait or run, oldest first, `limit` at most."""
        return list(islice(self._open.values(), limit))

    def cancel(self, request_id: str, tenant: Tenant | None) -> bool:
        """Cancels a request of a tenant that waits or runs; False: the tenant has no such request
        here. `request_id` is the gateway's id of the request, or the client's or the header's,
        which several requests may share.
        """
        if not request_id:  # requests without a name have this one
            return False
        found = [
            answer
            for id_, answer in self._open.items()
            if request_id in (id_, answer.raw.client_request_id, answer.raw.header_request_id)
            and answer.raw.call.tenant == tenant
        ]
        for answer in found:
            if answer.has_begun:
                answer.cancel()
            elif answer.waiter is not None and not answer.is_cancelled:
                answer.is_cancelled = True
                answer.waiter.cancel()
        return bool(found)

    def end_all(self) -> None:
        """Fails all running and admitted requests because the gateway ends."""
        self._has_ended = True
        for answer in list(self._open.values()):
            if answer.has_begun:
                answer.fail(shutting_down("decode"))

    async def check_admission(self, model: str, call: CallFacts) -> None:
        """Raises what `open` would raise before it looks at the prompt of a request for a model:
        its tenant's rates are used up, the queue is full, or no worker is ready. Takes nothing; a
        refusal counts as the request's.
        """
        resolved = await self._models.find(model)
        served, terms = resolved.served, self._tenants.of(call.tenant_name)
        now = asyncio.get_running_loop().time()
        until = now + (earliest(call.timeout_s, self._settings.request_timeout_s) or 0.0)
        adapter = resolved.adapter
        try:
            self._admission.check(1, call.tenant_name, terms.weight)
            self.limits.check(call.tenant_name, terms, now)
            await self._find_worker(served, adapter, until)
            served.router.check_owners(b"" if adapter is None else adapter.digest)
        except Draining:
            raise  # Another gateway is asked.
        except WeftError as error:
            served.demand.arrived()
            served.demand.failed(error)
            self._metrics.requests.labels(error.reason.lower()).inc()
            self._metrics.model_requests.labels(served.model.name, error.reason.lower()).inc()
            raise

    @asynccontextmanager
    async def open(self, raw: RawRequest) -> AsyncIterator[Answer]:
        """Runs a request, not checked yet, for the duration of the block. Yields the answer, of
        which deltas come from now on; leaving the block cancels what is unfinished. Raises
        WeftError if the request was refused.
        """
        trace = RequestTrace(self._tracer, raw.request_id, raw.call.traceparent)
        current_trace_id.set(trace.trace_id)
        answer = Answer(raw, trace, self._settings.max_unsent_bytes, self._deliveries)
        self._open[raw.request_id] = answer
        try:
            async with self._run(answer):
                yield answer
            answer.outcome = "ok"
        except WeftError as error:
            answer.outcome, answer.failure = error.reason.lower(), error
            if error.param == "constraint":
                blame_constraint(error, raw.name_of("constraint"))
            if error.http_status >= 500:
                _warn(raw, error)
            raise
        except BaseException as error:
            answer.outcome, answer.failure = "error", error
            if isinstance(error, asyncio.CancelledError):
                answer.outcome = Cancelled.reason.lower()
                if answer.is_cancelled and answer.waiter is not None:
                    answer.waiter.uncancel()
                    raise Cancelled("the request was cancelled by its id", stage="queue") from None
            raise
        finally:
            del self._open[raw.request_id]
            self._close(answer)
            # Its frames hold the answer: they would live until the collector finds this cycle.
            answer.failure = None

    @asynccontextmanager
    async def _run(self, answer: Answer) -> AsyncIterator[None]:
        raw = answer.raw
        resolved = await self._models.find(raw.model)
        served = answer.served = resolved.served
        answer.adapter = resolved.adapter
        self._set_deadlines(answer)
        time_left_s = answer.first_token_deadline - asyncio.get_running_loop().time()
        card = await self._models.card(resolved, max(0.0, time_left_s))
        terms, tenant = self._tenants.of(raw.call.tenant_name), raw.call.tenant_name
        request = complete(
            raw,
            card,
            terms,
            max_prompts=self._settings.max_prompts,
            task=served.task,
            adapter=resolved.adapter,
        )
        answer.complete(request)
        served.demand.arrived()
        answer.charge = self.limits.begin(tenant, terms, answer.arrival)
        with answer.trace.stage("queue"):
            admitted = await self._admission.admit(
                len(request.prompts), answer.first_token_deadline, tenant, terms.weight
            )
        with admitted:
            async with self._run_admitted(answer, resolved, card, admitted.release):
                yield

    def _set_deadlines(self, answer: Answer) -> None:
        arrival, raw = answer.arrival, answer.raw
        limits_s = earliest(raw.timeout_s, self._settings.request_timeout_s) or 0.0
        first_s = raw.first_token_timeout_s
        answer.deadline = arrival + limits_s
        answer.first_token_deadline = (
            answer.deadline if first_s is None else min(answer.deadline, arrival + first_s)
        )

    @asynccontextmanager
    async def _run_admitted(
        self,
        answer: Answer,
        resolved: ResolvedModel,
        card: ModelCard,
        release: Callable[[], None],
    ) -> AsyncIterator[None]:
        """The request has passed its checks; `release` lets the next one take its place."""
        loop, served, request = asyncio.get_running_loop(), resolved.served, answer.request
        with answer.trace.stage("prepare"):
            prompts = await self._prepare(answer, served, card)
        for prompt in prompts:
            served.demand.sized(len(prompt.ids))
        answer.num_scores = self._take_room(num_prompt_logprobs(request, prompts))
        await self._find_worker(served, request.adapter, answer.first_token_deadline)
        assert answer.charge is not None, "a request is charged before it is admitted"
        self.limits.reserve(answer.charge, _most_tokens(request, prompts), loop.time())
        worker_id = self._named_worker(served, request.raw.call.worker)
        routing = _routing(request, prompts, worker_id, card.pooling, self._recent)
        await self._pass_gate(answer, served, prompts, routing)
        if self._has_ended:
            raise shutting_down("admit")
        answer.begin(card, resolved.name, release)
        answer.headers = (
            *self.limits.headers(request.tenant_name, loop.time()),
            *self._load_headers(answer),
        )
        timers = [loop.call_at(answer.deadline, _expire, answer)]
        if request.ttft_timeout is not None:
            timers.append(loop.call_at(answer.first_token_deadline, _expire_first, answer))
        try:
            answer.submit(self._generations(answer, served, prompts, routing))
            if answer.ticket is not None:
                served.latency_admission.gate.began(answer.ticket)
            yield
        finally:
            for timer in timers:
                timer.cancel()
            answer.close()

    def _load_headers(self, answer: Answer) -> Iterator[tuple[str, str]]:
        """Of all models together: a load balancer sees one server."""
        if (form := answer.raw.call.load_format) is None:
            return
        yield load_header(form, self.reports(), self.num_queued)

    async def _find_worker(
        self, served: ServedModel, adapter: ResolvedAdapter | None, deadline: float
    ) -> None:
        """Waits briefly for a decode worker, whose Session may be about to open again, and longer
        for one that holds an adapter, since workers load them when they start.
        """
        loop = asyncio.get_running_loop()
        digest, wait_s = b"", _FIND_WORKER_S
        if adapter is not None:
            digest, wait_s = adapter.digest, _FIND_HOLDER_S
        until = min(deadline, loop.time() + wait_s)
        while not served.router.has_holder(digest):
            if loop.time() >= until:
                if adapter is None:
                    return  # The router says what is missing.
                raise PeerUnavailable(
                    f"no decode worker holds the adapter `{adapter.name}` yet; send the request "
                    "again",
                    stage="route",
                    retry_after_s=_FIND_HOLDER_S,
                )
            await asyncio.sleep(_LOOK_EVERY_S)

    def _named_worker(self, served: ServedModel, choice: WorkerChoice | None) -> str:
        """Empty: the router chooses."""
        if choice is None:
            return ""
        if not self._settings.allow_worker_choice:
            raise unsupported(
                choice.param, "requests choose their worker only with --allow-worker-choice"
            )
        return served.router.named(choice)

    def _close(self, answer: Answer) -> None:
        answer.ended_at = asyncio.get_running_loop().time()
        self._num_scores -= answer.num_scores
        self._judge(answer)
        if answer.charge is not None:
            self.limits.settle(answer.charge, answer.num_charged_tokens)
        self._count(answer)
        if self._log is not None:
            self._log.write(answer)
        model = "" if answer.served is None else answer.served.model.name
        usage = answer.usage() if answer.has_begun else None
        answer.trace.end(answer.raw, model, answer.outcome, usage)
        for take in self._on_ended:
            take(answer)

    async def _prepare(
        self, answer: Answer, served: ServedModel, card: ModelCard
    ) -> list[PreparedPrompt]:
        try:
            async with asyncio.timeout_at(answer.first_token_deadline):
                request, bring = answer.request, served.router.bring_early
                return await served.preparer.prepare(card, request, bring)
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline passed while the request was tokenised", stage="prepare"
            ) from None

    def _take_room(self, num_scores: int) -> int:
        """The room is kept until the answer is whole."""
        if self._num_scores + num_scores > MAX_SCORES:
            raise Overloaded(
                f"{self._num_scores} log-probabilities of prompts are on their way, at most "
                f"{MAX_SCORES} may be; send the request again",
                stage="prepare",
                retry_after_s=1.0,
            )
        self._num_scores += num_scores
        return num_scores

    def _generations(
        self,
        answer: Answer,
        served: ServedModel,
        prompts: list[PreparedPrompt],
        routing: list[RoutingRequest],
    ) -> list[Generation]:
        request = answer.request
        limits = ResumeLimits(
            max_attempts=self._settings.max_attempts, timeout_s=self._settings.resume_timeout_s
        )
        plan = _plan_maker(answer.card, request)
        return [
            Generation(
                request,
                prompt,
                placing,
                first_index=number * request.sampling.n,
                model=served.model.name,
                plan=plan(
                    prompt_ids=prompt.ids,
                    reasoning=reasoning_of(request, answer.card, prompt),
                    begins_reasoning=prompt.begins_reasoning,
                ),
                router=served.router,
                metrics=self._metrics,
                listener=answer,
                arrival=answer.arrival,
                deadline=answer.deadline,
                first_token_deadline=answer.first_token_deadline,
                limits=limits,
                trace=answer.trace,
            )
            for number, (prompt, placing) in enumerate(zip(prompts, routing, strict=True))
        ]

    async def _pass_gate(
        self,
        answer: Answer,
        served: ServedModel,
        prompts: list[PreparedPrompt],
        routing: list[RoutingRequest],
    ) -> None:
        """Waits only if targets are in force: the request's own, or others'."""
        if not answer.targets and not self._tenants.has_targets:
            return
        request = answer.request
        ask = SloTicket(
            prompts=routing,
            arrival=answer.arrival,
            targets=answer.targets,
            tenant=request.tenant_name,
            weight=self._tenants.of(request.tenant_name).weight,
            max_tokens=sum(prompt.max_tokens for prompt in prompts) * request.sampling.n,
        )
        with answer.trace.stage("admit"):
            await served.latency_admission.enter(ask, answer.first_token_deadline)
        answer.ticket = ask

    def _judge(self, answer: Answer) -> None:
        outcome = answer.target_outcome
        if answer.served is not None and answer.ticket is not None:
            answer.served.latency_admission.ended(
                answer.ticket, answer.first_tokens_at, answer.num_output_tokens
            )
        if outcome is not None:
            self._metrics.observe_targets(outcome)

    def _count(self, answer: Answer) -> None:
        metrics = self._metrics
        metrics.requests.labels(answer.outcome).inc()
        if answer.served is not None:
            metrics.model_requests.labels(answer.served.model.name, answer.outcome).inc()
        if not answer.has_begun:
            if answer.served is not None:
                answer.served.demand.failed(answer.failure)
            return
        if answer.served is not None:
            answer.served.demand.ended(
                len(answer.generations),
                answer.num_prompt_tokens,
                answer.num_cached_tokens,
                answer.num_output_tokens,
            )
        metrics.request_duration.observe(answer.duration_s)
        metrics.prompt_tokens.inc(answer.num_prompt_tokens)
        metrics.cached_prompt_tokens.inc(answer.num_cached_tokens)
        for generation in answer.generations:
            num_generated = sum(len(sample.ids) for sample in generation.samples)
            metrics.observe_prompt(generation.timeline, generation.num_prompt_tokens, num_generated)
            for sample in generation.samples:
                if sample.pace_s is not None:
                    metrics.time_per_output_token.observe(sample.pace_s)


def _expire(answer: Answer) -> None:
    if answer.has_begun:
        limit_s = answer.deadline - answer.arrival
        message = f"the request took longer than {limit_s:g} s"
        answer.fail(DeadlineExceeded(message, stage="decode"))


def _expire_first(answer: Answer) -> None:
    """Fails a request if one of its prompts has no token by the deadline for first tokens."""
    limit_s = answer.request.ttft_timeout
    if answer.has_begun and not all(one.has_tokens for one in answer.generations):
        message = f"the request had no token after {limit_s:g} s"
        answer.fail(DeadlineExceeded(message, stage="decode"))


def _warn(raw: RawRequest, error: WeftError) -> None:
    _log.warning(
        "request failed: %s",
        error.message,
        extra={
            "client_request_id": raw.client_request_id,
            "header_request_id": raw.header_request_id,
            "reason": error.reason,
            "stage": error.stage,
            "worker_id": error.worker_id,
            "attempt": error.attempt,
        },
    )


def _plan_maker(model: ModelCard, request: GenerateRequest) -> Callable[..., RenderPlan]:
    stop = request.stop
    eos_ids = () if stop.ignore_eos else model.eos_ids
    return partial(
        RenderPlan,
        model.vocabulary,
        stops=StopAutomaton(stop.stop) if stop.stop else None,
        patterns=stop_patterns(stop.stop_regex) if stop.stop_regex else None,
        stop_ids=frozenset((*stop.stop_token_ids, *eos_ids)),
        min_tokens=stop.min_tokens,
        include_stop=stop.include_stop_in_output,
        skip_special_tokens=request.skip_special_tokens,
        told_ids=frozenset(stop.stop_token_ids).difference(eos_ids),
        shown_ids=_shown_ids(model, request),
    )


def _shown_ids(model: ModelCard, request: GenerateRequest) -> frozenset[int]:
    """Special tokens by which the answer's parser recognises tool calls and reasoning."""
    if not isinstance(request.prompts[0], ChatPrompt):
        return frozenset()
    calls, marks = request.raw.calls, [] if model.reasoning is None else [*model.reasoning.tokens]
    if model.is_harmony or (calls is not None and not calls.is_demanded):
        marks += model.tool_format.tokens
    ids = (model.tokenizer.token_to_id(mark) for mark in marks)
    return frozenset(id_ for id_ in ids if id_ is not None)


def _most_tokens(request: GenerateRequest, prompts: list[PreparedPrompt]) -> int:
    if request.pooling is not None:
        return sum(len(prompt.ids) for prompt in prompts)
    given = request.stop.max_tokens
    output = [min(prompt.max_tokens, given or ASSUMED_OUTPUT_TOKENS) for prompt in prompts]
    return sum(len(prompt.ids) for prompt in prompts) + request.sampling.n * sum(output)


def _routing(
    request: GenerateRequest,
    prompts: list[PreparedPrompt],
    worker_id: str,
    pooling: PoolingConfig,
    recent: RecentPages,
) -> list[RoutingRequest]:
    base = request.request_id
    return [
        RoutingRequest(
            request_id=base if len(prompts) == 1 else f"{base}-{number}",
            prompt_ids=prompt.ids,
            context_tokens=(len(prompt.ids) + prompt.max_tokens - request.raw.is_echo_alone),
            cache_salt=request.cache_salt,
            routing_key=request.routing_key,
            worker_id=worker_id,
            first_token_s=request.targets.first_token_s,
            adapter=b"" if request.adapter is None else request.adapter.digest,
            is_computed_anew=(
                request.prompt_logprobs is not None or _is_computed_anew(request.pooling, pooling)
            ),
            recent=recent,
            spans=prompt.spans,
        )
        for number, prompt in enumerate(prompts)
    ]


def _is_computed_anew(wanted: PoolingOptions | None, of_model: PoolingConfig) -> bool:
    if wanted is None:
        return False
    is_whole = of_model.is_encoder or of_model.pooling != "last"
    return is_whole or wanted.output in TOKEN_OUTPUTS
