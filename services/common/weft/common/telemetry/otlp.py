"""Export of spans over OTLP, by the OpenTelemetry SDK where that is installed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from weft.common.telemetry.spans import Span, Tracer, wall_offset_s
from weft.contract.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

_log = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
INSTALL = "pip install 'weft[otlp]'"
CLOSE_TIMEOUT_S = 2.0
"""Seconds allowed for exporting at the end; the rest is lost."""
_REPEAT_LOG_S = 60.0


class OtlpExport:
    """Sends a tracer's sampled spans to a collector, in batches, by a thread of its own.

    The queue is bounded (`OTEL_BSP_MAX_QUEUE_SIZE`); when it is full the oldest spans are lost.
    Nothing ever waits for the collector.

    Args:
        tracer: The tracer whose spans are exported.
        endpoint: Endpoint of the collector; empty: from the standard environment variables.
        version: Version of this program.

    Raises:
        ConfigError: The exporter's package is missing, or the endpoint cannot be used.
    """

    def __init__(self, tracer: Tracer, endpoint: str, version: str) -> None:
        try:
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise _missing("opentelemetry-sdk") from error
        logging.getLogger("opentelemetry").addFilter(_RareRepeats())
        self._processor = BatchSpanProcessor(_exporter(endpoint))
        self._convert = _converter(tracer, version)
        self._tracer = tracer
        tracer.export = self._on_span

    def _on_span(self, span: Span) -> None:
        self._processor.on_end(self._convert(span))

    def close(self) -> None:
        """Sends the remaining spans; blocks for at most `CLOSE_TIMEOUT_S`."""
        self._tracer.export = None
        # The processor's own shutdown waits up to 30 s for a collector that does not answer.
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def wanted_endpoint(setting: str, environ: Mapping[str, str] | None = None) -> str:
    """Endpoint to which spans are exported; empty: none."""
    variables = os.environ if environ is None else environ
    return setting or next(
        (variables[name] for name in ENDPOINT_VARIABLES if variables.get(name)), ""
    )


def _exporter(endpoint: str) -> SpanExporter:
    """The exporter of the protocol that `OTEL_EXPORTER_OTLP_PROTOCOL` names; gRPC by default."""
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"
    )
    if protocol == "grpc":
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise _missing("opentelemetry-exporter-otlp-proto-grpc") from error
        return OTLPSpanExporter(endpoint=endpoint or None)
    if protocol == "http/protobuf":
        try:
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http
        except ImportError as error:
            raise _missing("opentelemetry-exporter-otlp-proto-http") from error
        exporter: SpanExporter = over_http.OTLPSpanExporter(endpoint=endpoint or None)
        return exporter
    raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL = {protocol!r}: give grpc or http/protobuf")


def _missing(package: str) -> ConfigError:
    return ConfigError(f"{package} is not installed ({INSTALL})")


def _converter(tracer: Tracer, version: str) -> Callable[[Span], ReadableSpan]:
    """Builds a function that converts spans to the SDK's."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    kinds = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
    sampled = TraceFlags(TraceFlags.SAMPLED)
    scope = InstrumentationScope("weft", version)
    own = {
        "service.namespace": "weft",
        "service.name": tracer.service,
        "service.instance.id": tracer.instance,
        "service.version": version,
    }
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence over our attributes.
    resource = Resource.create().merge(Resource(own)).merge(OTELResourceDetector().detect())

    def context_of(trace_id: int, span_id: int) -> SpanContext:
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=sampled)

    def convert(span: Span) -> ReadableSpan:
        trace_id, offset_s = span.context.trace_id, wall_offset_s()
        attributes = dict(span.attributes)
        if span.request_id:
            attributes["weft.request_id"] = span.request_id
        return ReadableSpan(
            span.name,
            context=context_of(trace_id, span.context.span_id),
            parent=context_of(trace_id, span.parent_id) if span.parent_id else None,
            resource=resource,
            attributes=attributes,
            kind=kinds[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=int((span.start_s + offset_s) * 1e9),
            end_time=int((span.end_s + offset_s) * 1e9),
            instrumentation_scope=scope,
        )

    return convert


class _RareRepeats(logging.Filter):
    """Lets each message of the SDK through once a minute: it logs every span that it drops."""

    def __init__(self) -> None:
        super().__init__()
        self._next_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be logged."""
        now = time.monotonic()
        if now < self._next_at.get(str(record.msg), 0.0):
            return False
        self._next_at[str(record.msg)] = now + _REPEAT_LOG_S
        return True
