"""What captured steps read about rows of media, in fixed memory."""

from __future__ import annotations

import torch
from weft.checkpoint.vision_config import NUM_AXES
from weft.engine.base.device_copies import sent
from weft.engine.executor.step_input import StepInput
from weft.engine.model.step import Inserted, Step

_NONE = -1


class MediaInputs:
    """Says of each row of a step which row of media it takes, and how it is rotated.

    Args:
        rows: [num_rows, row_width]: rows of media, at a fixed address.
        max_tokens: Rows of the largest step.
        has_axes: Whether rows may be rotated by positions along several axes.
    """

    def __init__(self, rows: torch.Tensor, max_tokens: int, *, has_axes: bool) -> None:
        self._rows, device = rows, rows.device
        self._sources = torch.full((max_tokens,), _NONE, device=device)
        self._axes: torch.Tensor | None = None
        if has_axes:
            self._axes = torch.full((max_tokens, NUM_AXES), _NONE, device=device)

    def send(self, step: StepInput) -> None:
        """Sends what a step says of its rows, without waiting."""
        device = self._rows.device
        self._sources.fill_(_NONE)
        if step.inserted is not None:
            rows, sources = (sent(part, device) for part in step.inserted[:2])
            self._sources.index_copy_(0, rows, sources)
        if self._axes is None:
            return
        self._axes.fill_(_NONE)
        if step.turned is not None:
            rows, axes = (sent(part, device) for part in step.turned)
            self._axes.index_copy_(0, rows, axes)

    def insert_captured(self, step: Step) -> None:
        """Gives a step what was sent for its rows. Waits for nothing, so it can be captured."""
        num_rows = len(step.token_ids)
        sources = self._sources[:num_rows]
        is_text = (sources < 0)[:, None]
        embeddings = self._rows.index_select(0, sources.clamp(min=0)).masked_fill_(is_text, 0)
        rows = torch.arange(num_rows, device=sources.device)
        step.inserted = Inserted(rows, embeddings, is_text)
        if self._axes is not None:
            axes = self._axes[:num_rows]
            step.axes = torch.where(axes < 0, step.turn_rows[:, None], axes)
