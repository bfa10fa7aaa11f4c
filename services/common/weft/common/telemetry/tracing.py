"""A service's tracer by its settings, and TraceService over the spans that it keeps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from opentelemetry.sdk.trace import ReadableSpan
from weft.common.rpc.errors import Context
from weft.common.settings import ServiceSettings
from weft.common.telemetry.spans import REQUEST_ID, Tracer
from weft.contract.errors import InvalidRequest
from weft.v1 import profile_pb2, trace_pb2, trace_pb2_grpc

SERVICE_NAME = "weft.v1.TraceService"
DEFAULT_SPANS, MAX_SPANS = 1000, 10_000
MAX_ID_BYTES = 128

FanOut = Callable[[trace_pb2.ListSpansRequest], Awaitable[trace_pb2.ListSpansResponse]]
"""Collects spans from the services that this one calls."""
FindProfiles = Callable[[int, int], Iterable[profile_pb2.ProfileSummary]]


def make_tracer(settings: ServiceSettings, instance: str) -> Tracer:
    """Creates the tracer that a service's settings ask for; it exports nothing yet."""
    return Tracer(
        settings.program,
        instance,
        is_on=settings.tracing,
        sample_ratio=settings.trace_sample_ratio,
        max_spans=settings.trace_buffer_spans,
    )


class TraceServicer(trace_pb2_grpc.TraceServiceServicer):
    """Implements weft.v1.TraceService over a tracer. `fan_out` asks the services that this one
    calls, if there are any; `profiles` finds this service's profiles that overlap a time in Unix
    nanoseconds.
    """

    def __init__(
        self, tracer: Tracer, fan_out: FanOut | None = None, profiles: FindProfiles | None = None
    ) -> None:
        self._tracer = tracer
        self._fan_out = fan_out
        self._profiles = profiles

    async def ListSpans(
        self, request: trace_pb2.ListSpansRequest, context: Context
    ) -> trace_pb2.ListSpansResponse:
        return await self.find(request)

    async def find(self, request: trace_pb2.ListSpansRequest) -> trace_pb2.ListSpansResponse:
        limit = request.max_spans if request.HasField("max_spans") else DEFAULT_SPANS
        if not 1 <= limit <= MAX_SPANS:
            message = f"max_spans is {limit}; give 1 to {MAX_SPANS:,}"
            raise InvalidRequest(message, stage="validate", param="max_spans")
        is_of_time = request.HasField("start_time") and request.HasField("end_time")
        if not (is_of_time and not request.id) and not (
            0 < len(request.id.encode()) <= MAX_ID_BYTES
        ):
            message = f"give the id of a request or a trace, at most {MAX_ID_BYTES} bytes"
            raise InvalidRequest(message, stage="validate", param="id")
        times = 0, 0
        if not request.id:
            times = _nanoseconds(request, "start_time"), _nanoseconds(request, "end_time")
        response = trace_pb2.ListSpansResponse()
        if request.fan_out and self._fan_out is not None:
            behind = trace_pb2.ListSpansRequest()
            behind.CopyFrom(request)
            behind.fan_out, behind.max_spans = False, limit
            response = await self._fan_out(behind)
        if request.id:
            own = self._tracer.recent.find(request.id, limit)
        else:
            own = self._tracer.within(*times, limit)
        response.spans.extend(span_to_proto(span, self._tracer) for span in own)
        if request.id and self._profiles is not None and response.spans:
            starts = [span.start_time.ToNanoseconds() for span in response.spans]
            ends = [
                start + span.duration.ToNanoseconds()
                for start, span in zip(starts, response.spans, strict=True)
            ]
            response.profiles.extend(self._profiles(min(starts), max(ends)))
        return response


def _nanoseconds(request: trace_pb2.ListSpansRequest, param: str) -> int:
    try:
        moment: int = getattr(request, param).ToNanoseconds()
    except ValueError as error:
        message = f"{param} is no moment: {error}"
        raise InvalidRequest(message, stage="validate", param=param) from None
    return moment


def span_to_proto(span: ReadableSpan, tracer: Tracer) -> trace_pb2.Span:
    """Converts a span for the wire."""
    attributes = dict(span.attributes or {})
    message = trace_pb2.Span(
        trace_id=span.context.trace_id.to_bytes(16, "big"),
        span_id=span.context.span_id.to_bytes(8, "big"),
        parent_span_id=span.parent.span_id.to_bytes(8, "big") if span.parent else b"",
        name=span.name,
        service=tracer.service,
        instance=tracer.instance,
        request_id=str(attributes.pop(REQUEST_ID, "")),
        error=span.status.description or "",
        sampled=span.context.trace_flags.sampled,
    )
    start_ns, end_ns = span.start_time or 0, span.end_time or 0
    message.start_time.FromNanoseconds(start_ns)
    message.duration.FromNanoseconds(max(0, end_ns - start_ns))
    message.attributes.update(attributes)
    return message
