"""Runs one prompt: submits it to an owner, follows it, and resubmits it if the owner is lost."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.common.tasks import log_failure
from weft.contract.codec.walk import duration
from weft.contract.errors import (
    Asleep,
    DeadlineExceeded,
    Draining,
    Internal,
    MediaMissing,
    Overloaded,
    PeerUnavailable,
    WeftError,
    WeightsIncomplete,
)
from weft.contract.tasks import TOKEN_OUTPUTS
from weft.gateway.fleet.session import ReconnectBackoff
from weft.gateway.generation.prompt_outputs import PromptScores, PromptVectors
from weft.gateway.generation.sample_routes import SampleRoutes
from weft.gateway.generation.submit import submit_messages
from weft.gateway.request import GenerateRequest, PreparedPrompt
from weft.gateway.routing import RoutingRequest
from weft.gateway.routing.router import Placement, Router
from weft.gateway.telemetry.metrics import GatewayMetrics
from weft.gateway.telemetry.request_trace import AttemptTrace, RequestTrace
from weft.gateway.text.render import RenderPlan, SampleRenderer
from weft.v1 import common_pb2, decode_pb2

STOP = common_pb2.FINISH_REASON_STOP
CANCELLED = common_pb2.FINISH_REASON_CANCELLED
_REFUSALS = (Draining, Overloaded)
_BRING_TIMEOUT_S = 30.0
"""Longest time in which a worker takes a prompt's media."""
_LOGPROB_BYTES = 32
"""Approximate memory of one log-probability that waits for a slow client."""


@dataclass(slots=True, eq=False)
class SampleOutput:
    """One sample of one prompt. It outlives attempts: its text continues where it was."""

    index: int
    """Index among all samples of the client's request."""
    renderer: SampleRenderer
    ids: list[int] = field(default_factory=list)
    """All tokens so far; a new owner continues from these."""
    num_ids_taken: int = 0
    text: str = ""
    """Text not yet taken."""
    logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)
    """Log-probabilities not yet taken."""
    finish_reason: common_pb2.FinishReason.ValueType | None = None
    is_dirty: bool = False
    """Whether there is something to take."""
    first_token_time: float = 0.0
    """Event loop time; 0: no token yet."""
    last_token_time: float = 0.0
    weight_versions: Sequence[decode_pb2.SessionEvent.VersionSpan] = ()
    """Which weights have drawn its tokens, once it has ended; empty: those of the start."""
    routes: SampleRoutes | None = None
    """The experts of its tokens; None: they are not wanted."""

    @property
    def pace_s(self) -> float | None:
        """Mean seconds between its tokens; None: it has fewer than two."""
        num_gaps = len(self.ids) - 1
        return (self.last_token_time - self.first_token_time) / num_gaps if num_gaps > 0 else None

    def push(self, ids: Sequence[int]) -> str:
        """Takes tokens up to the one that completes a stop string; returns the text to show."""
        if len(ids) == 1:
            self.ids.append(ids[0])
            return self.renderer.push(ids[0])
        text, count = self.renderer.push_all(ids)
        self.ids += ids if count == len(ids) else ids[:count]
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeLimits:
    """Limits of resuming one prompt, besides its deadline."""

    max_attempts: int
    """Number of lost owners with which the request fails. Those that are draining or too busy to
    accept it do not count.
    """
    timeout_s: float
    """Longest time without any owner."""


@dataclass(slots=True)
class _Loss:
    attempt: int
    worker_id: str
    error: WeftError
    num_tokens: int
    at: float
    pause_s: float | None = None
    """Length of the client's pause; None: the pause has not ended."""


class Losses:
    """The lost attempts of one prompt. Times are those of the event loop, in seconds."""

    def __init__(self, limits: ResumeLimits) -> None:
        self._limits = limits
        self._losses: list[_Loss] = []
        self._ownerless_since: float | None = None

    def add(
        self, attempt: int, worker_id: str, error: WeftError, num_tokens: int, at: float
    ) -> None:
        """Records the loss of an attempt, when the samples had `num_tokens` in all."""
        self.end_pause(at)
        self._losses.append(_Loss(attempt, worker_id, error, num_tokens, at))
        if self._ownerless_since is None:
            self._ownerless_since = at

    def owned(self) -> None:
        self._ownerless_since = None

    def end_pause(self, now: float) -> float | None:
        """Length of the client's pause, which ends now; None: there was none."""
        if not self._losses or self._losses[-1].pause_s is not None:
            return None
        self._losses[-1].pause_s = now - self._losses[-1].at
        return self._losses[-1].pause_s

    def is_over(self, error: WeftError) -> bool:
        """Whether the request must not be submitted again after its latest loss."""
        can_mend = error.retryable or error.is_of_worker
        if not can_mend or isinstance(error, DeadlineExceeded):
            return True
        num_counted = sum(not isinstance(loss.error, _REFUSALS) for loss in self._losses)
        return num_counted >= self._limits.max_attempts

    def has_waited_enough(self, now: float) -> bool:
        since = self._ownerless_since
        return since is not None and now - since >= self._limits.timeout_s

    def describe(self) -> list[common_pb2.LostAttempt]:
        """Describes the losses for the timeline."""
        return [
            common_pb2.LostAttempt(
                attempt=loss.attempt,
                worker_id=loss.worker_id,
                code=loss.error.reason,
                message=loss.error.message,
                generated_tokens=loss.num_tokens,
                pause=duration(loss.pause_s or 0.0),
            )
            for loss in self._losses
        ]


class Listener(ABC):
    """The answer that generations add to. Generations know it by this class alone, since the answer
    imports them.
    """

    __slots__ = ()

    @abstractmethod
    def on_sample(self, sample: SampleOutput, num_bytes: int) -> None:
        """A sample has text, log-probabilities or its end to take: about `num_bytes` more."""

    @abstractmethod
    def on_failure(self, generation: Generation) -> None:
        """The prompt has failed for good; `generation.error` says how."""

    @abstractmethod
    def on_settled(self) -> None:
        """The owner has reported the end of all samples of a generation."""


class _Nobody(Listener):
    """Stands in for an answer that has all it will get. Without it an answer and its generations,
    with prompt and media, would be a circle, in memory until the garbage collector's next turn.
    """

    def on_sample(self, sample: SampleOutput, num_bytes: int) -> None: ...

    def on_failure(self, generation: Generation) -> None: ...

    def on_settled(self) -> None: ...


_NOBODY = _Nobody()


class Generation:
    """One prompt, its samples and its attempts. Implements `SessionHandler`.

    When an attempt is lost and a repetition can help, the generation submits the prompt with the
    tokens so far to another owner. The client sees a pause.
    """

    # What each token touches lies together: a gateway goes through thousands of these a step.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_has_proven",
        "_listener",
        "_metrics",
        "prompt_scores",
        "samples",
    )

    def __init__(
        self,
        request: GenerateRequest,
        prompt: PreparedPrompt,
        routing: RoutingRequest,
        *,
        first_index: int,
        model: str,
        plan: RenderPlan,
        router: Router,
        metrics: GatewayMetrics,
        listener: Listener,
        arrival: float,
        deadline: float,
        first_token_deadline: float,
        limits: ResumeLimits,
        trace: RequestTrace,
    ) -> None:
        """Prepares the generation; `start` submits it. Deadlines and `arrival`, when the client's
        request came, are event loop time.

        Args:
            routing: The request as routing policies see it; its `request_id` is the key on
                Sessions.
            first_index: Index of its first sample in the client's request.
            model: Name of the model at the workers.
        """
        self._request = request
        self.prompt = prompt
        """Tokens and limits of the prompt."""
        self._routing = routing
        self.wire_id = routing.request_id
        """The key by which Sessions name this generation."""
        self._model = model
        self._stop_ids = sorted(plan.stop_ids)
        self._router = router
        self._metrics = metrics
        self._listener: Listener = listener
        self._arrival = arrival
        self._deadline = deadline
        self._first_token_deadline = first_token_deadline
        self._trace = trace
        self._attempt_trace: AttemptTrace | None = None
        self._placement: Placement | None = None
        self._has_proven = False
        """Whether the current owner has shown that it works."""
        self._avoided: set[tuple[str, int]] = set()
        """Incarnations that lost this prompt; used again only if there is no other."""
        self._losses = Losses(limits)
        self._was_accepted = False
        """Whether any worker has accepted it."""
        self._backoff = ReconnectBackoff()
        self._recovery: asyncio.Task[None] | None = None
        self._unsettled: set[int] = set()
        self.samples = [
            SampleOutput(first_index + i, SampleRenderer(plan)) for i in range(request.sampling.n)
        ]
        if (begin := request.raw.routes_from) is not None:
            for sample in self.samples:
                sample.routes = SampleRoutes(begin)
        self.prompt_scores = None if request.prompt_logprobs is None else PromptScores(prompt.ids)
        """Log-probabilities of the prompt's tokens; None: they are not wanted."""
        self.vectors = (
            None
            if request.pooling is None
            else PromptVectors(len(prompt.ids) if request.pooling.output in TOKEN_OUTPUTS else 1)
        )
        """Vectors of the prompt; None: tokens are wanted."""
        self.attempt = 0
        self.worker_id = ""
        """Id of its owner, or of the last one; empty: it had none yet."""
        self.error: WeftError | None = None
        """The error with which the prompt failed for good."""
        self.cached_prompt_tokens = 0
        self._timeline = common_pb2.Timeline()

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt.ids)

    @property
    def num_audio_tokens(self) -> int:
        """Those that stand for audio."""
        clips = {one.digest for one in self.prompt.media if one.kind == "audio"}
        return sum(span.length for span in self.prompt.spans if span.digest in clips)

    @property
    def has_tokens(self) -> bool:
        """Whether any sample has a token, or has ended without one."""
        return any(sample.ids or sample.finish_reason is not None for sample in self.samples)

    @property
    def is_settled(self) -> bool:
        """Whether the owner has reported the end of every sample."""
        return not self._unsettled

    @property
    def timeline(self) -> common_pb2.Timeline:
        """Timeline reported by the last owner, and the attempts lost before."""
        timeline = common_pb2.Timeline()
        timeline.CopyFrom(self._timeline)
        timeline.lost_attempts.extend(self._losses.describe())
        return timeline

    @property
    def fills(self) -> Sequence[common_pb2.FillTimeline]:
        """Fills of the prompt, as the last owner reported them."""
        return self._timeline.fills

    @property
    def _missing_scores(self) -> str:
        """The prompt's log-probabilities that have not come, in words; empty: none is missing."""
        return "" if self.prompt_scores is None else self.prompt_scores.missing

    @property
    def _open_samples(self) -> set[int]:
        return {i for i, sample in enumerate(self.samples) if sample.finish_reason is None}

    def start(self) -> None:
        """Submits the prompt to an owner, with the tokens that its samples already have; one with
        media is submitted once its workers have these. Raises PeerUnavailable if there is no owner.
        """
        trace = self._trace.attempt(self.wire_id, self.attempt + 1)
        placement = self._router.place(self._routing, self._avoided)
        self.worker_id = placement.session.worker_id
        trace.routed(self.worker_id, len(placement.candidates))
        if not self.prompt.media:
            self._submit(placement, trace)
            return
        self._unsettled = self._open_samples
        self._recovery = asyncio.create_task(self._bring_media(placement, trace))
        self._recovery.add_done_callback(self._on_recovery_done)

    async def _bring_media(self, placement: Placement, trace: AttemptTrace) -> None:
        left_s = self._deadline - asyncio.get_running_loop().time()
        try:
            await placement.bring(self.prompt.media, max(0.0, min(left_s, _BRING_TIMEOUT_S)))
            self._submit(placement, trace)
        except WeftError as error:
            trace.end(error)
            self._attempt_lost(error, placement)
        except asyncio.CancelledError:
            trace.end(None)
            raise

    def _submit(self, placement: Placement, trace: AttemptTrace) -> None:
        now = asyncio.get_running_loop().time()
        messages = submit_messages(
            self._request,
            self.prompt,
            model=self._model,
            wire_id=self.wire_id,
            attempt=self.attempt + 1,
            stop_ids=self._stop_ids,
            candidates=placement.candidates,
            time_left_s=self._deadline - now,
            first_token_left_s=(self._deadline if self.has_tokens else self._first_token_deadline)
            - now,
            traceparent=trace.traceparent,
            samples=[None if s.finish_reason is not None else s.ids for s in self.samples],
            prompt_logprobs=self._request.prompt_logprobs if self._missing_scores else None,
        )
        for collected in (self.prompt_scores, self.vectors):
            if collected is not None:
                collected.restart()
        placement.session.submit(self.wire_id, self, messages)
        placement.begin()
        if self._request.end_session:
            self._router.end_session(placement.session, self._request)
        self.attempt += 1
        self._timeline = common_pb2.Timeline()
        self._placement = placement
        self._attempt_trace = trace
        self._has_proven = False
        self._unsettled = self._open_samples

    async def _recover(self, error: WeftError) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                self.start()
            except (Asleep, PeerUnavailable, WeightsIncomplete) as nobody:
                # A worker that was lost for another reason may come back, and has weights.
                is_hopeless = isinstance(error, WeightsIncomplete) and type(nobody) is type(error)
                is_hopeless = is_hopeless or self._is_refusal(error)
                if is_hopeless or self._losses.has_waited_enough(loop.time()):
                    self._give_up(nobody if isinstance(nobody, WeightsIncomplete) else error)
                    return
            else:
                self._metrics.retries.inc()
                return
            await self._backoff.sleep()
            # No other worker is available, and the avoided ones may have recovered.
            self._avoided.clear()

    def _is_refusal(self, error: WeftError) -> bool:
        if isinstance(error, Draining):
            return not self._was_accepted
        has_begun = any(sample.ids for sample in self.samples)
        return isinstance(error, Asleep | Overloaded | WeightsIncomplete) and not has_begun

    def _give_up(self, error: WeftError) -> None:
        self.error = error
        self._listener.on_failure(self)

    def on_accepted(self) -> None:
        self._was_accepted = True
        self._losses.owned()
        self._backoff.reset()

    def on_computed_here(self) -> None:
        if self._placement is not None:
            self._placement.stays()

    def on_prompt_logprobs(self, event: decode_pb2.SessionEvent.PromptLogprobs) -> None:
        scores = self.prompt_scores
        problem = "log-probabilities of a prompt" if scores is None else scores.add(event)
        if problem:
            self._violated(problem)

    def on_vectors(self, event: decode_pb2.SessionEvent.Vectors, now: float) -> None:
        problem = "vectors" if self.vectors is None else self.vectors.add(event)
        if problem:
            self._violated(problem)
        elif not self._has_proven:
            self._prove(now)

    def on_routes(self, event: decode_pb2.SessionEvent.Routes) -> None:
        routes = None
        if event.sample < len(self.samples):
            routes = self.samples[event.sample].routes
        problem = f"routes of sample {event.sample}" if routes is None else routes.add(event)
        if problem:
            self._violated(problem)

    def on_tokens(self, event: decode_pb2.SessionEvent.Tokens, now: float) -> None:
        logprobs: Sequence[common_pb2.TokenLogprob] = ()
        if self._request.top_logprobs is not None:
            logprobs = event.logprobs
        # A list is read faster than a field.
        self._take_tokens(event.sample, event.first_index, event.ids[:], logprobs, now)

    def on_token(self, number: int, index: int, token_id: int, now: float) -> None:
        sample = self.samples[number]
        ids = sample.ids
        is_next = len(ids) == index and sample.finish_reason is None
        if not is_next or self.prompt_scores is not None:
            self._take_tokens(number, index, (token_id,), (), now)
            return
        text = sample.renderer.push(token_id)
        ids.append(token_id)
        self._show(number, sample, text, 1, 0, now)

    def _take_tokens(
        self,
        number: int,
        first_index: int,
        ids: Sequence[int],
        logprobs: Sequence[common_pb2.TokenLogprob],
        now: float,
    ) -> None:
        if number >= len(self.samples):
            self._violated(f"tokens of sample {number}")
            return
        sample = self.samples[number]
        if sample.finish_reason is not None:
            return
        if self.prompt_scores is not None and (missing := self.prompt_scores.missing):
            self._violated(f"tokens, but {missing}")
            return
        num_before = len(sample.ids)
        if num_before != first_index:
            if num_before < first_index:
                self._violated(f"tokens {num_before} to {first_index} are missing")
                return
            num_known = num_before - first_index
            ids, logprobs = ids[num_known:], logprobs[num_known:]
        if not ids:
            return
        text = sample.push(ids)
        count, num_bytes = len(sample.ids) - num_before, 0
        if logprobs:
            used = logprobs[:count]
            sample.logprobs.extend(used)
            num_bytes = sum(_LOGPROB_BYTES * (1 + len(entry.top)) for entry in used)
        self._show(number, sample, text, count, num_bytes, now)

    def _show(
        self,
        number: int,
        sample: SampleOutput,
        text: str,
        count: int,
        num_bytes: int,
        now: float,
    ) -> None:
        """Hands on what `count` new tokens have brought; `num_bytes` besides the text's."""
        metrics = self._metrics
        metrics.generation_tokens.value += count
        last = sample.last_token_time
        if last:
            metrics.inter_token_latency.observe((now - last) / count, count)
        if not (last and self._has_proven):
            self._observe_first(sample, now)
        sample.last_token_time = now
        if sample.renderer.is_stopped:
            self.end_sample(number, STOP)
        if text or sample.logprobs or sample.finish_reason is not None:
            sample.text = sample.text + text if sample.text else text
            num_bytes += len(text) if text.isascii() else len(text.encode())
            self._listener.on_sample(sample, num_bytes)

    def _observe_first(self, sample: SampleOutput, now: float) -> None:
        if not self._has_proven:
            self._prove(now)
        if sample.last_token_time:
            return
        sample.first_token_time = now
        if all(not other.last_token_time for other in self.samples):
            self._metrics.time_to_first_token.observe(now - self._arrival)
            self._trace.first_token()

    def _prove(self, now: float) -> None:
        self._has_proven = True
        if self._placement is not None:
            self._placement.worker.breaker.succeeded()
            self._placement.computed()
        pause_s = self._losses.end_pause(now)
        if pause_s is not None:
            self._metrics.resume_pause.observe(pause_s)

    def on_finished(self, event: decode_pb2.SessionEvent.Finished) -> None:
        if event.sample >= len(self.samples):
            self._violated(f"the end of sample {event.sample}")
            return
        sample = self.samples[event.sample]
        self.cached_prompt_tokens = max(self.cached_prompt_tokens, event.cached_prompt_tokens)
        sample.weight_versions = list(event.weight_versions)
        if event.HasField("timeline"):
            # Keeps the timeline of the sample that began first; the others share its prompt's
            # history.
            known = self._timeline
            if not known.ByteSize() or _began(event.timeline) < _began(known):
                self._timeline = event.timeline
            if self._placement is not None:
                self._router.filled(event.timeline.fills, self.prompt.media)
        self._unsettled.discard(event.sample)
        if not self._has_proven:
            self._prove(asyncio.get_running_loop().time())
        if sample.finish_reason is None:
            if self._missing_scores:
                self._violated(f"the end of a sample, but {self._missing_scores}")
                return
            vectors = self.vectors
            if vectors is not None and not vectors.is_complete and event.reason != CANCELLED:
                self._violated(f"the end of a prompt with {vectors.num_rows} vectors")
                return
            if event.completion_tokens != len(sample.ids):
                self._violated(
                    f"{event.completion_tokens} tokens announced, {len(sample.ids)} received"
                )
                return
            by_token = event.reason == STOP and event.HasField("stop_token_id")
            text = sample.renderer.finish(by_stop_token=by_token)
            sample.text += text
            sample.finish_reason = STOP if sample.renderer.is_stopped else event.reason
            self._listener.on_sample(sample, len(text.encode()))
        if not self._unsettled:
            self._settle()

    def on_failed(self, error: WeftError) -> None:
        if not self._open_samples:
            # The client has its whole answer; only the owner's report is missing.
            self._settle()
            return
        self._attempt_lost(error, self._detach(error))

    def _attempt_lost(self, error: WeftError, placement: Placement | None) -> None:
        now = asyncio.get_running_loop().time()
        if placement is not None and isinstance(error, MediaMissing):
            # The same worker is as good as another, once it has the media.
            placement.forget(self.prompt.media)
        elif placement is not None:
            self._avoided.add(placement.incarnation)
            if isinstance(error, PeerUnavailable):
                self._avoided |= placement.companions
        num_tokens = sum(len(sample.ids) for sample in self.samples)
        self._losses.add(self.attempt, error.worker_id, error, num_tokens, now)
        if self._losses.is_over(error):
            self._give_up(error)
            return
        if num_tokens:
            self._metrics.resumptions.inc()
        self._recovery = asyncio.create_task(self._recover(error))
        self._recovery.add_done_callback(self._on_recovery_done)

    def _on_recovery_done(self, task: asyncio.Task[None]) -> None:
        log_failure(task)
        if not task.cancelled() and task.exception() is not None:
            self._give_up(Internal("the request could not be resumed", stage="session"))

    def _settle(self) -> None:
        self._unsettled.clear()
        self._end_recovery()
        self._detach()
        listener, self._listener = self._listener, _NOBODY
        listener.on_settled()

    def _violated(self, what: str) -> None:
        placement = self._placement
        worker_id = "" if placement is None else placement.session.worker_id
        self._cancel_remote(None)
        self.on_failed(
            PeerUnavailable(
                f"decode worker {worker_id} broke the protocol: {what}",
                stage="protocol",
                worker_id=worker_id,
                attempt=self.attempt,
            )
        )

    def end_sample(self, number: int, reason: common_pb2.FinishReason.ValueType) -> None:
        """Ends a sample from this side and informs the owner. `number` counts within this prompt;
        `reason` is for the client.
        """
        sample = self.samples[number]
        if sample.finish_reason is None:
            sample.finish_reason = reason
            if self._placement is None:  # between two owners
                if not self._open_samples:
                    self._settle()
            elif number in self._unsettled:
                self._cancel_remote(number)

    def close(self) -> None:
        """Cancels unfinished work at the owner, and takes no more events."""
        self._end_recovery()
        if self._unsettled:
            self._cancel_remote(None)
        self._detach()
        self._listener = _NOBODY

    def _end_recovery(self) -> None:
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            recovery.cancel()

    def _cancel_remote(self, number: int | None) -> None:
        if self._placement is not None:
            self._placement.session.cancel(self.wire_id, self.attempt, number)

    def _detach(self, error: WeftError | None = None) -> Placement | None:
        """`error` is what the owner did wrong, if anything."""
        placement, self._placement = self._placement, None
        if placement is not None:
            placement.session.release(self.wire_id)
            placement.end(error, is_proven=self._has_proven)
        if self._attempt_trace is not None:
            self._attempt_trace.end(error)
        return placement


def _began(timeline: common_pb2.Timeline) -> tuple[float, int]:
    """Nanoseconds from the submission to a sample's first token, and to the end of its queueing."""
    has_first = timeline.HasField("first_token_time")
    first = timeline.first_token_time.ToNanoseconds() if has_first else math.inf
    return first, timeline.queued_time.ToNanoseconds()
