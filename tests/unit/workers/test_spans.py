"""The ring of spans, what of them is exported, and trees of spans."""

from __future__ import annotations

import random
import secrets
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span
from weft.cli.trace_timeline import SMALLEST_S, first_token_pieces
from weft.cli.trace_tree import SpanNode, build_trees
from weft.common.telemetry.spans import (
    Tracer,
    described_error,
    lease_span_id,
    lease_traceparent,
    remote_parent,
    trace_id_of,
    traceparent_of,
)
from weft.testing.services.client_trace import new_trace, read_traceparent
from weft.v1 import trace_pb2


def test_what_is_wrong_with_a_request_is_not_told() -> None:
    """It may quote what the client sent."""
    text = "at $.properties['Jane Doe'].type: 'secret' is no type"
    assert described_error("INVALID_REQUEST", text, "constraint") == "INVALID_REQUEST: constraint"
    assert described_error("INVALID_REQUEST", text, None) == "INVALID_REQUEST"
    assert described_error("PEER_UNAVAILABLE", "decode-0 is gone", None).endswith(
        "decode-0 is gone"
    )


NOBODY = remote_parent("")


def record(tracer: Tracer, request_id: str, parent: Span = NOBODY) -> Span:
    return tracer.record("x", parent, request_id, 0.0, 1.0)


def found_ids(tracer: Tracer, wanted: str, limit: int = 10) -> list[str]:
    return [span.attributes["weft.request_id"] for span in tracer.recent.find(wanted, limit)]


def test_the_ring_keeps_the_newest() -> None:
    tracer = Tracer("gateway", max_spans=100)
    spans = [record(tracer, f"cmpl-{number}") for number in range(250)]
    assert not found_ids(tracer, "cmpl-149")
    assert found_ids(tracer, "cmpl-150") == ["cmpl-150"]
    assert found_ids(tracer, trace_id_of(spans[249])) == ["cmpl-249"]


def test_spans_of_a_time_are_found_with_those_that_still_run() -> None:
    tracer = Tracer("decode")
    second_ns, now_ns, now_s = 10**9, time.time_ns(), time.monotonic()
    for begin_s, end_s in ((-30, -20), (-15, -9), (-8, -7), (-6, 0)):
        tracer.record(f"{begin_s}", NOBODY, "r", now_s + begin_s, now_s + end_s)
    runs = tracer.start("runs", NOBODY, "r", start_s=now_s - 9.5)
    ended = tracer.start("ended", NOBODY, "r", start_s=now_s - 5)
    tracer.end(ended)
    later = tracer.start("later", NOBODY, "r")

    def names(begin_s: int, end_s: int, limit: int = 10) -> list[str]:
        times = now_ns + begin_s * second_ns, now_ns + end_s * second_ns
        return [span.name for span in tracer.within(*times, limit)]

    assert names(-10, -7) == ["-15", "-8", "runs"]
    assert names(-7, -2, limit=2) == ["ended", "runs"]
    (open_one,) = [span for span in tracer.within(0, now_ns, 10) if span.name == "runs"]
    assert open_one.attributes is not None
    assert open_one.attributes["weft.is_open"]
    assert open_one.end_time is not None
    assert open_one.end_time >= now_ns - second_ns
    tracer.end(runs)
    assert names(-10, -9) == ["-15", "runs"]
    del runs, ended, later
    assert not tracer._open


def test_a_request_is_found_with_its_prompts_and_no_other() -> None:
    tracer = Tracer("decode")
    for request_id in ("cmpl-1", "cmpl-1-0", "cmpl-1-12", "cmpl-12", "cmpl-1-x", ""):
        record(tracer, request_id)
    assert found_ids(tracer, "cmpl-1") == ["cmpl-1", "cmpl-1-0", "cmpl-1-12"]
    assert found_ids(tracer, "cmpl-1", 2) == ["cmpl-1-0", "cmpl-1-12"]


def test_only_sampled_spans_are_exported_and_none_when_off() -> None:
    for is_on in (True, False):
        exporter = InMemorySpanExporter()
        tracer = Tracer("decode", is_on=is_on)
        tracer.processors.append(SimpleSpanProcessor(exporter))
        for is_sampled in (True, False):
            record(tracer, "r", remote_parent(new_trace(is_sampled).traceparent))
        exported = [span.context.trace_flags.sampled for span in exporter.get_finished_spans()]
        assert exported == ([True] if is_on else [])
        assert len(found_ids(tracer, "r")) == (2 if is_on else 0)


@pytest.mark.parametrize(
    ("ratio", "least", "most"), [(0.0, 0, 0), (0.5, 350, 650), (1.0, 999, 999)]
)
def test_a_share_of_new_traces_is_sampled(ratio: float, least: int, most: int) -> None:
    tracer = Tracer("gateway", sample_ratio=ratio)
    spans = [record(tracer, "r") for _ in range(999)]
    assert len({trace_id_of(span) for span in spans}) == 999
    assert least <= sum(span.get_span_context().trace_flags.sampled for span in spans) <= most


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_caller_decides_for_its_own_trace(ratio: float) -> None:
    tracer = Tracer("gateway", sample_ratio=ratio)
    for is_sampled in (False, True):
        caller = new_trace(is_sampled)
        record(tracer, "r", remote_parent(caller.traceparent))
        (span,) = tracer.recent.find("r", 1)
        assert (span.context.trace_id, span.parent.span_id) == (caller.trace_id, caller.span_id)
        assert span.context.trace_flags.sampled == is_sampled


def test_both_ends_of_a_fill_name_one_span() -> None:
    caller, lease_id = new_trace(True), secrets.token_bytes(16)
    header = read_traceparent(lease_traceparent(caller.traceparent, lease_id))
    assert header == (caller.trace_id, lease_span_id(lease_id), True)
    tracer = Tracer("decode")
    parent = remote_parent(caller.traceparent)
    fill = tracer.record("fill", parent, "r", 0.0, 1.0, span_id=lease_span_id(lease_id))
    assert read_traceparent(traceparent_of(fill)) == header
    assert record(tracer, "r", fill).get_span_context().span_id != header.span_id
    assert not lease_traceparent("nonsense", lease_id)


def test_moments_keep_their_order_while_the_wall_clock_is_slewed_or_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracer, real, error_s = Tracer("decode"), time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + error_s + random.uniform(-4e-4, 4e-4))
    for step_s in (0.0, 3600.0, -7200.0):
        error_s += step_s
        now_s = time.monotonic()
        record(tracer, "first")  # It notices the step.
        for index in range(50):
            tracer.record("x", NOBODY, f"r{step_s}", now_s + index * 1e-6, now_s + 1.0)
        starts = [span.start_time for span in tracer.recent.find(f"r{step_s}", 50)]
        assert starts == sorted(starts)
        wall_s = real() + error_s + now_s - time.monotonic()
        assert starts[0] / 1e9 == pytest.approx(wall_s, abs=0.05)


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
