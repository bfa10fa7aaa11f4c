"""Spans of a fill at its filler."""

from __future__ import annotations

from weft.common.telemetry.spans import Attribute, Span, Tracer
from weft.contract.clock import monotonic
from weft.contract.fills import FillStart
from weft.contract.handle import FillEvent, FillTimings


class FillTrace:
    """Trace of one lease, from its start to its last event.

    Args:
        tracer: Keeps the spans.
        start: The owner's message. Without a trace context there are no spans. The context is
            changed to name the new span, so that spans that the fill causes become its children.
    """

    def __init__(self, tracer: Tracer, start: FillStart) -> None:
        self._tracer = tracer
        self._request_id = start.request_id
        self._start_s = monotonic()
        self._attributes: dict[str, Attribute] = {"weft.owner_id": start.handle.owner_id}
        self._timings: FillTimings | None = None
        self._accepted_s = 0.0
        self._error = "the owner's stream broke"
        self._is_on = tracer.is_on and bool(start.traceparent)
        if self._is_on:
            self._context, self._parent_id = tracer.begin(start.traceparent)
            start.traceparent = self._context.traceparent

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
        if not self._is_on:
            return
        timings = self._timings
        if timings is not None:
            self._attributes["weft.computed_tokens"] = timings.computed_tokens
            self._attributes["weft.bytes"] = timings.bytes
            # The engine's clock is this process's: both are CLOCK_MONOTONIC.
            self._accepted_s = timings.accepted_at
            self._stage("queue", 0.0, timings.queued_s, {})
            computed_s = timings.last_chunk_computed_s
            if timings.computed_tokens:
                tokens: dict[str, Attribute] = {"weft.tokens": timings.computed_tokens}
                self._stage("plan", timings.queued_s, timings.planned_s, {})
                self._stage("compute", timings.planned_s, computed_s, tokens)
            # The rest is of the last chunk; earlier ones leave while later ones are computed.
            digested_s = timings.last_digested_s
            gathered_s = max(computed_s, digested_s - timings.last_digest_s)
            posted_s, written_s = timings.last_write_posted_s, timings.last_write_complete_s
            self._stage("gather", computed_s, gathered_s, {})
            self._stage("digest", gathered_s, digested_s, {})
            self._stage("post", digested_s, posted_s, {})
            size: dict[str, Attribute] = {"weft.bytes": timings.bytes}
            self._stage("write", posted_s, written_s, size)
            self._stage("report", written_s, timings.reported_s, {})
        self._tracer.record(
            Span(
                name="fill",
                context=self._context,
                parent_id=self._parent_id,
                start_s=self._start_s,
                end_s=monotonic(),
                request_id=self._request_id,
                kind="server",
                attributes=self._attributes,
                error=self._error,
            )
        )

    def _stage(
        self, name: str, begin_s: float, end_s: float, attributes: dict[str, Attribute]
    ) -> None:
        """Records a part of the fill; times are seconds since the fill was accepted."""
        if end_s <= 0.0:
            return
        self._tracer.record(
            Span(
                name=name,
                context=self._context.child(),
                parent_id=self._context.span_id,
                start_s=self._accepted_s + begin_s,
                end_s=self._accepted_s + max(begin_s, end_s),
                request_id=self._request_id,
                attributes=attributes,
            )
        )
