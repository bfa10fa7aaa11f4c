"""Runs one prompt: submits it to an owner, follows it, and resubmits it if the owner is lost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from weft.common.tasks import log_failure
from weft.contract.errors import (
    Draining,
    Internal,
    Overloaded,
    PeerUnavailable,
    WeftError,
)
from weft.contract.tasks import TOKEN_OUTPUTS
from weft.gateway.fleet.session import ReconnectBackoff
from weft.gateway.generation.prompt_scores import PromptScores
from weft.gateway.generation.prompt_vectors import PromptVectors
from weft.gateway.generation.resume import Losses, ResumeLimits
from weft.gateway.generation.sample_output import SampleOutput
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
_LOGPROB_BYTES = 32
"""Approximate memory of one log-probability that waits for a slow client."""


class Listener:
    """Informed by generations when there is something for the client; see `TokenStream`."""

    def on_sample(self, sample: SampleOutput, num_bytes: int) -> None:
        """Called when a sample has text, log-probabilities or its end to take: about `num_bytes`
        more.
        """

    def on_failure(self, generation: Generation) -> None:
        """Called when the prompt has failed for good; `generation.error` says how."""

    def on_settled(self) -> None:
        """Called when the owner has reported the end of all samples of a generation."""


class Generation:
    """One prompt, its samples and its attempts. Implements `SessionHandler`.

    When an attempt is lost and a repetition can help, the generation submits the prompt with the
    tokens so far to another owner. The client sees a pause.
    """

    def __init__(
        self,
        request: GenerateRequest,
        prompt: PreparedPrompt,
        routing: RoutingRequest,
        *,
        first_index: int,
        model: str,
        seed: int,
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
        """Prepares the generation; `start` submits it.

        Args:
            request: The client's request.
            prompt: This prompt.
            routing: The request as routing policies see it; its `request_id` is the key on
                Sessions.
            first_index: Index of its first sample in the client's request.
            model: Name of the model at the workers.
            seed: Seed of all its attempts.
            plan: How its samples are rendered.
            router: Chooses owners.
            metrics: Where tokens are counted.
            listener: Informed of tokens, failures and the end.
            arrival: Event loop time at which the client's request came.
            deadline: Event loop time at which it must have ended.
            first_token_deadline: Event loop time at which it must have its first token.
            limits: Limits of resuming after the owner is lost.
            trace: Receives the spans of the attempts.
        """
        self._request = request
        self.prompt = prompt
        """Tokens and limits of the prompt."""
        self._routing = routing
        self.wire_id = routing.request_id
        """The key by which Sessions name this generation."""
        self._model = model
        self.seed = seed
        """Seed of all its attempts."""
        self._stop_ids = sorted(plan.stop_ids)
        self._router = router
        self._metrics = metrics
        self._listener = listener
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
        self.prompt_scores = None if request.prompt_logprobs is None else PromptScores(prompt.ids)
        """Log-probabilities of the prompt's tokens; None: they are not wanted."""
        self.vectors = (
            None
            if request.wants is None
            else PromptVectors(len(prompt.ids) if request.wants.output in TOKEN_OUTPUTS else 1)
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
        """The log-probabilities of the prompt that have not come; empty: none is missing."""
        return "" if self.prompt_scores is None else self.prompt_scores.missing

    @property
    def _open_samples(self) -> set[int]:
        return {i for i, sample in enumerate(self.samples) if sample.finish_reason is None}

    def start(self) -> None:
        """Submits the prompt to an owner, with the tokens that its samples already have.

        Raises:
            PeerUnavailable: There is no owner.
        """
        now = asyncio.get_running_loop().time()
        trace = self._trace.attempt(self.wire_id, self.attempt + 1)
        placement = self._router.place(self._routing, self._avoided)
        self.worker_id = placement.session.worker_id
        trace.routed(self.worker_id, len(placement.candidates))
        messages = submit_messages(
            self._request,
            self.prompt,
            model=self._model,
            wire_id=self.wire_id,
            attempt=self.attempt + 1,
            seed=self.seed,
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
        if self._request.ends_session:
            self._router.end_session(placement.session, self._request)
        self.attempt += 1
        self._timeline = common_pb2.Timeline()
        self._placement = placement
        self._attempt_trace = trace
        self._has_proven = False
        self._unsettled = self._open_samples

    async def _recover(self, error: WeftError) -> None:
        """Looks for another owner, repeatedly until the limits are reached."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                self.start()
            except PeerUnavailable:
                if self._is_refusal(error) or self._losses.has_waited_enough(loop.time()):
                    self._give_up(error)
                    return
            else:
                self._metrics.retries.inc()
                return
            await self._backoff.sleep()
            # No other worker is available, and the avoided ones may have recovered.
            self._avoided.clear()

    def _is_refusal(self, error: WeftError) -> bool:
        """Whether an error is a refusal, after which the client can simply ask again later."""
        if isinstance(error, Draining):
            return not self._was_accepted
        return isinstance(error, Overloaded) and not any(sample.ids for sample in self.samples)

    def _give_up(self, error: WeftError) -> None:
        self.error = error
        self._listener.on_failure(self)

    def on_accepted(self) -> None:
        """See `SessionHandler`."""
        self._was_accepted = True
        self._losses.owned()
        self._backoff.reset()

    def on_computed_here(self) -> None:
        """See `SessionHandler`."""
        if self._placement is not None:
            self._placement.stays()

    def on_prompt_logprobs(self, event: decode_pb2.SessionEvent.PromptLogprobs) -> None:
        """See `SessionHandler`."""
        scores = self.prompt_scores
        problem = "log-probabilities of a prompt" if scores is None else scores.add(event)
        if problem:
            self._violated(problem)

    def on_vectors(self, event: decode_pb2.SessionEvent.Vectors, now: float) -> None:
        """See `SessionHandler`."""
        problem = "vectors" if self.vectors is None else self.vectors.add(event)
        if problem:
            self._violated(problem)
        elif not self._has_proven:
            self._prove(now)

    def on_tokens(self, event: decode_pb2.SessionEvent.Tokens, now: float) -> None:
        """See `SessionHandler`."""
        if event.sample >= len(self.samples):
            self._violated(f"tokens of sample {event.sample}")
            return
        sample = self.samples[event.sample]
        if sample.finish_reason is not None:
            return
        if self._missing_scores:
            self._violated(f"tokens, but {self._missing_scores}")
            return
        ids: Sequence[int] = event.ids
        logprobs: Sequence[common_pb2.TokenLogprob] = event.logprobs
        num_known = len(sample.ids) - event.first_index
        if num_known:
            if num_known < 0:
                self._violated(f"tokens {len(sample.ids)} to {event.first_index} are missing")
                return
            ids, logprobs = ids[num_known:], logprobs[num_known:]
        if not ids:
            return
        num_before = len(sample.ids)
        text = sample.push(ids)
        self._metrics.generation_tokens.inc(len(sample.ids) - num_before)
        num_bytes = len(text) if text.isascii() else len(text.encode())
        if logprobs:
            num_used = len(sample.ids) - event.first_index - num_known
            used = logprobs[:num_used]
            sample.logprobs.extend(used)
            num_bytes += sum(_LOGPROB_BYTES * (1 + len(entry.top)) for entry in used)
        self._observe(sample, len(ids), now)
        if sample.renderer.is_stopped:
            self.end_sample(event.sample, STOP)
        if text or sample.logprobs or sample.finish_reason is not None:
            sample.text += text
            self._listener.on_sample(sample, num_bytes)

    def _observe(self, sample: SampleOutput, count: int, now: float) -> None:
        metrics = self._metrics
        if not self._has_proven:
            self._prove(now)
        if sample.last_token_time:
            metrics.inter_token_latency.observe((now - sample.last_token_time) / count, count)
        elif all(not other.last_token_time for other in self.samples):
            metrics.time_to_first_token.observe(now - self._arrival)
            self._trace.first_token()
        sample.first_token_time = sample.first_token_time or now
        sample.last_token_time = now

    def _prove(self, now: float) -> None:
        """Notes that the owner works, since it has produced something."""
        self._has_proven = True
        if self._placement is not None:
            self._placement.worker.breaker.succeeded()
            self._placement.computed()
        pause_s = self._losses.end_pause(now)
        if pause_s is not None:
            self._metrics.resume_pause.observe(pause_s)

    def on_finished(self, event: decode_pb2.SessionEvent.Finished) -> None:
        """See `SessionHandler`."""
        if event.sample >= len(self.samples):
            self._violated(f"the end of sample {event.sample}")
            return
        sample = self.samples[event.sample]
        self.cached_prompt_tokens = max(self.cached_prompt_tokens, event.cached_prompt_tokens)
        if event.HasField("timeline"):
            # Keeps the timeline of the sample that began first; the others share its prompt's
            # history.
            known = self._timeline
            if not known.ByteSize() or _began(event.timeline) < _began(known):
                self._timeline = event.timeline
            if self._placement is not None:
                self._router.filled(event.timeline.fills)
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
        """See `SessionHandler`."""
        if not self._open_samples:
            # The client has its whole answer; only the owner's report is missing.
            self._settle()
            return
        now = asyncio.get_running_loop().time()
        placement = self._detach(error)
        if placement is not None:
            self._avoided.add(placement.incarnation)
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
        """Ends the generation once nothing is left to be done or reported."""
        self._unsettled.clear()
        self._end_recovery()
        self._detach()
        self._listener.on_settled()

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
        """Ends a sample from this side; informs the owner.

        Args:
            number: Number of the sample within this prompt.
            reason: Finish reason for the client.
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

    def _end_recovery(self) -> None:
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            recovery.cancel()

    def _cancel_remote(self, number: int | None) -> None:
        if self._placement is not None:
            self._placement.session.cancel(self.wire_id, self.attempt, number)

    def _detach(self, error: WeftError | None = None) -> Placement | None:
        """Detaches from the owner; `error` is what it did wrong, if anything."""
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
