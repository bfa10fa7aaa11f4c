"""The client's view of its request: one sequence of deltas over all prompts and samples."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.contract.errors import SlowClient, WeftError
from weft.gateway.generation.generation import CANCELLED, Generation, Listener
from weft.gateway.generation.sample_output import SampleOutput
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


class TokenStream(Listener):
    """Collects deltas on the event loop and passes them on when the client can take them.

    A slow client gets fewer, larger deltas. One with more than `max_unsent_bytes` waiting fails
    with `SlowClient`. gRPC cannot end a call while one of its messages is unsent, so such a client
    gets the error when it reads again. The request's resources are released at once.
    """

    def __init__(
        self,
        request_id: str,
        card: ModelCard,
        max_unsent_bytes: int,
        on_done: Callable[[], None],
    ) -> None:
        """Creates an empty stream.

        Args:
            request_id: Id of the client's request.
            card: The base model, with the tokenizer and the chat template of its adapter.
            max_unsent_bytes: Text that may wait for the client.
            on_done: Called when no worker computes for the request any more; may be called again.
        """
        self.request_id = request_id
        self.trace_id = ""
        """Trace id, 32 hex digits; empty if nothing is traced."""
        self.card = card
        """The base model, with the tokenizer and the chat template of its adapter."""
        self.model = ""
        """Name of the requested model: the base model's, or that of one of its adapters."""
        self.headers: tuple[tuple[str, str], ...] = ()
        """Headers sent with the beginning of the answer."""
        self._on_done = on_done
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent_bytes = 0
        self._dirty: list[SampleOutput] = []
        self._failed: Generation | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._num_open = 0
        self._waiting: deque[Generation] = deque()
        """Prompts that begin when others have ended."""
        self.generations: list[Generation] = []
        self.error: WeftError | None = None
        """Why the whole request failed."""

    def start(self, generations: list[Generation]) -> None:
        """Submits all prompts.

        Raises:
            PeerUnavailable: There is no owner for one of them.
        """
        self.generations = generations
        self._num_open = sum(len(generation.samples) for generation in generations)
        self._waiting.extend(generations[MAX_AT_ONCE:])
        for generation in generations[:MAX_AT_ONCE]:
            generation.start()

    async def next_deltas(self) -> list[Delta]:
        """Waits for new deltas.

        Returns:
            At least one delta; the empty list when all samples have ended.

        Raises:
            WeftError: The request failed.
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

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> list[Delta]:
        deltas: list[Delta] = []
        dirty, self._dirty = self._dirty, []
        self._unsent_bytes = 0
        for sample in dirty:
            sample.is_dirty = False
            deltas.append(
                Delta(
                    sample.index,
                    sample.text,
                    sample.ids[sample.num_ids_taken :],
                    sample.logprobs,
                    sample.finish_reason,
                    None if sample.finish_reason is None else sample.renderer.stop_reason,
                )
            )
            sample.text = ""
            sample.num_ids_taken = len(sample.ids)
            if sample.logprobs:
                sample.logprobs = []
            if sample.finish_reason is not None:
                self._num_open -= 1
        return deltas

    def on_sample(self, sample: SampleOutput, num_bytes: int) -> None:
        """See `Listener`."""
        if not sample.is_dirty:
            sample.is_dirty = True
            self._dirty.append(sample)
        self._unsent_bytes += num_bytes
        if self._unsent_bytes > self._max_unsent_bytes:
            self.fail(
                SlowClient(
                    f"the client left more than {self._max_unsent_bytes} bytes unread; read the "
                    "stream as it comes",
                    stage="render",
                )
            )
        else:
            self._wake()

    def on_failure(self, generation: Generation) -> None:
        """See `Listener`."""
        self._failed = generation
        self._wake()

    def on_settled(self) -> None:
        """See `Listener`."""
        if self._waiting and self.error is None:
            try:
                self._waiting.popleft().start()
            except WeftError as error:
                self.fail(error)
        elif all(generation.is_settled for generation in self.generations):
            self._on_done()
        self._wake()

    def fail(self, error: WeftError) -> None:
        """Fails the whole request; its resources are free when this returns."""
        if self.error is not None:
            return
        self._waiting.clear()
        for generation in self.generations:
            generation.close()
        self._on_done()
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

    async def settle(self) -> None:
        """Gives the owners a moment, after the last delta, to report usage and timeline."""
        try:
            async with asyncio.timeout(_SETTLE_TIMEOUT_S):
                while not all(generation.is_settled for generation in self.generations):
                    await self._wait()
        except TimeoutError:
            pass  # the answer is complete; only the owner's report is missing

    def usage(self) -> common_pb2.Usage:
        """Tokens so far, over all prompts and samples."""
        return common_pb2.Usage(
            prompt_tokens=sum(g.num_prompt_tokens for g in self.generations),
            cached_prompt_tokens=sum(g.cached_prompt_tokens for g in self.generations),
            completion_tokens=sum(len(s.ids) for g in self.generations for s in g.samples),
        )

    def timelines(self) -> list[common_pb2.Timeline]:
        """One timeline for each prompt, in their order."""
        return [g.timeline for g in self.generations]

    def close(self) -> None:
        """Cancels what is left; after this nothing more comes."""
        self._waiting.clear()
        for generation in self.generations:
            generation.close()
