"""Types of step rows."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SlotTokens(NamedTuple):
    """State of each slot on the device; the last slot is a dummy for padding."""

    tokens: torch.Tensor
    """[1 + drafts, slots + 1] int64, contiguous: last tokens, and after them the drafted tokens."""
    starts: torch.Tensor
    """[slots + 1] int64: positions of the last tokens, for slots whose drafts were verified last.
    """
    words: torch.Tensor | None = None
    """[1 + drafts, slots + 1] int64: the words of `StepRows.ancestors`, where drafts may form
    trees; -1 for last tokens.
    """


class StepRows(NamedTuple):
    """A step of R requests on the device."""

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64."""
    places: torch.Tensor
    """[T] int64: page * page_size + offset."""
    cu_q_lens: torch.Tensor
    """[R + 1] int32."""
    kv_lens: torch.Tensor
    """[R] int32."""
    ancestors: torch.Tensor | None = None
    """[T] int64: words that say which rows of its request each row sees; None: all earlier ones."""


class Verified(NamedTuple):
    """Requests whose drafts a step has verified; some may have none."""

    rows: torch.Tensor
    """[V, 1 + most drafts] int64: rows of the step that belong to each request; -1 after its last
    row. A request without rows is not verified, and belongs to the dummy slot.
    """
    slots: torch.Tensor
    """[L] int64: slots of the rows for which tokens were drawn. Tokens were drawn for all rows with
    drafts and all rows before them: up to there a row has the same number among the L as among the
    T rows.
    """
