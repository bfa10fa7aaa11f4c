"""Tracing of one service: its tracer, the export of its spans, and TraceService over them."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from weft.common.settings import ServiceSettings
from weft.common.telemetry.otlp import OtlpExport, wanted_endpoint
from weft.common.telemetry.spans import Span, Tracer, wall_offset_s
from weft.contract.errors import ConfigError, InvalidRequest
from weft.v1 import trace_pb2, trace_pb2_grpc

_log = logging.getLogger(__name__)

SERVICE_NAME = "weft.v1.TraceService"
DEFAULT_SPANS, MAX_SPANS = 1000, 10_000
MAX_ID_BYTES = 128

FanOut = Callable[[trace_pb2.ListSpansRequest], Awaitable[trace_pb2.ListSpansResponse]]
"""Collects spans from the services behind this one."""


def make_tracer(settings: ServiceSettings, instance: str) -> Tracer:
    """Creates the tracer that a service's settings ask for; it exports nothing yet.

    Args:
        settings: Settings of the service.
        instance: Stable id of the service.
    """
    return Tracer(
        settings.program,
        instance,
        is_on=settings.tracing,
        sample_ratio=settings.trace_sample_ratio,
        max_spans=settings.trace_buffer_spans,
    )


def start_export(tracer: Tracer, settings: ServiceSettings) -> OtlpExport | None:
    """Starts exporting spans if an endpoint is set; logs this, or what is missing for it.

    Raises:
        ConfigError: A flag asks for an export that is not possible. If only the environment asks
            for it, the service starts without export.
    """
    endpoint = wanted_endpoint(settings.otlp_endpoint)
    if not endpoint or not tracer.is_on:
        return None
    try:
        export = OtlpExport(tracer, settings.otlp_endpoint, importlib.metadata.version("weft"))
    except ConfigError as error:
        if settings.otlp_endpoint:
            raise ConfigError(f"--otlp-endpoint {endpoint}: {error.message}") from error
        _log.warning("spans are not exported to %s: %s", endpoint, error.message)
        return None
    _log.info("spans are exported", extra={"endpoint": endpoint})
    return export


class TraceServicer(trace_pb2_grpc.TraceServiceServicer):
    """Implements weft.v1.TraceService over a tracer.

    Args:
        tracer: Tracer of this service.
        fan_out: Asks the services behind this one, if there are any.
    """

    def __init__(self, tracer: Tracer, fan_out: FanOut | None = None) -> None:
        self._tracer = tracer
        self._fan_out = fan_out

    async def ListSpans(
        self,
        request: trace_pb2.ListSpansRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> trace_pb2.ListSpansResponse:
        """See trace.proto."""
        limit = request.max_spans if request.HasField("max_spans") else DEFAULT_SPANS
        if not 1 <= limit <= MAX_SPANS:
            message = f"max_spans is {limit}; give 1 to {MAX_SPANS:,}"
            raise InvalidRequest(message, stage="validate", param="max_spans")
        if not 0 < len(request.id.encode()) <= MAX_ID_BYTES:
            message = f"give the id of a request or a trace, at most {MAX_ID_BYTES} bytes"
            raise InvalidRequest(message, stage="validate", param="id")
        response = trace_pb2.ListSpansResponse()
        if request.fan_out and self._fan_out is not None:
            behind = trace_pb2.ListSpansRequest(id=request.id, max_spans=limit)
            response = await self._fan_out(behind)
        own = self._tracer.find(request.id, limit)
        response.spans.extend(span_to_proto(span, self._tracer) for span in own)
        return response


def span_to_proto(span: Span, tracer: Tracer) -> trace_pb2.Span:
    """Converts a span for the wire."""
    message = trace_pb2.Span(
        trace_id=span.context.trace_id.to_bytes(16, "big"),
        span_id=span.context.span_id.to_bytes(8, "big"),
        parent_span_id=span.parent_id.to_bytes(8, "big") if span.parent_id else b"",
        name=span.name,
        service=tracer.service,
        instance=tracer.instance,
        request_id=span.request_id,
        error=span.error,
        sampled=span.context.is_sampled,
    )
    message.start_time.FromNanoseconds(int((span.start_s + wall_offset_s()) * 1e9))
    message.duration.FromNanoseconds(max(0, int((span.end_s - span.start_s) * 1e9)))
    message.attributes.update(span.attributes)
    return message
