"""The spans of one service in OpenTelemetry's form, and the newest of them for `weft trace`.

Most spans are made when they have ended, from times that the engine measured. Times are seconds on
this host's monotonic clock until they become a span's.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping
from weakref import WeakSet

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from weft.contract.errors import InvalidRequest
from weft.contract.version import version

REQUEST_ID_KEY = "x-weft-request-id"
"""Metadata key of the request id in calls between services, next to `traceparent`."""
REQUEST_ID = "weft.request_id"
"""Attribute of a span with its request's id."""

Attribute = str | bool | int | float

_CLOCK_STEP_S = 1e-3
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_PROPAGATOR = TraceContextTextMapPropagator()
_UNSET = Status()


def remote_parent(traceparent: str) -> Span:
    """The caller's span that a W3C header names; one with an invalid context if it names none."""
    return get_current_span(_PROPAGATOR.extract({"traceparent": traceparent}, Context()))


def traceparent_of(span: Span) -> str:
    """The W3C header of calls that a span makes; empty without a trace."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def trace_id_of(span: Span) -> str:
    """32 hex digits; empty without a trace."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def lease_traceparent(traceparent: str, lease_id: bytes) -> str:
    """The header that names the span of a fill, in the trace of another header."""
    caller = remote_parent(traceparent).get_span_context()
    fill = SpanContext(
        caller.trace_id, lease_span_id(lease_id), is_remote=True, trace_flags=caller.trace_flags
    )
    return traceparent_of(NonRecordingSpan(fill))


def lease_span_id(lease_id: bytes) -> int:
    """Span id of a fill: the first half of its lease id.

    Owner and filler both derive it, without exchanging span ids.
    """
    return int.from_bytes(lease_id[:8], "big") or 1


def described_error(reason: str, message: str, param: str | None) -> str:
    """Describes a failure for spans. Of an invalid request it omits the message, which may quote
    the client's content.
    """
    if reason == InvalidRequest.reason:
        return f"{reason}: {param}" if param else reason
    return f"{reason}: {message}"


class RecentSpans:
    """The spans of a service that ended last."""

    def __init__(self, max_spans: int) -> None:
        self._spans: deque[ReadableSpan] = deque(maxlen=max_spans)

    def add(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def find(self, wanted: str, limit: int) -> list[ReadableSpan]:
        """The newest spans of a request or trace, oldest first. `wanted` is a request id, which
        finds the spans of each of its prompts, or a trace id of 32 hex digits.
        """
        if _TRACE_ID.fullmatch(wanted):
            trace_id = int(wanted, 16)
            found = [span for span in self._spans if span.context.trace_id == trace_id]
        else:
            part = re.compile(re.escape(wanted) + r"(-\d+)?")
            found = [
                span
                for span in self._spans
                if part.fullmatch(str((span.attributes or {}).get(REQUEST_ID, "")))
            ]
        return found[-limit:]

    def within(self, start_ns: int, end_ns: int, limit: int) -> list[ReadableSpan]:
        """The newest spans that overlap a time, in Unix nanoseconds, oldest first."""
        found = [
            span
            for span in self._spans
            if (span.end_time or 0) >= start_ns and (span.start_time or 0) <= end_ns
        ]
        return found[-limit:]


class _OpenSpan(NonRecordingSpan):
    """A span that a `Tracer` has begun. The SDK's own takes five times as long to make, which a
    burst of requests waits for.
    """

    __slots__ = ("attributes", "has_ended", "kind", "name", "parent", "start_ns")

    def __init__(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: dict[str, AttributeValue],
        start_ns: int,
    ) -> None:
        super().__init__(context)
        self.name, self.parent, self.kind = name, parent, kind
        self.attributes, self.start_ns = attributes, start_ns
        self.has_ended = False

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        self.attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        self.attributes.update(attributes)


class Tracer:
    """Makes the spans of one service and keeps the newest. It belongs to one thread.

    Args:
        service: Name of the service: gateway, decode, prefill or kvstore.
        instance: Stable id of this service.
        is_on: Whether spans are recorded; if not, a caller's trace passes through unchanged.
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
        self.recent = RecentSpans(max_spans)
        self.processors: list[SpanProcessor] = []
        """They get each span that has ended; those that export skip what is not sampled."""
        self.is_on = is_on
        self._ids = RandomIdGenerator()
        self._of_new_traces = TraceIdRatioBased(sample_ratio)
        self._offset_s = wall_offset_s()
        self._open = WeakSet[_OpenSpan]()
        """Spans of `start`; those that have ended leave with their last user."""
        self._resource = _resource(service, instance)
        self._scope = InstrumentationScope("weft", version())

    def start(
        self,
        name: str,
        parent: Span,
        request_id: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        start_s: float | None = None,
        attributes: Mapping[str, Attribute] | None = None,
        span_id: int = 0,
    ) -> Span:
        """Begins a span, now or at `start_s`, with a random id or `span_id`. A parent without a
        valid context makes it the first span of a new trace.
        """
        begun = self._begin(name, parent, request_id, kind, start_s, attributes, span_id)
        if isinstance(begun, _OpenSpan):
            self._open.add(begun)
        return begun

    def _begin(
        self,
        name: str,
        parent: Span,
        request_id: str,
        kind: SpanKind,
        start_s: float | None,
        attributes: Mapping[str, Attribute] | None,
        span_id: int,
    ) -> Span:
        caller = parent.get_span_context()
        if not self.is_on:
            return NonRecordingSpan(caller)
        if caller.is_valid:
            trace_id, flags = caller.trace_id, TraceFlags(caller.trace_flags & TraceFlags.SAMPLED)
        else:
            trace_id = self._ids.generate_trace_id()
            decision = self._of_new_traces.should_sample(None, trace_id, name).decision
            is_exported = decision is Decision.RECORD_AND_SAMPLE
            flags = TraceFlags(TraceFlags.SAMPLED if is_exported else 0)
        span_id = span_id or self._ids.generate_span_id()
        return _OpenSpan(
            name,
            SpanContext(trace_id, span_id, False, flags, caller.trace_state),
            caller if caller.is_valid else None,
            kind,
            {REQUEST_ID: request_id, **(attributes or {})},
            self._wall_ns(start_s),
        )

    def end(self, span: Span, error: str = "", end_s: float | None = None) -> None:
        """Ends a span, now or at `end_s`; `error` says why its work failed."""
        if not isinstance(span, _OpenSpan):
            return
        span.has_ended = True
        status = Status(StatusCode.ERROR, error) if error else _UNSET
        ended = self._ended(span, status, self._wall_ns(end_s))
        self.recent.add(ended)
        for processor in self.processors:
            processor.on_end(ended)

    def within(self, start_ns: int, end_ns: int, limit: int) -> list[ReadableSpan]:
        """The newest spans that overlap a time, in Unix nanoseconds, oldest first. Those that have
        not ended are among them, up to now, with the attribute `weft.is_open`.
        """
        now_ns = self._wall_ns(None)
        begun = [
            self._ended(span, _UNSET, max(now_ns, span.start_ns), {"weft.is_open": True})
            for span in self._open
            if not span.has_ended and span.start_ns <= end_ns and now_ns >= start_ns
        ]
        return [*self.recent.within(start_ns, end_ns, limit), *begun][-limit:]

    def _ended(
        self,
        span: _OpenSpan,
        status: Status,
        end_ns: int,
        more: Mapping[str, AttributeValue] | None = None,
    ) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=span.get_span_context(),
            parent=span.parent,
            resource=self._resource,
            attributes={**span.attributes, **more} if more else span.attributes,
            kind=span.kind,
            status=status,
            start_time=span.start_ns,
            end_time=end_ns,
            instrumentation_scope=self._scope,
        )

    def record(
        self,
        name: str,
        parent: Span,
        request_id: str,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Attribute] | None = None,
        *,
        error: str = "",
        span_id: int = 0,
    ) -> Span:
        """Makes a span of work that has ended."""
        kind = SpanKind.INTERNAL
        span = self._begin(name, parent, request_id, kind, start_s, attributes, span_id)
        self.end(span, error, end_s)
        return span

    def _wall_ns(self, monotonic_s: float | None) -> int:
        """A moment as Unix time, nanoseconds; None: now. The offset between the two clocks is
        corrected only when it is wrong by more than a millisecond, so that spans of one process
        keep their order.
        """
        before_s, wall_s, now_s = time.monotonic(), time.time(), time.monotonic()
        is_exact = now_s - before_s < _CLOCK_STEP_S / 10
        if is_exact and abs(wall_s - now_s - self._offset_s) > _CLOCK_STEP_S:
            self._offset_s = wall_s - now_s
        moment_s = now_s if monotonic_s is None else monotonic_s
        return int((moment_s + self._offset_s) * 1e9)


def _resource(service: str, instance: str) -> Resource:
    weft = {
        "service.namespace": "weft",
        "service.name": service,
        "service.instance.id": instance,
        "service.version": version(),
    }
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence over our attributes.
    return Resource.create().merge(Resource(weft)).merge(OTELResourceDetector().detect())


def wall_offset_s() -> float:
    """Current offset from the monotonic clock to Unix time, seconds."""
    return time.time() - time.monotonic()
