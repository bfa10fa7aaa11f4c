"""Export of a service's sampled spans to a collector, over OTLP."""

from __future__ import annotations

import logging
import os
import threading
import time

from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from weft.common.settings import ServiceSettings
from weft.common.telemetry.spans import Tracer
from weft.contract.errors import ConfigError

_log = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
CLOSE_TIMEOUT_S = 2.0
"""Seconds allowed for exporting at the end; the rest is lost."""
_REPEAT_LOG_S = 60.0


class OtlpExport:
    """Sends a tracer's sampled spans to a collector, in batches, from its own thread.

    The queue is bounded (`OTEL_BSP_MAX_QUEUE_SIZE`); when it is full, spans are lost. Nothing ever
    waits for the collector.

    Raises:
        ConfigError: The protocol that the environment names is not installed.
    """

    def __init__(self, tracer: Tracer, endpoint: str) -> None:
        self._processor = BatchSpanProcessor(_exporter(endpoint))
        logging.getLogger("opentelemetry").addFilter(_RareRepeats())
        tracer.processors.append(self._processor)

    def close(self) -> None:
        """Sends the remaining spans; blocks for at most `CLOSE_TIMEOUT_S`."""
        # The processor's own shutdown waits up to 30 s for a collector that does not answer.
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def start_export(tracer: Tracer, settings: ServiceSettings) -> OtlpExport | None:
    """Starts exporting spans if an endpoint is set, and logs it.

    Raises:
        ConfigError: A flag asks for an export that is not possible. If only the environment asks
            for it, the service starts without export.
    """
    endpoint = _wanted_endpoint(settings.otlp_endpoint)
    if not endpoint or not tracer.is_on:
        return None
    try:
        export = OtlpExport(tracer, settings.otlp_endpoint)
    except ConfigError as error:
        if settings.otlp_endpoint:
            raise ConfigError(f"--otlp-endpoint {endpoint}: {error.message}") from error
        _log.warning("spans are not exported to %s: %s", endpoint, error.message)
        return None
    _log.info("spans are exported", extra={"endpoint": endpoint})
    return export


def _wanted_endpoint(setting: str) -> str:
    return setting or next(filter(None, map(os.environ.get, ENDPOINT_VARIABLES)), "")


def _exporter(endpoint: str) -> SpanExporter:
    """The exporter of the protocol that `OTEL_EXPORTER_OTLP_PROTOCOL` names; gRPC by default."""
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"
    )
    # Only processes that export spans pay for the import of an exporter.
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

        grpc_exporter: SpanExporter = over_grpc.OTLPSpanExporter(endpoint=endpoint or None)
        return grpc_exporter
    if protocol == "http/protobuf":
        try:
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http
        except ImportError as error:
            package = "opentelemetry-exporter-otlp-proto-http"
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_PROTOCOL = {protocol} needs the package {package}; install "
                "it, or export over grpc"
            ) from error
        exporter: SpanExporter = over_http.OTLPSpanExporter(endpoint=endpoint or None)
        return exporter
    raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL = {protocol!r}: give grpc or http/protobuf")


class _RareRepeats(logging.Filter):
    """Lets each message of the SDK through once a minute: it logs every span that it drops."""

    def __init__(self) -> None:
        super().__init__()
        self._next_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next_at.get(str(record.msg), 0.0):
            return False
        self._next_at[str(record.msg)] = now + _REPEAT_LOG_S
        return True
