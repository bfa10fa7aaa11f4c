"""A collector of spans that speaks OTLP over gRPC, in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2 as wire,
)
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2_grpc as service,
)


@dataclass(frozen=True)
class Collected:
    """One span as it arrived."""

    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    duration_ns: int
    attributes: dict[str, Any]
    is_error: bool


class Collector(service.TraceServiceServicer):
    """Collects all spans."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Collected] = []
        self.address = ""

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                about = _attributes(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self._spans += [_collected(span, about) for span in scope.spans]
        return wire.ExportTraceServiceResponse()

    def spans(self, trace_id: str) -> list[Collected]:
        with self._lock:
            return [span for span in self._spans if span.trace_id == trace_id]


def _collected(span: Any, about: dict[str, Any]) -> Collected:
    return Collected(
        service=about["service.name"],
        instance=about["service.instance.id"],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        duration_ns=span.end_time_unix_nano - span.start_time_unix_nano,
        attributes=_attributes(span.attributes),
        is_error=span.status.code == 2,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port of loopback."""
    server = grpc.server(ThreadPoolExecutor(4))
    collecting = Collector()
    service.add_TraceServiceServicer_to_server(collecting, server)
    port = server.add_insecure_port("127.0.0.1:0")
    collecting.address = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collecting
    finally:
        server.stop(0).wait()
