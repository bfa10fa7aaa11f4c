"""Spans as plain values: a service's work for a request, with its duration.

A span is recorded once it has ended, from times that were taken anyway. Ids and `traceparent`
follow W3C Trace Context, so that any collector can join the spans.
"""

from __future__ import annotations

import random
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from weft.contract.errors import InvalidRequest

REQUEST_ID_KEY = "x-weft-request-id"
"""Metadata key of the request id in calls between services, beside `traceparent`."""

SpanKind = Literal["internal", "server", "client"]
Attribute = str | bool | int | float

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_new_bits = random.SystemRandom().getrandbits
_ids = random.Random(_new_bits(256))


class SpanContext(NamedTuple):
    """The part of a span that its children need, on this machine or another."""

    trace_id: int
    """Trace id, 128 bits, not 0."""
    span_id: int
    """Span id, 64 bits, not 0."""
    is_sampled: bool
    """Whether the span is exported, if spans are exported at all."""

    @property
    def traceparent(self) -> str:
        """The W3C header of calls that this span makes."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"

    def child(self, span_id: int | None = None) -> SpanContext:
        """The context of a new span in the same trace."""
        return SpanContext(self.trace_id, span_id or new_span_id(), self.is_sampled)


def described_error(reason: str, message: str, param: str | None) -> str:
    """Describes a failure for spans. Of an invalid request it omits the message, which may quote
    the client's content.
    """
    if reason == InvalidRequest.reason:
        return f"{reason}: {param}" if param else reason
    return f"{reason}: {message}"


def new_span_id() -> int:
    """Generates 64 random bits that are not all 0."""
    return _ids.getrandbits(64) or 1


def new_trace(is_sampled: bool) -> SpanContext:
    """Creates the context of a root span."""
    return SpanContext(_ids.getrandbits(128) or 1, new_span_id(), is_sampled)


def parse_traceparent(text: str) -> SpanContext | None:
    """Parses a W3C traceparent; None if absent or invalid."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    context = SpanContext(int(trace, 16), int(span, 16), bool(int(flags, 16) & 1))
    if version == "ff" or (version == "00" and more) or not context.trace_id or not context.span_id:
        return None
    return context


def lease_span_id(lease_id: bytes) -> int:
    """Span id of a fill: the first half of its lease id.

    Owner and filler both derive it, without exchanging span ids.
    """
    return int.from_bytes(lease_id[:8], "big") or 1


@dataclass(slots=True)
class Span:
    """A finished operation. Times are seconds on this host's monotonic clock."""

    name: str
    context: SpanContext
    parent_id: int
    """Span id of the parent; 0: none."""
    start_s: float
    end_s: float
    request_id: str = ""
    kind: SpanKind = "internal"
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str = ""
    """Why the operation failed; empty if it succeeded."""


class Tracer:
    """Keeps the recent spans of one service, and passes sampled ones on.

    It belongs to one thread. Recording a span costs about a microsecond.

    Args:
        service: Name of the service: gateway, decode, prefill or kvstore.
        instance: Stable id of this service.
        is_on: Whether spans are recorded; if not, every call returns at once.
        sample_ratio: Share of new traces that are exported, 0..1; a trace that a caller has begun
            is exported if the caller says so.
        max_spans: Number of spans that are kept; the oldest are dropped first.
    """

    def __init__(
        self,
        service: str,
        instance: str = "",
        *,
        is_on: bool = True,
        sample_ratio: float = 1.0,
        max_spans: int = 10_000,
    ) -> None:
        self.service = service
        self.instance = instance
        self.is_on = is_on
        self.export: Callable[[Span], None] | None = None
        """Receives every sampled span; must not block."""
        self._sample_ratio = sample_ratio
        self._spans: deque[Span] = deque(maxlen=max_spans)

    def begin(self, traceparent: str) -> tuple[SpanContext, int]:
        """Creates the context of a span that serves a call.

        Args:
            traceparent: The caller's header, valid or not.

        Returns:
            The context, and the id of its parent; 0 if the context begins a trace.
        """
        caller = parse_traceparent(traceparent)
        if caller is None:
            return new_trace(_ids.random() < self._sample_ratio), 0
        return caller.child(), caller.span_id

    def record(self, span: Span) -> None:
        """Records a span that has ended."""
        if not self.is_on:
            return
        self._spans.append(span)
        if span.context.is_sampled and self.export is not None:
            self.export(span)

    def find(self, wanted: str, limit: int) -> list[Span]:
        """The newest spans of a request or trace, oldest first.

        Args:
            wanted: A request id, with the spans of each of its prompts, or 32 hex digits of a
                trace id.
            limit: Most spans returned.
        """
        if _TRACE_ID.fullmatch(wanted):
            trace_id = int(wanted, 16)
            found = [span for span in self._spans if span.context.trace_id == trace_id]
        else:
            part = re.compile(re.escape(wanted) + r"(-\d+)?")
            found = [span for span in self._spans if part.fullmatch(span.request_id)]
        return found[-limit:]


def wall_offset_s() -> float:
    """Current offset from the monotonic clock to Unix time, seconds."""
    return time.time() - time.monotonic()
