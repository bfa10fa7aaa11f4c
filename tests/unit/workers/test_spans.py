"""Trace context, the ring of spans, and trees of spans."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace as otel
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from weft.cli.trace_timeline import SMALLEST_S, first_token_pieces
from weft.cli.trace_tree import SpanNode, build_trees
from weft.common.telemetry.spans import (
    Span,
    SpanContext,
    Tracer,
    described_error,
    new_trace,
    parse_traceparent,
)
from weft.v1 import trace_pb2

PROPAGATOR = TraceContextTextMapPropagator()
HEX = "0123456789abcdef"
FIELDS = st.tuples(
    st.sampled_from(["00", "01", "cc", "ff", "0", "zz"]),
    st.one_of(
        st.text(HEX, min_size=32, max_size=32), st.just("0" * 32), st.text("0aZ", max_size=9)
    ),
    st.one_of(
        st.text(HEX, min_size=16, max_size=16), st.just("0" * 16), st.text("0aZ", max_size=9)
    ),
    st.sampled_from(["00", "01", "02", "03", "ff", "1", "x1"]),
    st.sampled_from(["", "", "", "-", "-more", "more"]),
)


@given(FIELDS)
def test_a_traceparent_means_what_opentelemetry_makes_of_it(fields: tuple[str, ...]) -> None:
    text = "-".join(fields[:4]) + fields[4]
    other = otel.get_current_span(PROPAGATOR.extract({"traceparent": text})).get_span_context()
    ours = parse_traceparent(text)
    assert (ours is not None) == other.is_valid, text
    if ours is not None:
        assert (ours.trace_id, ours.span_id) == (other.trace_id, other.span_id)
        assert ours.is_sampled == other.trace_flags.sampled


def test_a_context_survives_its_header() -> None:
    for is_sampled in (False, True):
        context = new_trace(is_sampled)
        assert parse_traceparent(context.traceparent) == context
        child = context.child()
        assert (child.trace_id, child.is_sampled) == (context.trace_id, is_sampled)
        assert child.span_id != context.span_id


def test_what_is_wrong_with_a_request_is_not_told() -> None:
    """It may quote what the client sent."""
    text = "at $.properties['Jane Doe'].type: 'secret' is no type"
    assert described_error("INVALID_REQUEST", text, "constraint") == "INVALID_REQUEST: constraint"
    assert described_error("INVALID_REQUEST", text, None) == "INVALID_REQUEST"
    assert described_error("PEER_UNAVAILABLE", "decode-0 is gone", None).endswith(
        "decode-0 is gone"
    )


def span(context: SpanContext, request_id: str = "", name: str = "x") -> Span:
    return Span(
        name=name, context=context, parent_id=0, start_s=0.0, end_s=1.0, request_id=request_id
    )


def test_the_ring_keeps_the_newest() -> None:
    tracer = Tracer("gateway", max_spans=100)
    contexts = [new_trace(False) for _ in range(250)]
    for number, context in enumerate(contexts):
        tracer.record(span(context, f"cmpl-{number}"))
    assert not tracer.find("cmpl-149", 10)
    assert [found.context for found in tracer.find("cmpl-150", 10)] == [contexts[150]]
    assert [s.request_id for s in tracer.find(f"{contexts[249].trace_id:032x}", 10)] == ["cmpl-249"]


def test_a_request_is_found_with_its_prompts_and_no_other() -> None:
    tracer = Tracer("decode")
    for request_id in ("cmpl-1", "cmpl-1-0", "cmpl-1-12", "cmpl-12", "cmpl-1-x", ""):
        tracer.record(span(new_trace(False), request_id))
    assert [s.request_id for s in tracer.find("cmpl-1", 10)] == ["cmpl-1", "cmpl-1-0", "cmpl-1-12"]
    assert [s.request_id for s in tracer.find("cmpl-1", 2)] == ["cmpl-1-0", "cmpl-1-12"]


def test_only_sampled_spans_are_exported_and_none_when_off() -> None:
    for is_on in (True, False):
        exported: list[Span] = []
        tracer = Tracer("decode", is_on=is_on)
        tracer.export = exported.append
        for is_sampled in (True, False):
            tracer.record(span(new_trace(is_sampled), "r"))
        assert [s.context.is_sampled for s in exported] == ([True] if is_on else [])
        assert len(tracer.find("r", 10)) == (2 if is_on else 0)


@pytest.mark.parametrize(
    ("ratio", "least", "most"), [(0.0, 0, 0), (0.5, 350, 650), (1.0, 999, 999)]
)
def test_a_share_of_new_traces_is_sampled(ratio: float, least: int, most: int) -> None:
    tracer = Tracer("gateway", sample_ratio=ratio)
    sampled = sum(tracer.begin("")[0].is_sampled for _ in range(999))
    assert least <= sampled <= most


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_caller_decides_for_its_own_trace(ratio: float) -> None:
    tracer = Tracer("gateway", sample_ratio=ratio)
    for is_sampled in (False, True):
        caller = new_trace(is_sampled)
        context, parent_id = tracer.begin(caller.traceparent)
        assert (context.trace_id, parent_id) == (caller.trace_id, caller.span_id)
        assert context.is_sampled == is_sampled


# -- trees ---------------------------------------------------------------------------------------


def wire(
    number: int, parent: int, service: str, start_s: float, duration_s: float
) -> trace_pb2.Span:
    message = trace_pb2.Span(
        trace_id=b"t" * 16,
        span_id=number.to_bytes(8, "big"),
        parent_span_id=parent.to_bytes(8, "big") if parent else b"",
        name=str(number),
        service=service,
    )
    message.start_time.FromNanoseconds(int(start_s * 1e9))
    message.duration.FromNanoseconds(int(duration_s * 1e9))
    return message


def shape(nodes: list[SpanNode]) -> list[tuple[str, list[object]]]:
    return [(node.span.name, list(shape(node.children))) for node in nodes]


def test_spans_in_any_order_make_the_same_tree() -> None:
    spans = [
        wire(1, 99, "gateway", 100.0, 10.0),
        wire(2, 1, "gateway", 101.0, 1.0),
        wire(3, 1, "decode", 102.0, 7.0),
        wire(4, 3, "decode", 103.0, 1.0),
        wire(5, 77, "prefill", 200.0, 1.0),
    ]
    wanted = [("1", [("2", []), ("3", [("4", [])])]), ("5", [])]
    for _ in range(10):
        secrets.SystemRandom().shuffle(spans)
        # A span that two services remember, or that comes twice, is one.
        trees = build_trees([*spans, spans[0]])
        assert shape(trees) == wanted
        assert trees[0].children[1].children[0].after_s == pytest.approx(1.0)


@given(st.floats(-1e4, 1e4))
def test_another_hosts_clock_does_not_change_the_times_within_it(error_s: float) -> None:
    spans = [
        wire(1, 0, "gateway", 1e5, 10.0),
        wire(2, 1, "decode", 1e5 + 3.0 + error_s, 4.0),
        wire(3, 2, "decode", 1e5 + 4.0 + error_s, 1.0),
        wire(4, 2, "prefill", 1e5 + 3.5 + error_s, 1.0),
    ]
    (root,) = build_trees(spans)
    (request,) = root.children
    by_name = {child.span.name: child for child in request.children}
    # What one host measured stays; the other's is shown inside of what caused it.
    assert by_name["3"].after_s == pytest.approx(1.0, abs=1e-5)
    assert by_name["4"].after_s == pytest.approx(0.5, abs=1e-5)
    assert request.after_s is not None
    assert -1e-3 <= request.after_s <= 10.0 + 2e-3
    if request.is_shifted:
        assert request.after_s == pytest.approx(3.0, abs=1e-5)


def test_a_span_that_names_itself_is_a_root() -> None:
    assert shape(build_trees([wire(1, 1, "gateway", 0.0, 1.0)])) == [("1", [])]


# -- the way to the first token ------------------------------------------------------------------


def named(span: trace_pb2.Span, name: str) -> trace_pb2.Span:
    span.name = name
    return span


def test_the_time_to_the_first_token_is_divided_without_rest() -> None:
    spans = [
        named(wire(1, 0, "gateway", 100.0, 10.0), "text_completion"),
        named(wire(2, 1, "gateway", 100.5, 0.5), "route"),
        named(wire(3, 1, "decode", 102.0, 7.0), "request"),
        named(wire(4, 3, "prefill", 103.0, 2.0), "compute"),
        named(wire(5, 3, "decode", 105.5, 1.5), "prefill"),
        named(wire(6, 1, "gateway", 107.25, 2.75), "render"),
    ]
    (root,) = build_trees(spans)
    pieces = first_token_pieces(root)
    found = [(piece.what, piece.begin_s, piece.duration_s, piece.is_between) for piece in pieces]
    expected = [
        ("text_completion → route", 0.0, 0.5, False),
        ("route", 0.5, 0.5, False),
        ("route → request", 1.0, 1.0, True),
        ("request → compute", 2.0, 1.0, True),
        ("compute", 3.0, 2.0, False),
        ("compute → prefill", 5.0, 0.5, True),
        ("prefill", 5.5, 1.5, False),
        ("prefill → first token", 7.0, 0.25, False),
    ]
    assert [(what, between) for what, _, _, between in found] == [
        (what, between) for what, _, _, between in expected
    ]
    for piece, (_, begin_s, duration_s, _) in zip(pieces, expected, strict=True):
        assert piece.begin_s == pytest.approx(begin_s, abs=1e-5)
        assert piece.duration_s == pytest.approx(duration_s, abs=1e-5)
        assert piece.is_gap == ("→" in piece.what)


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.floats(0, 9), st.floats(0.01, 5)), min_size=1, max_size=8
    )
)
def test_pieces_follow_one_another_whatever_the_spans(
    below: list[tuple[int, float, float]],
) -> None:
    spans = [wire(1, 0, "gateway", 100.0, 10.0)]
    for number, (parent, start_s, duration_s) in enumerate(below, start=2):
        spans.append(wire(number, min(parent, number - 1), "gateway", 100.0 + start_s, duration_s))
    (root,) = build_trees(spans)
    pieces = first_token_pieces(root)
    missing_s = 10.0 - sum(piece.duration_s for piece in pieces)
    assert 0.0 <= missing_s + 1e-5 <= 50 * SMALLEST_S
    ends = [piece.begin_s + piece.duration_s for piece in pieces]
    assert all(
        end_s <= piece.begin_s + 1e-5 for end_s, piece in zip(ends, pieces[1:], strict=False)
    )
