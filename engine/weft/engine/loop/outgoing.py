"""Collects the messages that a turn produces, by gateway."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from weft.contract.adapters import AdapterReply
from weft.contract.arrays import Float32Array
from weft.contract.errors import WeftError
from weft.contract.fills import FillCommand, FillReply
from weft.contract.messages import Outbox
from weft.contract.request import PromptLogprobs, TokenLogprob
from weft.contract.store import StoreHold, StoreLookup, StorePut
from weft.contract.submits import (
    Accepted,
    Failed,
    Failure,
    Finished,
    GatewayBatch,
    Preempted,
    Routes,
    TokenColumns,
    Tokens,
    VersionSpan,
)
from weft.contract.tasks import PooledVectors
from weft.contract.timeline import Timeline
from weft.engine.requests.request import Request, RequestKey


def failure_of(error: WeftError) -> Failure:
    return Failure(
        reason=error.reason,
        message=error.message,
        stage=error.stage,
        param=error.param,
        retry_after_s=error.retry_after_s,
    )


class Outgoing:
    def __init__(self) -> None:
        self._outbox = Outbox()
        self._gateways: dict[int, GatewayBatch] = {}
        self.weight_version = ""
        """Name of the weights that draw; empty: those of the start."""
        self._gathered: list[GatewayBatch] = []
        """Batches of earlier turns, oldest first."""

    @property
    def outbox(self) -> Outbox:
        return self._outbox

    def gather(self) -> list[GatewayBatch]:
        """Ends the batches of a turn. Returns them after those of earlier turns that
        `take` left.
        """
        self._gathered += self._gateways.values()
        self._gateways = {}
        return self._gathered

    def take(self, *, with_batches: bool) -> Outbox:
        """Returns the collected messages and starts a new collection. Without `with_batches`, the
        gathered batches stay.
        """
        taken, self._outbox = self._outbox, Outbox()
        if with_batches:
            taken.gateways, self._gathered = self._gathered, []
        return taken

    def gateway(self, gateway: int) -> GatewayBatch:
        """Created on first use."""
        batch = self._gateways.get(gateway)
        if batch is None:
            batch = self._gateways[gateway] = GatewayBatch(gateway=gateway)
        return batch

    def accepted(self, key: RequestKey) -> None:
        event = Accepted(request_id=key.request_id, attempt=key.attempt)
        self.gateway(key.gateway).accepted.append(event)

    def computed_here(self, request: Request) -> None:
        """Tells the gateway that this engine computes a prompt itself, although prefill workers
        were named for it. The gateway then no longer counts the prompt in the queue of one of them.
        After a fill that succeeded nothing is sent, since only a few tokens are left to compute.
        """
        key, fills = request.key, request.timeline.fills
        if not request.awaits_first_token or not (request.sources.candidates or fills):
            return
        if not fills or fills[-1].failure or fills[-1].source != "prefill":
            self.gateway(key.gateway).computed_here.append((key.request_id, key.attempt))

    def columns(self, gateway: int, columns: TokenColumns) -> None:
        """Reports one new token for each of many samples of a gateway."""
        self.gateway(gateway).columns.append(columns)

    def prompt_logprobs(
        self, key: RequestKey, first_position: int, logprobs: list[TokenLogprob]
    ) -> None:
        event = PromptLogprobs(key.request_id, key.attempt, first_position, logprobs)
        self.gateway(key.gateway).prompt_logprobs.append(event)

    def vectors(self, key: RequestKey, first_row: int, vectors: Float32Array) -> None:
        """Reports vectors of a prompt, [n, width], from `first_row` on."""
        values = vectors.astype("<f4", copy=False).tobytes()
        event = PooledVectors(key.request_id, key.attempt, first_row, vectors.shape[1], values)
        self.gateway(key.gateway).vectors.append(event)

    def routes(self, request: Request, first_position: int, found: NDArray[np.generic]) -> None:
        """Reports the experts of a sample's positions, [positions, layers, k], from
        `first_position` on.
        """
        key, (_, layers, top_k) = request.key, found.shape
        names = key.request_id, key.attempt, request.sample
        sizes = layers, top_k, found.itemsize
        event = Routes(*names, first_position, *sizes, found.tobytes())
        self.gateway(key.gateway).routes.append(event)

    def all_tokens(self, request: Request) -> None:
        """Reports all tokens that a sample has generated. Their log-probabilities are not kept."""
        if request.num_generated == 0:
            return
        key = request.key
        ids = request.tokens[request.num_prompt_tokens :]
        event = Tokens(key.request_id, key.attempt, request.sample, 0, ids, [])
        self.gateway(key.gateway).tokens.append(event)

    def preempted(self, request: Request) -> None:
        key = request.key
        event = Preempted(request_id=key.request_id, attempt=key.attempt, sample=request.sample)
        self.gateway(key.gateway).preempted.append(event)

    def finished(self, request: Request, reason: str, stop_token_id: int | None) -> None:
        key = request.key
        event = Finished(
            request_id=key.request_id,
            attempt=key.attempt,
            sample=request.sample,
            reason=reason,
            stop_token_id=stop_token_id,
            completion_tokens=request.num_generated,
            cached_prompt_tokens=min(request.num_cached_tokens, request.num_prompt_tokens),
            timeline=request.timeline,
            weight_versions=self._versions(request) if self.weight_version else [],
        )
        self.gateway(key.gateway).finished.append(event)

    def _versions(self, request: Request) -> list[VersionSpan]:
        found, start = list[VersionSpan](), 0
        for version, end in (*request.old_versions, (self.weight_version, request.num_generated)):
            if end > start:
                found.append(VersionSpan(version=version, start=start, end=end))
                start = end
        return found

    def failed(self, key: RequestKey, error: WeftError, timeline: Timeline | None = None) -> None:
        """Reports that a whole request was refused or failed; `timeline` shows how far it came."""
        event = Failed(
            request_id=key.request_id,
            attempt=key.attempt,
            failure=failure_of(error),
            timeline=timeline,
        )
        self.gateway(key.gateway).failed.append(event)

    def adapter_reply(self, query: int, error: WeftError | None) -> None:
        """Answers an order about an adapter; without `error` it succeeded."""
        failure = None if error is None else failure_of(error)
        reply = AdapterReply(query=query, failure=failure)
        self._outbox.adapter_replies.append(reply)

    def fill_command(self, command: FillCommand) -> None:
        self._outbox.fill_commands.append(command)

    def store(self, message: StoreLookup | StorePut | StoreHold) -> None:
        if isinstance(message, StoreLookup):
            self._outbox.store_lookups.append(message)
        elif isinstance(message, StoreHold):
            self._outbox.store_holds.append(message)
        else:
            self._outbox.store_puts.append(message)

    def release_hold(self, number: int) -> None:
        """Lets pages go that a KV store holds by the StoreHold of that number."""
        self._outbox.store_releases.append(number)

    def fill_reply(self, reply: FillReply) -> None:
        self._outbox.fill_replies.append(reply)
