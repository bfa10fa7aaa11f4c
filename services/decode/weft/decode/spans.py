"""Spans of requests on a decode worker, built from the engine's reports when they end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from opentelemetry.trace import Span, SpanKind
from weft.common.telemetry.spans import (
    Attribute,
    Tracer,
    described_error,
    lease_span_id,
    remote_parent,
    traceparent_of,
)
from weft.contract.submits import Finished, GatewayBatch, Submit
from weft.contract.timeline import FillRecord, Timeline

_Key = tuple[int, str, int]


@dataclass(slots=True)
class _Open:
    span: Span
    unfinished: set[int]
    """Samples that have not ended."""
    num_completion_tokens: int = 0
    prompt: Timeline | None = None
    """Timeline of the sample that got its first token first; the others share its prompt."""


class RequestSpans:
    """Follows submits to their end and records their spans.

    The engine's times are on the same clock as this process's.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[_Key, _Open] = {}

    @property
    def num_open(self) -> int:
        """Number of submits whose end has not been reported."""
        return len(self._open)

    def on_submit(self, submit: Submit) -> None:
        """Records a submit on its way to the engine. Changes its `traceparent` to name the new
        span, which becomes the parent of later spans.
        """
        key = (submit.gateway, submit.request_id, submit.attempt)
        if not self._tracer.is_on or not submit.traceparent or key in self._open:
            return
        span = self._tracer.start(
            "request",
            remote_parent(submit.traceparent),
            submit.request_id,
            kind=SpanKind.SERVER,
            attributes={"weft.prompt_tokens": len(submit.prompt)},
        )
        submit.traceparent = traceparent_of(span)
        finished = {entry.sample for entry in submit.progress if entry.is_finished}
        self._open[key] = _Open(span, set(range(submit.sampling.n)) - finished)

    def on_batch(self, batch: GatewayBatch) -> None:
        """Records a step's results for a session."""
        if not self._open:
            return
        for finished in batch.finished:
            self._finished(batch.gateway, finished)
        for failed in batch.failed:
            key = (batch.gateway, failed.request_id, failed.attempt)
            opened = self._open.pop(key, None)
            if opened is not None:
                opened.prompt = opened.prompt or failed.timeline
                failure = failed.failure
                error = described_error(failure.reason, failure.message, failure.param)
                self._end(key, opened, {}, error)

    def on_session_closed(self, session: int) -> None:
        """Drops the requests of a closed session, which are cancelled without a report."""
        for key in [key for key in self._open if key[0] == session]:
            self._end(key, self._open.pop(key), {}, "the session ended")

    def _finished(self, session: int, finished: Finished) -> None:
        key = (session, finished.request_id, finished.attempt)
        opened = self._open.get(key)
        if opened is None or finished.sample not in opened.unfinished:
            return
        opened.unfinished.discard(finished.sample)
        opened.num_completion_tokens += finished.completion_tokens
        timeline = finished.timeline
        if opened.prompt is None or _began(timeline) < _began(opened.prompt):
            opened.prompt = timeline
        self._record_decode(opened, finished)
        if not opened.unfinished:
            del self._open[key]
            attributes: dict[str, Attribute] = {
                "weft.matched_tokens": opened.prompt.matched_tokens,
                "weft.cached_tokens": finished.cached_prompt_tokens,
                "weft.finish_reason": finished.reason,
            }
            self._end(key, opened, attributes, "")

    def _end(self, key: _Key, opened: _Open, attributes: dict[str, Attribute], error: str) -> None:
        if opened.prompt is not None:
            self._record_prompt(opened, key[1], opened.prompt)
        attributes["weft.completion_tokens"] = opened.num_completion_tokens
        opened.span.set_attributes(attributes)
        self._tracer.end(opened.span, error)

    def _record_prompt(self, opened: _Open, request_id: str, timeline: Timeline) -> None:
        zero_s, admitted_s = timeline.submitted_at, timeline.admitted_s
        if admitted_s is not None:
            self._tracer.record("queue", opened.span, request_id, zero_s, zero_s + admitted_s)
        for fill in timeline.fills:
            end_s = fill.end_s or timeline.finish_s or fill.start_s
            span = self._tracer.record(
                "fill",
                opened.span,
                request_id,
                zero_s + fill.start_s,
                zero_s + end_s,
                _fill_attributes(fill),
                error=fill.failure,
                span_id=lease_span_id(bytes.fromhex(fill.lease_id)) if fill.lease_id else 0,
            )
            for name, begin_s, end_s in _arrival_stages(fill):
                self._tracer.record(name, span, request_id, zero_s + begin_s, zero_s + end_s)
        if timeline.local_prefill_tokens:
            begin_s = max([admitted_s or 0.0, *(fill.end_s for fill in timeline.fills)])
            if timeline.local_prefill_began_s is not None:
                begin_s = timeline.local_prefill_began_s
            end_s = max(begin_s, timeline.first_token_s or timeline.finish_s or 0.0)
            last = timeline.fills[-1] if timeline.fills else None
            is_tail = last is not None and last.source == "prefill" and not last.failure
            self._tracer.record(
                "tail" if is_tail else "prefill",
                opened.span,
                request_id,
                zero_s + begin_s,
                zero_s + end_s,
                {"weft.tokens": timeline.local_prefill_tokens},
            )

    def _record_decode(self, opened: _Open, finished: Finished) -> None:
        timeline = finished.timeline
        if timeline.first_token_s is None or timeline.finish_s is None:
            return
        attributes: dict[str, Attribute] = {
            "weft.sample": finished.sample,
            "weft.tokens": finished.completion_tokens,
            "weft.steps": timeline.num_steps,
            "weft.preemptions": timeline.num_preemptions,
            "weft.drafted_tokens": timeline.num_drafted_tokens,
            "weft.accepted_tokens": timeline.num_accepted_tokens,
            "weft.finish_reason": finished.reason,
        }
        if timeline.num_tree_steps:
            attributes["weft.tree_steps"] = timeline.num_tree_steps
        zero_s = timeline.submitted_at
        first_s, last_s = zero_s + timeline.first_token_s, zero_s + timeline.finish_s
        self._tracer.record("decode", opened.span, finished.request_id, first_s, last_s, attributes)


def _began(timeline: Timeline) -> tuple[float, float]:
    """Seconds from the submission to a sample's first token, and to its admission."""
    first_s, admitted_s = timeline.first_token_s, timeline.admitted_s
    return math.inf if first_s is None else first_s, math.inf if admitted_s is None else admitted_s


def _arrival_stages(fill: FillRecord) -> list[tuple[str, float, float]]:
    """What the owner does with the last chunk of a fill: names, begins and ends in seconds."""
    if not (fill.arrived_s and fill.announced_s):
        return []
    first_s, both_s = sorted((fill.arrived_s, fill.announced_s))
    checked_s = max(both_s, fill.checked_s)
    check = [("check", both_s, checked_s)] if fill.checked_s else []
    publish = ("publish", checked_s, max(checked_s, fill.end_s))
    return [("arrival", first_s, both_s), *check, publish]


def _fill_attributes(fill: FillRecord) -> dict[str, Attribute]:
    return {
        "weft.source": fill.source,
        "weft.worker_id": fill.worker_id,
        "weft.transport": fill.transport,
        "weft.tokens": fill.accepted_tokens,
        "weft.bytes": fill.bytes,
    }
