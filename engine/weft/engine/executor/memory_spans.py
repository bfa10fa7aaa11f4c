"""Ranges of memory that tensors have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_GAP_BYTES = 64
"""Parameters of one block of memory begin at multiples of this. A lesser gap between two belongs to
nobody.
"""


class Span(NamedTuple):
    """Bytes in memory."""

    begin: int
    end: int


def spans_of(tensors: Sequence[torch.Tensor]) -> list[Span]:
    """The memory of these tensors that nothing else uses, in order. Tensors with gaps, and those in
    another library's form, are left out.
    """
    found = list[tuple[int, int, int]]()
    for one in tensors:
        if one.is_mkldnn or not one.numel():
            continue
        extent = 1 + sum(
            (size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True)
        )
        if extent == one.numel():
            begin = one.data_ptr()
            end = begin + extent * one.element_size()
            found.append((begin, end, one.untyped_storage().data_ptr()))
    spans, block = list[Span](), -1
    for begin, end, storage in sorted(found):
        if spans and storage == block and begin < spans[-1].end + _GAP_BYTES:
            spans[-1] = Span(spans[-1].begin, max(end, spans[-1].end))
        elif not spans or begin >= spans[-1].end:
            spans.append(Span(begin, end))
        block = storage
    return spans


def without(spans: Sequence[Span], taken: Sequence[Span]) -> list[Span]:
    """The parts of spans that no span of `taken`, which are in order, covers."""
    left = list[Span]()
    for begin, end in spans:
        at = begin
        for first, last in taken:
            if last <= at or first >= end:
                continue
            if first > at:
                left.append(Span(at, first))
            at = max(at, min(last, end))
        if at < end:
            left.append(Span(at, end))
    return left
