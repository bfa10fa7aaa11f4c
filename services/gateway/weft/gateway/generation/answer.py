"""One client's request under way, and what it has come to so far.

    arrives -> waits -> `begin` -> runs -> ends with an outcome
                  \\____________ refused ____/

The pipeline moves an answer on, generations add to it, the dialect takes its deltas, and the log,
metrics, traces, the console and the latency gate read it. Times are those of the event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from weft.contract.errors import (
    Cancelled,
    Overloaded,
    PeerUnavailable,
    SlowClient,
    WeftError,
)
from weft.gateway.admission.limits import Charge
from weft.gateway.admission.slo import NO_TARGETS, SloTicket, Targets
from weft.gateway.catalogue import ServedModel
from weft.gateway.generation.generation import CANCELLED, Generation, Listener, SampleOutput
from weft.gateway.request import GenerateRequest, RawRequest, ResolvedAdapter
from weft.gateway.telemetry.request_trace import RequestTrace
from weft.gateway.text.model_card import ModelCard
from weft.v1 import common_pb2

_SETTLE_TIMEOUT_S = 1.0
MAX_AT_ONCE = 256
"""Most prompts of a request at workers at once: their queues are bounded."""


class Delta(NamedTuple):
    """What one sample gained since the last delta."""

    sample: int
    """Index of the sample over all prompts."""
    text: str
    ids: Sequence[int]
    logprobs: Sequence[common_pb2.TokenLogprob]
    finish_reason: common_pb2.FinishReason.ValueType | None
    """Set in the sample's last delta."""
    stop_reason: str | int | None
    """The stop string or the stop token that ended the sample; None: neither did."""


_new_delta: Callable[[tuple[object, ...]], Delta] = partial(tuple.__new__, Delta)
"""`Delta` of its fields in order, without a call of Python for each token."""


class Outlet(Protocol):
    """Where the events of a streamed answer go."""

    def send(self, data: bytes) -> bool:
        """Sends whole events. False: `ready` must be awaited before the next ones."""
        ...

    async def ready(self) -> None:
        """Waits until more may be sent. Raises PeerUnavailable if the client's side is lost."""
        ...


class Deliveries:
    """Answers with new deltas. Those that messages of workers brought together are sent together,
    in one turn of the event loop, instead of a turn of a task for each.
    """

    def __init__(self) -> None:
        self._answers: list[Answer] = []

    def add(self, answer: Answer) -> None:
        """Has an answer's deltas sent in the event loop's next turn."""
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._send)
        self._answers.append(answer)

    def _send(self) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            answer.send_deltas()


class Answer(Listener):
    """A client's request from its arrival to its end.

    A slow client gets fewer, larger deltas. A client with more than `max_unsent_bytes` waiting
    fails with `SlowClient`. gRPC cannot end a call while one of its messages is unsent, so such a
    client gets the error when it reads again. The request's resources are released at once.
    """

    # What each token touches lies together: a gateway goes through thousands of answers a step.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_deliveries",
        "_dirty",
        "_encode",
        "_max_unsent_bytes",
        "_num_open",
        "_outlet",
        "_unsent_bytes",
    )

    card: ModelCard
    """The base model, with the tokenizer and the chat template of its adapter; set by `begin`."""
    request: GenerateRequest
    """The complete request; set by `complete`."""

    def __init__(
        self,
        raw: RawRequest,
        trace: RequestTrace,
        max_unsent_bytes: int,
        deliveries: Deliveries,
    ) -> None:
        self.raw = raw
        """The request as its dialect has read it."""
        self.trace = trace
        self.arrival = asyncio.get_running_loop().time()
        self.deadline = math.inf
        self.first_token_deadline = math.inf
        """When each of its prompts must have a token, if the client says so; else its deadline."""
        self.served: ServedModel | None = None
        """The model that serves it; None: the requested one does not exist, or is not known yet."""
        self.adapter: ResolvedAdapter | None = None
        """Adapter that the request names, once resolved; None: the base model."""
        self.model = raw.model
        """Name of the model or adapter; until it runs, as the client gave it."""
        self.targets: Targets = NO_TARGETS
        """Latency targets in force for it, once it has passed its checks."""
        self.ticket: SloTicket | None = None
        """Its place in the latency gate; None: it has not passed the gate, or need not."""
        self.charge: Charge | None = None
        """What it is charged for; None: it was refused before."""
        self.num_scores = 0
        """Number of prompt log-probabilities for which the request has room."""
        self.waiter = asyncio.current_task()
        """The task that waits until the request runs; None: nothing waits."""
        self.is_cancelled = False
        """Whether the client cancelled it by its id while it waited."""
        self.headers: tuple[tuple[str, str], ...] = ()
        """Headers sent with the beginning of the answer."""
        self.generations: list[Generation] = []
        """One for each prompt; empty: the request was refused, or waits."""
        self.has_begun = False
        """Whether its prompts were given to workers."""
        self.error: WeftError | None = None
        """Why the whole request failed, for the client that reads on."""
        self.outcome = ""
        """ok, or the failure's reason in lower case; empty: it has not ended."""
        self.failure: BaseException | None = None
        """Why it failed, once it has ended."""
        self.ended_at: float | None = None
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent_bytes = 0
        self._dirty: list[SampleOutput] = []
        self._failed: Generation | None = None
        self._deliveries = deliveries
        self._reader: asyncio.Future[None] | None = None
        self._outlet: Outlet | None = None
        """Takes deltas while the answer's task waits; None: the task takes them."""
        self._encode: Callable[[list[Delta]], bytes] = _no_bytes
        self._num_open = 0
        self._waiting: deque[Generation] = deque()
        """Prompts that begin when others have ended."""
        self._release: Callable[[], None] = _nothing

    # -- course ----------------------------------------------------------------------------------

    def complete(self, request: GenerateRequest) -> None:
        self.request, self.targets = request, request.targets

    def begin(self, card: ModelCard, model: str, release: Callable[[], None]) -> None:
        """Notes that the request runs. `card` and `model` are of what serves it. `release` is
        called when no worker computes for the request any more; it may be called again.
        """
        self.card, self.model, self._release = card, model, release
        self.has_begun, self.waiter = True, None

    def submit(self, generations: list[Generation]) -> None:
        """Submits all prompts. Raises PeerUnavailable if there is no owner for one of them."""
        self.generations = generations
        self._num_open = sum(len(generation.samples) for generation in generations)
        self._waiting.extend(generations[MAX_AT_ONCE:])
        for generation in generations[:MAX_AT_ONCE]:
            generation.start()

    def on_sample(self, sample: SampleOutput, num_bytes: int) -> None:
        if not sample.is_dirty:
            sample.is_dirty = True
            self._dirty.append(sample)
            if self._outlet is not None and len(self._dirty) == 1:
                self._deliveries.add(self)
        self._unsent_bytes += num_bytes
        if self._unsent_bytes > self._max_unsent_bytes:
            self.fail(
                SlowClient(
                    f"the client left more than {self._max_unsent_bytes} bytes unread; read the "
                    "stream as it comes",
                    stage="render",
                )
            )
        elif self._outlet is None:
            self._wake()

    def on_failure(self, generation: Generation) -> None:
        self._failed = generation
        self._wake()

    def on_settled(self) -> None:
        if self._waiting and self.error is None:
            try:
                self._waiting.popleft().start()
            except WeftError as error:
                self.fail(error)
        elif self._is_settled:
            self._release()
        self._wake()

    def fail(self, error: WeftError) -> None:
        """Fails the whole request; its resources are free when this returns."""
        if self.error is not None:
            return
        self.close()
        self._release()
        if not self._num_open:
            return  # its answer is complete, and waits for the client
        self.error = error
        self._dirty.clear()
        self._wake()

    def cancel(self) -> None:
        """Ends all samples at the client's request: they finish as cancelled."""
        # Otherwise each that ends would start one of those that wait.
        self._waiting.clear()
        for generation in self.generations:
            for number, sample in enumerate(generation.samples):
                if sample.finish_reason is None:
                    generation.end_sample(number, CANCELLED)
                    self.on_sample(sample, 0)

    def close(self) -> None:
        """Cancels what is left; after this nothing more comes."""
        self._waiting.clear()
        for generation in self.generations:
            generation.close()

    # -- for the dialect -------------------------------------------------------------------------

    async def next_deltas(self) -> list[Delta]:
        """Waits for new deltas: at least one, or the empty list when all samples have ended. Raises
        WeftError if the request failed.
        """
        while True:
            if self.error is not None:
                raise self.error
            if self._dirty:
                return self._take()
            if self._failed is not None and self._failed.error is not None:
                raise self._failed.error
            if not self._num_open:
                return []
            await self._wait()

    async def stream(self, encode: Callable[[list[Delta]], bytes], outlet: Outlet) -> None:
        """Sends what `encode` makes of new deltas until all samples have ended. As long as the
        outlet takes more at once, deltas do not wake this task: they are sent with those of other
        answers, in another context. Raises WeftError if the request failed.
        """
        self._encode = encode
        while True:
            while self._is_going_on:
                self._outlet = outlet
                try:
                    await self._wait()
                finally:
                    self._outlet = None
                await outlet.ready()
            deltas = await self.next_deltas()
            if not deltas:
                return
            if (data := encode(deltas)) and not outlet.send(data):
                await outlet.ready()

    @property
    def _is_going_on(self) -> bool:
        """Whether deltas may still come, and there is nothing else for the answer's task."""
        is_failed = self.error is not None or self._failed is not None
        return bool(self._num_open) and not self._dirty and not is_failed

    def send_deltas(self) -> None:
        """Sends new deltas, unless the answer's task does."""
        outlet = self._outlet
        if outlet is None or not self._dirty:
            return
        try:
            data = self._encode(self._take())
            goes_on = not data or outlet.send(data)
        except Exception as error:
            self._outlet = None
            if self._reader is not None and not self._reader.done():
                self._reader.set_exception(error)
            return
        if not goes_on or not self._num_open:
            self._wake()

    async def _wait(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        self._outlet = None
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _take(self) -> list[Delta]:
        deltas: list[Delta] = []
        dirty, self._dirty = self._dirty, []
        self._unsent_bytes = 0
        for sample in dirty:
            sample.is_dirty = False
            reason = sample.finish_reason
            deltas.append(
                _new_delta(
                    (
                        sample.index,
                        sample.text,
                        sample.ids[sample.num_ids_taken :],
                        sample.logprobs,
                        reason,
                        None if reason is None else sample.renderer.stop_reason,
                    )
                )
            )
            sample.text = ""
            sample.num_ids_taken = len(sample.ids)
            if sample.logprobs:
                sample.logprobs = []
            if reason is not None:
                self._num_open -= 1
        return deltas

    async def settle(self) -> None:
        """Gives the owners a moment, after the last delta, to report usage and timeline."""
        try:
            async with asyncio.timeout(_SETTLE_TIMEOUT_S):
                while not self._is_settled:
                    await self._wait()
        except TimeoutError:
            pass  # the answer is complete; only the owner's report is missing

    @property
    def _is_settled(self) -> bool:
        return all(generation.is_settled for generation in self.generations)

    def usage(self) -> common_pb2.Usage:
        """Tokens so far, over all prompts and samples."""
        return common_pb2.Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached_prompt_tokens=self.num_cached_tokens,
            completion_tokens=self.num_output_tokens,
            audio_prompt_tokens=sum(one.num_audio_tokens for one in self.generations),
        )

    def timelines(self) -> list[common_pb2.Timeline]:
        """One timeline for each prompt, in their order."""
        return [generation.timeline for generation in self.generations]

    # -- for observers ---------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """waiting or running; its outcome once it has ended."""
        return self.outcome or ("running" if self.has_begun else "waiting")

    @property
    def duration_s(self) -> float:
        """Time since its arrival, or until its end."""
        ended_at = self.ended_at
        if ended_at is None:
            ended_at = asyncio.get_running_loop().time()
        return ended_at - self.arrival

    @property
    def worker_id(self) -> str:
        """Id of the owner of its first prompt, or of the last one; empty: none."""
        return self.generations[0].worker_id if self.generations else ""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompts."""
        return sum(one.num_prompt_tokens for one in self.generations)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV the owners had."""
        return sum(one.cached_prompt_tokens for one in self.generations)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(sample.ids) for one in self.generations for sample in one.samples)

    @property
    def num_charged_tokens(self) -> int | None:
        """Tokens that it has used; None: it was refused for lack of room or workers."""
        if not self.has_begun:
            is_refused = isinstance(self.failure, WeftError) and self.failure.retryable
            return None if is_refused else 0
        if not self.num_output_tokens and isinstance(self.failure, (Overloaded, PeerUnavailable)):
            return None
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def first_token_at(self) -> float | None:
        """Time of the first token of any sample; None: there is none."""
        return min(filter(None, map(_first_token_at, self.generations)), default=None)

    @property
    def first_tokens_at(self) -> float | None:
        """Time at which each of its prompts had a token; None: one has none."""
        times = [_first_token_at(one) for one in self.generations]
        return max(times) if times and all(times) else None

    @property
    def target_outcome(self) -> str | None:
        """met, late_first_token, slow_tokens, refused, cancelled or failed; None: the request has
        no target, or could not be served whatever the load.
        """
        if not self.targets:
            return None
        failure = self.failure
        if failure is None:
            first_at = self.first_tokens_at
            first_s = None if first_at is None else first_at - self.arrival
            samples = [sample for one in self.generations for sample in one.samples]
            paces = [pace for sample in samples if (pace := sample.pace_s)]
            return self.targets.outcome(first_s, max(paces, default=None))
        if isinstance(failure, Overloaded):
            return "refused"
        if isinstance(failure, (asyncio.CancelledError, GeneratorExit, Cancelled)):
            return "cancelled"
        is_clients = isinstance(failure, WeftError) and failure.http_status < 500
        return None if is_clients else "failed"


def _first_token_at(generation: Generation) -> float:
    """Time of the first token of any sample; 0: there was none."""
    times = (sample.first_token_time for sample in generation.samples if sample.first_token_time)
    return min(times, default=0.0)


def _no_bytes(deltas: list[Delta]) -> bytes:
    """Nothing is streamed."""
    return b""


def _nothing() -> None:
    """The request holds no place yet."""
