"""Rotations of requests with media, in models that rotate by time, rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from weft.checkpoint.config import MAX_POSITIONS
from weft.contract.errors import InvalidRequest
from weft.contract.spans import MediaSpan
from weft.engine.requests.media_positions import MediaPositions
from weft.engine.requests.request import Request

GridOf = Callable[[Sequence[int]], tuple[int, int]]
"""Rows and columns in which the rows of a medium of this shape lie. Raises InvalidRequest for a
shape that the model's encoder does not take.
"""


class MediaAxes:
    """Which requests rotate elsewhere than at their tokens' positions, and by how much in each
    slot.

    Args:
        grid_of: None: the model rotates by tokens' positions alone.
        num_positions: Positions that the model knows.
    """

    def __init__(self, grid_of: GridOf | None, num_positions: int = MAX_POSITIONS) -> None:
        self._grid_of = grid_of
        self._num_positions = num_positions
        self._shifts: dict[int, int] = {}

    def check(self, spans: Sequence[MediaSpan]) -> None:
        """Raises InvalidRequest unless spans tell the shapes of their media, where positions follow
        from these.
        """
        if self._grid_of is None:
            return
        self.check_times(spans)
        for span in spans:
            rows, columns = self._grid_of(span.shape)
            if span.offset + span.length > rows * columns:
                raise InvalidRequest(
                    f"an image has {rows * columns} rows, and the prompt wants {span.length} from "
                    f"row {span.offset}",
                    stage="validate",
                    param="spans",
                )

    def check_times(self, spans: Sequence[MediaSpan]) -> None:
        """Raises InvalidRequest for frames of a video that follow no others, or are
        later than the model has positions.
        """
        end_before = 0
        for span in spans:
            told = ""
            if span.time and span.position != end_before:
                told = "frames of a video that follow others begin where these end"
            if span.time and span.position + span.time > self._num_positions:
                told = f"a video is longer than the {self._num_positions} positions of the model"
            if told:
                raise InvalidRequest(told, stage="validate", param="spans")
            end_before = span.end

    def begin(self, request: Request, shapes: Sequence[Sequence[int]]) -> None:
        """Sets a request's positions by the shapes of its spans' media."""
        if request.spans and self._grid_of is not None:
            request.axes = MediaPositions(request.spans, [self._grid_of(one) for one in shapes])

    def shift(self, requests: Iterable[Request], tell: Callable[[int, int], None]) -> None:
        """Calls `tell` with the slot and the shift of each request whose rotations are elsewhere
        than those of the request that had its slot before. A request begins with a chunk.
        """
        if self._grid_of is None:
            return
        for request in requests:
            shift = 0 if request.axes is None else request.axes.shift
            if self._shifts.get(request.slot, 0) != shift:
                self._shifts[request.slot] = shift
                tell(request.slot, shift)
