"""The last requests of this gateway."""

from __future__ import annotations

import hashlib
import secrets
from collections import deque

from weft.common.telemetry.spans import wall_offset_s
from weft.contract.codec.walk import duration
from weft.gateway.generation.answer import Answer
from weft.v1 import mesh_pb2

MAX_REQUESTS = 200
"""Ended requests that are kept, and running ones that are shown."""
_MAX_MODEL_CHARS = 128
"""A client may name anything as its model."""


class RequestHandles:
    """Names requests to those who may watch but not have their ids, since an id opens what a
    request has stored, and cancels it.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)

    def handle(self, request_id: str) -> str:
        """A request's handle, 16 hex digits."""
        return hashlib.blake2b(request_id.encode(), digest_size=8, key=self._key).hexdigest()

    def hide(self, request: mesh_pb2.MeshRequest) -> None:
        """Puts the handle in place of the ids."""
        request.request_id = self.handle(request.request_id)
        request.ClearField("trace_id")


class RecentRequests:
    """Keeps the last requests that ended, numbered in the order of their ends."""

    def __init__(self) -> None:
        self._ended: deque[mesh_pb2.MeshRequest] = deque(maxlen=MAX_REQUESTS)
        self.num_ended = 0
        """Requests that have ended since the start."""

    def ended(self, answer: Answer) -> None:
        """Takes a request that has just ended."""
        self._ended.append(describe(answer))
        self.num_ended += 1

    def since(self, number: int) -> list[mesh_pb2.MeshRequest]:
        """The kept requests, oldest first, without the first `number` of all that have ended."""
        wanted = min(self.num_ended - number, len(self._ended))
        return [self._ended[at] for at in range(len(self._ended) - wanted, len(self._ended))]


def describe(answer: Answer) -> mesh_pb2.MeshRequest:
    """What operators may know of a request: ids, times and sizes."""
    message = mesh_pb2.MeshRequest(
        request_id=answer.raw.request_id,
        trace_id=answer.trace.trace_id,
        model=answer.model[:_MAX_MODEL_CHARS],
        worker_id=answer.worker_id,
        duration=duration(answer.duration_s),
        prompt_tokens=answer.num_prompt_tokens,
        cached_tokens=answer.num_cached_tokens,
        output_tokens=answer.num_output_tokens,
        outcome=answer.state,
        lost_attempts=sum(max(0, one.attempt - 1) for one in answer.generations),
    )
    # Event loop time is the monotonic clock.
    message.arrival_time.FromNanoseconds(int((answer.arrival + wall_offset_s()) * 1e9))
    if (first_at := answer.first_token_at) is not None:
        message.first_token.CopyFrom(duration(first_at - answer.arrival))
    return message
