"""Positions of a prompt's tokens along time, rows and columns, for models that rotate by all three
(M-RoPE, arXiv 2409.12191).

Text goes on along all axes alike. The rows of a medium have one time, and the rows and columns of
its grid. What follows a medium begins after the largest row and column in it. A medium has at least
as many tokens as its grid is long, so that these are never ahead of positions. The frames of a
video have the same rows and columns, and each its own time, which may be ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from weft.checkpoint.vision_config import NUM_AXES
from weft.contract.arrays import Int64Array
from weft.contract.spans import MediaSpan, spans_within


class MediaPositions:
    """A function of a prompt's spans and of the grids of their media alone.

    Args:
        spans: At least one, in order.
        grids: Rows and columns of each span's medium.
    """

    def __init__(self, spans: Sequence[MediaSpan], grids: Sequence[tuple[int, int]]) -> None:
        self._spans = spans
        self._begins: dict[int, tuple[int, int]] = {}
        """Of each span by its position: where it begins along all axes, and its columns."""
        shifts, start = [0], 0
        for span, grid in zip(spans, grids, strict=True):
            if not span.time:
                start = span.position + shifts[-1]
            self._begins[span.position] = start, grid[1]
            shifts.append(shifts[-1] - span.length + (0 if span.time else max(grid)))
        self._shifts = np.array(shifts, np.int64)
        self._ends = np.array([span.end for span in spans], np.int64)
        self.end = spans[-1].end
        """Position after the last medium."""
        self.shift = shifts[-1]
        """What is added to each position from `end` on."""

    def of(self, first: int, end: int) -> Int64Array:
        """[end - first, 3]: time, row and column of the tokens at the positions [first, end)."""
        positions = np.arange(first, end)
        shifts = self._shifts[np.searchsorted(self._ends, positions, side="right")]
        axes = np.repeat((positions + shifts)[:, None], NUM_AXES, axis=1)
        for span, begin, last in spans_within(self._spans, first, end):
            start, columns = self._begins[span.position]
            rows = np.arange(begin, last) - span.position + span.offset
            times = np.full_like(rows, max(0, span.time - 1))
            axes[begin - first : last - first] = start + np.stack(
                (times, rows // columns, rows % columns), axis=1
            )
        return axes
