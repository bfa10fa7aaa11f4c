"""The stages of a request in the gateway: check, admit, prepare, route, run, render."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import islice

from weft.checkpoint.pooling import PoolingConfig
from weft.common.durations import duration
from weft.common.telemetry.logging import trace_id as current_trace_id
from weft.common.telemetry.spans import Tracer
from weft.contract.errors import (
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    PeerUnavailable,
    WeftError,
)
from weft.contract.keys import RecentPages
from weft.contract.tasks import TOKEN_OUTPUTS
from weft.gateway.admission.admission import Admission, shutting_down
from weft.gateway.admission.keys import Tenant, name_of
from weft.gateway.admission.limits import ASSUMED_OUTPUT_TOKENS, RateLimits
from weft.gateway.admission.slo import AdmissionRequest
from weft.gateway.admission.tenants import Rates, Tenants
from weft.gateway.catalogue import Catalogue, ResolvedModel, ServedModel
from weft.gateway.generation.generation import Generation
from weft.gateway.generation.record import RequestRecord
from weft.gateway.generation.resume import ResumeLimits
from weft.gateway.generation.stream import TokenStream
from weft.gateway.request import (
    ChatPrompt,
    GenerateRequest,
    PreparedPrompt,
    ResolvedAdapter,
    Sampling,
    Wants,
)
from weft.gateway.routing import RoutingRequest
from weft.gateway.settings import GatewaySettings
from weft.gateway.telemetry.metrics import GatewayMetrics
from weft.gateway.telemetry.request_log import GatewayRequestLog
from weft.gateway.telemetry.request_trace import RequestTrace
from weft.gateway.text.answer.demand import blame_constraint, warn_of_unknown
from weft.gateway.text.answer.make import reasoning_of, settle_constraint
from weft.gateway.text.model_card import ModelCard
from weft.gateway.text.pooled_prompts import for_model
from weft.gateway.text.render import RenderPlan
from weft.gateway.text.stop_patterns import stop_patterns
from weft.gateway.text.stops import StopAutomaton
from weft.gateway.validate import check_request, num_prompt_logprobs, unsupported
from weft.v1 import gateway_pb2

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
        on_ended: Sequence[Callable[[RequestRecord], None]] = (),
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
        self._open: dict[str, RequestRecord] = {}
        """Requests that wait or run, by their ids, oldest first."""
        self._has_ended = False
        self._recent = RecentPages()
        """Prompts of earlier requests."""
        self._num_scores = 0
        """Log-probabilities of prompts that requests have room for."""

    def _backlog_s(self) -> float | None:
        """Backlog of the model whose workers have most to do."""
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
    def running_ids(self) -> list[str]:
        """Ids of the requests that run, oldest first."""
        return [id_ for id_, record in self._open.items() if record.stream is not None]

    def num_using(self, digest: bytes) -> int:
        """Number of requests that wait or run with an adapter of this content."""
        adapters = (record.request.adapter for record in self._open.values())
        return sum(one is not None and one.digest == digest for one in adapters)

    def open_requests(self, limit: int) -> list[RequestRecord]:
        """The requests that wait or run, oldest first, `limit` at most."""
        return list(islice(self._open.values(), limit))

    def cancel(self, request_id: str, tenant: Tenant | None) -> bool:
        """Cancels a request of a tenant that waits or runs.

        Args:
            request_id: The gateway's id of the request, or the client's or the header's, which
                several requests may share.
            tenant: The tenant that the request must belong to.

        Returns:
            False if the tenant has no such request here.
        """
        if not request_id:  # requests without a name have this one
            return False
        found = [
            record
            for id_, record in self._open.items()
            if request_id
            in (id_, record.request.client_request_id, record.request.header_request_id)
            and record.request.tenant == tenant
        ]
        for record in found:
            if record.stream is not None:
                record.stream.cancel()
            elif record.waiter is not None and not record.is_cancelled:
                record.is_cancelled = True
                record.waiter.cancel()
        return bool(found)

    def end_all(self) -> None:
        """Fails all running and admitted requests because the gateway ends."""
        self._has_ended = True
        for record in list(self._open.values()):
            if record.stream is not None:
                record.stream.fail(shutting_down("decode"))

    @asynccontextmanager
    async def open(self, request: GenerateRequest) -> AsyncIterator[TokenStream]:
        """Runs a request for the duration of the block; leaving it cancels what is unfinished.

        Args:
            request: The request as a dialect translated it, not checked yet.

        Yields:
            The stream of its deltas.

        Raises:
            WeftError: The request was refused.
        """
        arrival = asyncio.get_running_loop().time()
        trace = RequestTrace(self._tracer, request.request_id, request.traceparent)
        current_trace_id.set(trace.trace_id)
        record = RequestRecord(
            request=request, arrival=arrival, trace=trace, waiter=asyncio.current_task()
        )
        self._open[request.request_id] = record
        try:
            async with self._run(record) as stream:
                yield stream
            record.outcome = "ok"
        except WeftError as error:
            record.outcome, record.failure = error.reason.lower(), error
            if error.param == "constraint":
                blame_constraint(error, request.constraint_param)
            if error.http_status >= 500:
                _warn(request, error)
            raise
        except BaseException as error:
            record.outcome, record.failure = "error", error
            if isinstance(error, asyncio.CancelledError):
                record.outcome = Cancelled.reason.lower()
                if record.is_cancelled and record.waiter is not None:
                    record.waiter.uncancel()
                    raise Cancelled("the request was cancelled by its id", stage="queue") from None
            raise
        finally:
            del self._open[request.request_id]
            self._close(record)
            # Its frames hold the record: they would live until the collector finds this cycle.
            record.failure = None

    @asynccontextmanager
    async def _run(self, record: RequestRecord) -> AsyncIterator[TokenStream]:
        """Finds the model of a request, checks the request, and runs it once it is admitted."""
        resolved = await self._models.find(record.request.model)
        served = record.served = resolved.served
        request = record.request = replace(record.request, adapter=resolved.adapter)
        self._set_deadlines(record)
        time_left_s = record.first_token_deadline - asyncio.get_running_loop().time()
        card = await self._models.card(resolved, max(0.0, time_left_s))
        check_request(request, card, self._settings.max_prompts)
        if (constraint := request.sampling.constraint) is not None:
            warn_of_unknown(constraint, request.constraint_param)
        if request.wants is not None or served.task != "generate":
            request = for_model(request, card, served.task)
        terms, tenant = self._tenants.of(request.tenant), name_of(request.tenant)
        if request.tenant is not None:
            request = replace(
                request,
                cache_salt=request.tenant.salt(request.cache_salt),
                session_id=request.tenant.session(request.session_id),
            )
        request = record.request = replace(
            request,
            targets=request.targets.over(terms.targets),
            sampling=request.sampling.with_defaults(card.sampling),
        )
        record.targets = request.targets
        record.charge = self.limits.begin(tenant, terms, record.arrival)
        with record.trace.stage("queue"):
            admitted = await self._admission.admit(
                len(request.prompts), record.first_token_deadline, tenant, terms.weight
            )
        with admitted:
            async with self._run_admitted(record, resolved, card, admitted.release) as stream:
                yield stream

    def _set_deadlines(self, record: RequestRecord) -> None:
        """Sets the times by which the request, and its first token, must be there."""
        given_s, limit_s = record.request.timeout_s, self._settings.request_timeout_s
        first_s = record.request.first_token_timeout_s
        record.deadline = record.arrival + (limit_s if given_s is None else min(limit_s, given_s))
        record.first_token_deadline = (
            record.deadline if first_s is None else min(record.deadline, record.arrival + first_s)
        )

    @asynccontextmanager
    async def _run_admitted(
        self,
        record: RequestRecord,
        resolved: ResolvedModel,
        card: ModelCard,
        release: Callable[[], None],
    ) -> AsyncIterator[TokenStream]:
        """Prepares a request's prompts, sends them to workers, and yields the stream of deltas.

        Args:
            record: A request that has passed its checks.
            resolved: What its `model` refers to.
            card: The card of that.
            release: Lets the next request in place of this one.
        """
        loop, served = asyncio.get_running_loop(), resolved.served
        with record.trace.stage("prepare"):
            prompts = await self._prepare(record, served, card)
        request = record.request = settle_constraint(record.request, card, prompts)
        record.num_scores = self._take_room(num_prompt_logprobs(request, prompts))
        await self._find_worker(served, request.adapter, record.first_token_deadline)
        assert record.charge is not None, "a request is charged before it is admitted"
        self.limits.reserve(record.charge, _most_tokens(request, prompts), loop.time())
        worker_id = self._named_worker(served, request)
        routing = _routing(request, prompts, worker_id, card.pooling, self._recent)
        await self._pass_gate(record, served, prompts, routing)
        if self._has_ended:
            raise shutting_down("admit")
        stream = record.stream = TokenStream(
            request.request_id, card, self._settings.max_unsent_bytes, release
        )
        stream.trace_id = record.trace.trace_id
        stream.model = resolved.name
        stream.headers = self.limits.headers(name_of(request.tenant), loop.time())
        record.waiter = None
        timers = [loop.call_at(record.deadline, _expire, record)]
        if request.first_token_timeout_s is not None:
            timers.append(loop.call_at(record.first_token_deadline, _expire_first, record))
        try:
            stream.start(self._generations(record, served, stream, prompts, routing))
            if record.ask is not None:
                served.latency_admission.gate.began(record.ask)
            yield stream
        finally:
            for timer in timers:
                timer.cancel()
            stream.close()

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

    def _named_worker(self, served: ServedModel, request: GenerateRequest) -> str:
        """Id of the decode worker that a request is for; empty: the router chooses."""
        if request.worker is None:
            return ""
        if not self._settings.allow_worker_choice:
            raise unsupported(
                request.worker.param, "requests choose their worker only with --allow-worker-choice"
            )
        return served.router.named(request.worker)

    def _close(self, record: RequestRecord) -> None:
        """Records the end of a request."""
        record.ended_at = asyncio.get_running_loop().time()
        self._num_scores -= record.num_scores
        self._judge(record)
        if record.charge is not None:
            self.limits.settle(record.charge, record.num_charged_tokens)
        self._count(record)
        if self._log is not None:
            self._log.write(record)
        record.trace.end(record)
        for take in self._on_ended:
            take(record)

    async def _prepare(
        self, record: RequestRecord, served: ServedModel, card: ModelCard
    ) -> list[PreparedPrompt]:
        request = record.request
        try:
            async with asyncio.timeout_at(record.first_token_deadline):
                return await served.preparer.prepare(
                    card,
                    request.prompts,
                    request.stopping,
                    request.wants,
                    max_tokens_param=request.max_tokens_param,
                )
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline passed while the request was tokenised", stage="prepare"
            ) from None

    def _take_room(self, num_scores: int) -> int:
        """Reserves room for prompts' log-probabilities, kept until the answer is whole."""
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
        record: RequestRecord,
        served: ServedModel,
        stream: TokenStream,
        prompts: list[PreparedPrompt],
        routing: list[RoutingRequest],
    ) -> list[Generation]:
        request = record.request
        limits = ResumeLimits(
            max_attempts=self._settings.max_attempts, timeout_s=self._settings.resume_timeout_s
        )
        plan = _plan_maker(stream.card, request)
        return [
            Generation(
                request,
                prompt,
                placing,
                first_index=number * request.sampling.n,
                model=served.model.name,
                seed=_seed(request.sampling),
                plan=plan(
                    prompt_ids=prompt.ids,
                    reasoning=reasoning_of(request, stream.card, prompt),
                    begins_reasoning=prompt.begins_reasoning,
                ),
                router=served.router,
                metrics=self._metrics,
                listener=stream,
                arrival=record.arrival,
                deadline=record.deadline,
                first_token_deadline=record.first_token_deadline,
                limits=limits,
                trace=record.trace,
            )
            for number, (prompt, placing) in enumerate(zip(prompts, routing, strict=True))
        ]

    async def _pass_gate(
        self,
        record: RequestRecord,
        served: ServedModel,
        prompts: list[PreparedPrompt],
        routing: list[RoutingRequest],
    ) -> None:
        """Waits until the request may be sent, if targets are in force: its own, or others'."""
        if not record.targets and not self._tenants.has_targets:
            return
        request = record.request
        ask = AdmissionRequest(
            prompts=routing,
            arrival=record.arrival,
            targets=record.targets,
            tenant=name_of(request.tenant),
            weight=self._tenants.of(request.tenant).weight,
            max_tokens=sum(prompt.max_tokens for prompt in prompts) * request.sampling.n,
        )
        with record.trace.stage("admit"):
            await served.latency_admission.enter(ask, record.first_token_deadline)
        record.ask = ask

    def _judge(self, record: RequestRecord) -> None:
        """Reports a request's outcome to the gate and the metrics."""
        outcome = record.target_outcome
        if record.served is not None and record.ask is not None:
            record.served.latency_admission.ended(
                record.ask, record.first_tokens_at, record.num_output_tokens
            )
        if outcome is not None:
            self._metrics.observe_targets(outcome)

    def _count(self, record: RequestRecord) -> None:
        metrics = self._metrics
        metrics.requests.labels(record.outcome).inc()
        if record.served is not None:
            metrics.model_requests.labels(record.served.model.name, record.outcome).inc()
        if record.stream is None:
            return
        metrics.request_duration.observe(record.duration_s)
        metrics.prompt_tokens.inc(record.num_prompt_tokens)
        metrics.cached_prompt_tokens.inc(record.num_cached_tokens)
        for generation in record.generations:
            num_generated = sum(len(sample.ids) for sample in generation.samples)
            metrics.observe_prompt(generation.timeline, generation.num_prompt_tokens, num_generated)
            for sample in generation.samples:
                metrics.observe_sample(sample)


def _expire(record: RequestRecord) -> None:
    """Fails a request that has not ended by its deadline."""
    if record.stream is not None:
        limit_s = record.deadline - record.arrival
        message = f"the request took longer than {limit_s:g} s"
        record.stream.fail(DeadlineExceeded(message, stage="decode"))


def _expire_first(record: RequestRecord) -> None:
    """Fails a request of which a prompt has no token by the deadline for first tokens."""
    stream, limit_s = record.stream, record.request.first_token_timeout_s
    if stream is not None and not all(one.has_tokens for one in stream.generations):
        message = f"the request had no token after {limit_s:g} s"
        stream.fail(DeadlineExceeded(message, stage="decode"))


def _warn(request: GenerateRequest, error: WeftError) -> None:
    _log.warning(
        "request failed: %s",
        error.message,
        extra={
            "client_request_id": request.client_request_id,
            "header_request_id": request.header_request_id,
            "reason": error.reason,
            "stage": error.stage,
            "worker_id": error.worker_id,
            "attempt": error.attempt,
        },
    )


def _seed(sampling: Sampling) -> int:
    """Draws the seed of one prompt: equal prompts of a request get different answers."""
    return secrets.randbits(64) if sampling.seed is None else sampling.seed % 2**64


def _plan_maker(model: ModelCard, request: GenerateRequest) -> Callable[..., RenderPlan]:
    """Makes the render plans of a request's prompts, which share stop strings and formats."""
    stopping = request.stopping
    eos_ids = () if stopping.ignore_eos else model.eos_ids
    return partial(
        RenderPlan,
        model.vocabulary,
        stops=StopAutomaton(stopping.stops) if stopping.stops else None,
        patterns=stop_patterns(stopping.stop_regexes) if stopping.stop_regexes else None,
        stop_ids=frozenset((*stopping.stop_token_ids, *eos_ids)),
        min_tokens=stopping.min_tokens,
        include_stop=stopping.include_stop,
        skip_special_tokens=request.skip_special_tokens,
        told_ids=frozenset(stopping.stop_token_ids).difference(eos_ids),
        shown_ids=_shown_ids(model, request),
    )


def _shown_ids(model: ModelCard, request: GenerateRequest) -> frozenset[int]:
    """Special tokens by which the answer's parser recognises tool calls and reasoning."""
    if not isinstance(request.prompts[0], ChatPrompt):
        return frozenset()
    calls, marks = request.calls, [] if model.reasoning is None else [*model.reasoning.tokens]
    if model.is_harmony or (calls is not None and not calls.is_demanded):
        marks += model.tool_format.tokens
    ids = (model.tokenizer.token_to_id(mark) for mark in marks)
    return frozenset(id_ for id_ in ids if id_ is not None)


def _most_tokens(request: GenerateRequest, prompts: list[PreparedPrompt]) -> int:
    """Most tokens that a request may come to, as far as it says."""
    if request.wants is not None:
        return sum(len(prompt.ids) for prompt in prompts)
    given = request.stopping.max_tokens
    output = [min(prompt.max_tokens, given or ASSUMED_OUTPUT_TOKENS) for prompt in prompts]
    return sum(len(prompt.ids) for prompt in prompts) + request.sampling.n * sum(output)


def _routing(
    request: GenerateRequest,
    prompts: list[PreparedPrompt],
    worker_id: str,
    pooling: PoolingConfig,
    recent: RecentPages,
) -> list[RoutingRequest]:
    """Each prompt as policies see it, with its name on Sessions."""
    base = request.request_id
    return [
        RoutingRequest(
            request_id=base if len(prompts) == 1 else f"{base}-{number}",
            prompt_ids=prompt.ids,
            context_tokens=(len(prompt.ids) + prompt.max_tokens - request.stopping.is_echo_alone),
            cache_salt=request.cache_salt,
            routing_key=request.routing_key,
            worker_id=worker_id,
            first_token_s=request.targets.first_token_s,
            adapter=b"" if request.adapter is None else request.adapter.digest,
            is_computed_anew=(
                request.prompt_logprobs is not None or _is_computed_anew(request.wants, pooling)
            ),
            recent=recent,
        )
        for number, prompt in enumerate(prompts)
    ]


def _is_computed_anew(wants: Wants | None, pooling: PoolingConfig) -> bool:
    """Whether all of a prompt is computed, whatever is cached."""
    if wants is None:
        return False
    is_whole = pooling.is_encoder or pooling.pooling != "last"
    return is_whole or wants.output in TOKEN_OUTPUTS
