"""Spans of several services as trees, though the services' clocks may differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.v1 import trace_pb2

_TOLERANCE_S = 0.001
"""If a child begins more than this before its parent, or after its end, their clocks differ."""


@dataclass(slots=True)
class SpanNode:
    """A span and its children, in the order of their starts."""

    span: trace_pb2.Span
    start_s: float
    """Unix time on the clock of the root's service, as far as it can be determined."""
    duration_s: float
    after_s: float | None = None
    """Seconds after its parent's start; None for a root."""
    is_shifted: bool = False
    """Whether the services' clocks differ, so that the span was moved to the middle of its
    parent.
    """
    children: list[SpanNode] = field(default_factory=list)


def build_trees(spans: Sequence[trace_pb2.Span]) -> list[SpanNode]:
    """Trees, oldest first. A span whose parent is not among them is a root.

    Times of two services are compared only to see whether they are plausible. A child of another
    service that would begin outside its parent is moved to the parent's middle, together with its
    own children. The delay is then the same in both directions.
    """
    known = {span.span_id for span in spans}
    children: dict[bytes, list[trace_pb2.Span]] = defaultdict(list)
    roots: list[trace_pb2.Span] = []
    for span in {span.span_id: span for span in spans}.values():
        has_parent = span.parent_span_id in known and span.parent_span_id != span.span_id
        (children[span.parent_span_id] if has_parent else roots).append(span)
    trees = [_build(span, children, 0.0) for span in roots]
    return sorted(trees, key=lambda node: node.start_s)


def _build(
    span: trace_pb2.Span, children: dict[bytes, list[trace_pb2.Span]], shift_s: float
) -> SpanNode:
    node = SpanNode(
        span=span,
        start_s=span.start_time.ToNanoseconds() / 1e9 + shift_s,
        duration_s=span.duration.ToNanoseconds() / 1e9,
    )
    for child in children.get(span.span_id, ()):
        is_same = (child.service, child.instance) == (span.service, span.instance)
        child_shift_s = shift_s
        start_s = child.start_time.ToNanoseconds() / 1e9 + shift_s
        is_outside = not (
            node.start_s - _TOLERANCE_S <= start_s <= node.start_s + node.duration_s + _TOLERANCE_S
        )
        if is_outside and not is_same:
            spare_s = max(0.0, node.duration_s - child.duration.ToNanoseconds() / 1e9)
            child_shift_s += node.start_s + spare_s / 2 - start_s
        below = _build(child, children, child_shift_s)
        below.after_s = max(0.0, below.start_s - node.start_s)
        below.is_shifted = child_shift_s != shift_s
        node.children.append(below)
    node.children.sort(key=lambda below: below.start_s)
    return node
