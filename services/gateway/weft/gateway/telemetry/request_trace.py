"""Spans of one request in the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weft.common.telemetry.spans import Attribute, Span, SpanContext, Tracer, described_error
from weft.contract.clock import monotonic
from weft.contract.errors import WeftError

if TYPE_CHECKING:
    from weft.gateway.generation.answer import Answer

_OPERATIONS = {"chatcmpl": "chat", "cmpl": "text_completion", "embd": "embeddings"}
"""Operation names of OpenTelemetry's conventions, by the kind of the request id."""


class AttemptTrace:
    """Trace of one submission to a decode worker; that worker's spans are below it."""

    def __init__(self, tracer: Tracer, request: RequestTrace, wire_id: str, attempt: int) -> None:
        self._tracer = tracer
        self._parent_id = request.context.span_id
        self._context = request.context.child()
        self._wire_id = wire_id
        self._attempt = attempt
        self._start_s: float | None = monotonic()
        self._worker_id = ""
        self.traceparent = self._context.traceparent if tracer.is_on else request.traceparent
        """Trace context for the Submit."""

    def routed(self, worker_id: str, num_candidates: int) -> None:
        """Notes the chosen worker: the time until now was the router's."""
        if self._start_s is None:
            return
        self._worker_id = worker_id
        self._record(
            Span(
                name="route",
                context=self._context.child(),
                parent_id=self._context.span_id,
                start_s=self._start_s,
                end_s=monotonic(),
                request_id=self._wire_id,
                attributes={
                    "weft.worker_id": worker_id,
                    "weft.prefill_candidates": num_candidates,
                },
            )
        )

    def end(self, error: WeftError | None = None) -> None:
        """Ends the span when the owner has reported the end or the attempt is over otherwise; once
        is enough.
        """
        start_s, self._start_s = self._start_s, None
        if start_s is None:
            return
        text = "" if error is None else described_error(error.reason, error.message, error.param)
        self._record(
            Span(
                name=f"attempt {self._attempt}",
                context=self._context,
                parent_id=self._parent_id,
                start_s=start_s,
                end_s=monotonic(),
                request_id=self._wire_id,
                kind="client",
                attributes={"weft.worker_id": self._worker_id, "weft.attempt": self._attempt},
                error=text,
            )
        )

    def _record(self, span: Span) -> None:
        self._tracer.record(span)


class RequestTrace:
    """The spans of one client's request: the root, and its stages.

    Args:
        tracer: Keeps the spans.
        request_id: Id that the client gets.
        traceparent: Header that the client sent; empty if it sent none.
    """

    def __init__(self, tracer: Tracer, request_id: str, traceparent: str) -> None:
        self._tracer = tracer
        self._request_id = request_id
        self._start_s = monotonic()
        self._first_token_s: float | None = None
        self.traceparent = traceparent
        self.context, self._parent_id = (
            tracer.begin(traceparent) if tracer.is_on else (SpanContext(0, 0, False), 0)
        )

    @property
    def trace_id(self) -> str:
        """Trace id, 32 hex digits; empty if nothing is traced."""
        return f"{self.context.trace_id:032x}" if self.context.trace_id else ""

    @contextmanager
    def stage(self, name: str, **attributes: Attribute) -> Iterator[None]:
        """A span for a stage, for the duration of the block."""
        start_s, error = monotonic(), ""
        try:
            yield
        except BaseException as failure:
            error = failure.reason if isinstance(failure, WeftError) else type(failure).__name__
            raise
        finally:
            self._record(name, start_s, attributes, error)

    def attempt(self, wire_id: str, attempt: int) -> AttemptTrace:
        """Begins an attempt of one of its prompts.

        Args:
            wire_id: The prompt's key on Sessions.
            attempt: From 1.
        """
        return AttemptTrace(self._tracer, self, wire_id, attempt)

    def first_token(self) -> None:
        """Notes the first token, from which the answer is rendered."""
        if self._first_token_s is None:
            self._first_token_s = monotonic()

    def end(self, answer: Answer) -> None:
        """Ends the root span, of a request that has ended."""
        if not self._tracer.is_on:
            return
        raw, outcome = answer.raw, answer.outcome
        operation = _OPERATIONS.get(self._request_id.partition("-")[0], "request")
        attributes: dict[str, Attribute] = {
            "weft.outcome": outcome,
            "weft.prompts": len(raw.prompts),
            "weft.samples": raw.given.get("n", 1),
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": "" if answer.served is None else answer.served.model.name,
        }
        if raw.client_request_id:
            attributes["weft.client_request_id"] = raw.client_request_id
        if raw.header_request_id:
            attributes["weft.header_request_id"] = raw.header_request_id
        if answer.has_begun:
            attributes["gen_ai.usage.input_tokens"] = answer.num_prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = answer.num_output_tokens
            attributes["weft.cached_tokens"] = answer.num_cached_tokens
        if self._first_token_s is not None:
            self._record("render", self._first_token_s, {}, "")
        self._tracer.record(
            Span(
                name=operation,
                context=self.context,
                parent_id=self._parent_id,
                start_s=self._start_s,
                end_s=monotonic(),
                request_id=self._request_id,
                kind="server",
                attributes=attributes,
                error="" if outcome == "ok" else outcome,
            )
        )

    def _record(
        self, name: str, start_s: float, attributes: dict[str, Attribute], error: str
    ) -> None:
        self._tracer.record(
            Span(
                name=name,
                context=self.context.child(),
                parent_id=self.context.span_id,
                start_s=start_s,
                end_s=monotonic(),
                request_id=self._request_id,
                attributes=attributes,
                error=error,
            )
        )
