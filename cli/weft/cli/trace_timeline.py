"""The time of a request up to its first token, divided into spans and the gaps between them.

Spans overlap and leave gaps. Here each moment belongs to one span, the open span that began last. A
moment that belongs to a span with children is a gap between two of these children, within a process
or between two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.cli.trace_tree import SpanNode

SMALLEST_S = 2e-5
"""Shorter pieces are left out."""
_END = "render"
"""The gateway's span that begins with the first token."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the time up to the first token."""

    begin_s: float
    """Seconds after the start of the request."""
    duration_s: float
    what: str
    """Name of the span; for a gap, the spans before and after it."""
    where: str
    """The service; for a gap between two services, both."""
    is_gap: bool
    is_between: bool
    """Whether it is a gap between two processes."""


class _Open(NamedTuple):
    begin_s: float
    end_s: float
    name: str
    service: str
    has_parts: bool


def first_token_pieces(root: SpanNode) -> list[Piece]:
    """The pieces from the start of a request to its first token, or to its end if it has none."""
    end_s = root.start_s + root.duration_s
    spans = list(_walk(root))
    firsts = [node.start_s for node in spans if node.span.name == _END]
    end_s = min([end_s, *firsts])
    opened = [_of(node, end_s) for node in spans if node.span.name != _END and node.start_s < end_s]
    pieces: list[Piece] = []
    for begin_s, until_s, owner in _stretches(opened, end_s):
        if until_s - begin_s >= SMALLEST_S:
            pieces.append(_piece(opened, owner, begin_s, until_s, root.start_s, end_s))
    return pieces


def _walk(node: SpanNode) -> Iterator[SpanNode]:
    yield node
    for child in node.children:
        yield from _walk(child)


def _of(node: SpanNode, end_s: float) -> _Open:
    span = node.span
    own_end_s = min(end_s, node.start_s + node.duration_s)
    parts = any(child.span.name != _END for child in node.children)
    return _Open(node.start_s, own_end_s, span.name, span.instance or span.service, parts)


def _stretches(opened: Sequence[_Open], end_s: float) -> Iterator[tuple[float, float, _Open]]:
    """Cuts the time at every begin and end of a span."""
    cuts = sorted({moment for one in opened for moment in (one.begin_s, one.end_s)})
    last: tuple[float, float, _Open] | None = None
    for begin_s, until_s in itertools.pairwise(cuts):
        owners = [one for one in opened if one.begin_s <= begin_s and one.end_s >= until_s]
        if not owners or begin_s >= end_s:
            continue
        owner = max(owners, key=lambda one: (one.begin_s, -one.end_s))
        if last is not None and last[2] is owner and last[1] == begin_s:
            last = (last[0], until_s, owner)
            continue
        if last is not None:
            yield last
        last = (begin_s, until_s, owner)
    if last is not None:
        yield last


def _piece(
    opened: Iterable[_Open],
    owner: _Open,
    begin_s: float,
    until_s: float,
    root_s: float,
    first_token_s: float,
) -> Piece:
    at_s, took_s = begin_s - root_s, until_s - begin_s
    if not owner.has_parts:
        return Piece(at_s, took_s, owner.name, owner.service, is_gap=False, is_between=False)
    # The spans next to the gap; a gap at a span's begin or end belongs to that span.
    others = [one for one in opened if one is not owner]
    before = [one for one in others if one.end_s <= begin_s and one.begin_s >= owner.begin_s]
    behind = [one for one in others if one.begin_s >= until_s and one.end_s <= owner.end_s]
    came = max(before, key=lambda one: one.end_s, default=owner)
    goes = min(behind, key=lambda one: (one.begin_s, -one.end_s), default=owner)
    is_last = goes is owner and until_s >= first_token_s
    behind_name = "first token" if is_last else goes.name
    services = [came.service] + [goes.service] * (goes.service != came.service)
    return Piece(
        at_s,
        took_s,
        f"{came.name} → {behind_name}",
        " → ".join(services),
        is_gap=True,
        is_between=len(services) > 1,
    )
