"""Spans of a fill at its filler."""

from __future__ import annotations

from opentelemetry.trace import Span, SpanKind
from weft.common.telemetry.spans import Attribute, Tracer, remote_parent, traceparent_of
from weft.contract.fills import FillStart
from weft.contract.handle import FillEvent, FillTimings


class FillTrace:
    """Trace of one lease, from its start to its last event. A start without a trace context has no
    spans. Changes the context of `start` to name the new span, so that spans that the fill causes
    become its children.
    """

    def __init__(self, tracer: Tracer, start: FillStart) -> None:
        self._tracer = tracer
        self._request_id = start.request_id
        self._attributes: dict[str, Attribute] = {"weft.owner_id": start.handle.owner_id}
        self._timings: FillTimings | None = None
        self._error = "the owner's stream broke"
        self._span: Span | None = None
        if tracer.is_on and start.traceparent:
            self._span = tracer.start(
                "fill", remote_parent(start.traceparent), start.request_id, kind=SpanKind.SERVER
            )
            start.traceparent = traceparent_of(self._span)

    def on_event(self, event: FillEvent) -> None:
        """Records an event sent to the owner."""
        if event.kind == "accepted" and "weft.transport" not in self._attributes:
            self._attributes["weft.transport"] = event.transport
            self._attributes["weft.tokens"] = event.end_token - event.start_token
        elif event.kind == "done":
            self._timings = event.timings
            self._error = ""
        elif event.kind == "declined":
            self._error = f"declined: {event.reason} {event.message}".strip()
        elif event.kind in ("failed", "broken"):
            self._error = event.message
        elif event.kind == "stopped":
            self._error = "stopped"

    def end(self) -> None:
        """Ends the trace with the stream."""
        if self._span is None:
            return
        if self._timings is not None:
            self._attributes["weft.computed_tokens"] = self._timings.computed_tokens
            self._attributes["weft.bytes"] = self._timings.bytes
            self._record_stages(self._span, self._timings)
        self._span.set_attributes(self._attributes)
        self._tracer.end(self._span, self._error)

    def _record_stages(self, fill: Span, timings: FillTimings) -> None:
        # The engine's clock is this process's: both are CLOCK_MONOTONIC.
        accepted_s = timings.accepted_at
        tokens: dict[str, Attribute] = {"weft.tokens": timings.computed_tokens}
        size: dict[str, Attribute] = {"weft.bytes": timings.bytes}

        def stage(
            name: str, begin_s: float, end_s: float, attributes: dict[str, Attribute] | None = None
        ) -> None:
            """Times are seconds since the fill was accepted."""
            if end_s > 0.0:
                begin_at, end_at = accepted_s + begin_s, accepted_s + max(begin_s, end_s)
                self._tracer.record(name, fill, self._request_id, begin_at, end_at, attributes)

        computed_s = timings.last_chunk_computed_s
        stage("queue", 0.0, timings.queued_s)
        if timings.computed_tokens:
            stage("plan", timings.queued_s, timings.planned_s)
            stage("compute", timings.planned_s, computed_s, tokens)
        # The rest is of the last chunk; earlier ones leave while later ones are computed.
        digested_s = timings.last_digested_s
        gathered_s = max(computed_s, digested_s - timings.last_digest_s)
        posted_s, written_s = timings.last_write_posted_s, timings.last_write_complete_s
        stage("gather", computed_s, gathered_s)
        stage("digest", gathered_s, digested_s)
        stage("post", digested_s, posted_s)
        stage("write", posted_s, written_s, size)
        stage("report", written_s, timings.reported_s)
