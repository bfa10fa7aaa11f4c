"""Spans of one request in the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.trace import Span, SpanKind
from weft.common.telemetry.spans import (
    Attribute,
    Tracer,
    described_error,
    remote_parent,
    trace_id_of,
    traceparent_of,
)
from weft.contract.clock import monotonic
from weft.contract.errors import WeftError
from weft.gateway.request import RawRequest
from weft.v1 import common_pb2

_OPERATIONS = {"chatcmpl": "chat", "cmpl": "text_completion", "embd": "embeddings"}
"""Operation names of OpenTelemetry's conventions, by the kind of the request id."""


class AttemptTrace:
    """Trace of one submission to a decode worker; that worker's spans are below it."""

    def __init__(self, tracer: Tracer, request: Span, wire_id: str, attempt: int) -> None:
        self._tracer = tracer
        self._wire_id = wire_id
        self._start_s = monotonic()
        self._is_open = True
        self._span = tracer.start(
            f"attempt {attempt}",
            request,
            wire_id,
            kind=SpanKind.CLIENT,
            start_s=self._start_s,
            attributes={"weft.worker_id": "", "weft.attempt": attempt},
        )
        self.traceparent = traceparent_of(self._span)
        """Trace context for the Submit."""

    def routed(self, worker_id: str, num_candidates: int) -> None:
        """Notes the chosen worker: the time until now was the router's."""
        if not self._is_open:
            return
        attributes: dict[str, Attribute] = {
            "weft.worker_id": worker_id,
            "weft.prefill_candidates": num_candidates,
        }
        self._span.set_attribute("weft.worker_id", worker_id)
        self._tracer.record(
            "route", self._span, self._wire_id, self._start_s, monotonic(), attributes
        )

    def end(self, error: WeftError | None = None) -> None:
        """Ends the span when the owner has reported the end or the attempt is over otherwise; once
        is enough.
        """
        if not self._is_open:
            return
        self._is_open = False
        text = "" if error is None else described_error(error.reason, error.message, error.param)
        self._tracer.end(self._span, text)


class RequestTrace:
    """The spans of one client's request: the root, and its stages. `traceparent` is the header that
    the client sent; empty if it sent none.
    """

    def __init__(self, tracer: Tracer, request_id: str, traceparent: str) -> None:
        self._tracer = tracer
        self._request_id = request_id
        self._operation = _OPERATIONS.get(request_id.partition("-")[0], "request")
        self._first_token_s: float | None = None
        self._span = tracer.start(
            self._operation, remote_parent(traceparent), request_id, kind=SpanKind.SERVER
        )
        self.trace_id = trace_id_of(self._span)
        """32 hex digits; empty if the request belongs to no trace."""

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
            self._tracer.record(
                name, self._span, self._request_id, start_s, monotonic(), attributes, error=error
            )

    def attempt(self, wire_id: str, attempt: int) -> AttemptTrace:
        """Begins an attempt (from 1) of one of its prompts, whose key on Sessions is `wire_id`."""
        return AttemptTrace(self._tracer, self._span, wire_id, attempt)

    def first_token(self) -> None:
        """Notes the first token, from which the answer is rendered."""
        if self._first_token_s is None:
            self._first_token_s = monotonic()

    def end(
        self, raw: RawRequest, model: str, outcome: str, usage: common_pb2.Usage | None
    ) -> None:
        """Ends the root span, of a request that has ended.

        Args:
            model: Name of the model that served it; empty: none did.
            usage: Its tokens; None: it did not run.
        """
        attributes: dict[str, Attribute] = {
            "weft.outcome": outcome,
            "weft.prompts": len(raw.prompts),
            "weft.samples": raw.given.get("n", 1),
            "gen_ai.operation.name": self._operation,
            "gen_ai.request.model": model,
        }
        if raw.client_request_id:
            attributes["weft.client_request_id"] = raw.client_request_id
        if raw.header_request_id:
            attributes["weft.header_request_id"] = raw.header_request_id
        if usage is not None:
            attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
            attributes["weft.cached_tokens"] = usage.cached_prompt_tokens
        if self._first_token_s is not None:
            self._tracer.record(
                "render", self._span, self._request_id, self._first_token_s, monotonic()
            )
        self._span.set_attributes(attributes)
        self._tracer.end(self._span, "" if outcome == "ok" else outcome)
