"""Types of step requests."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DecodeColumns(NamedTuple):
    """Columns of a step of R requests with a row each, in device memory: int64, [R] each."""

    slots: torch.Tensor
    positions: torch.Tensor
    """Positions of the tokens that the requests bring."""
    tokens: torch.Tensor
    """Input tokens; negative: the last token of the slot."""
    pages: torch.Tensor
    """Page of each position, if the page table lacks it; negative: it has the page."""


class StepColumns(NamedTuple):
    """Columns of a step of T rows and R requests in device memory, int64 except the last
    three, which are int32. Tokens are drawn for L rows.
    """

    requests: torch.Tensor | None
    """[1 + 4 * R], as `expand_requests` reads it; None: the other columns are given."""
    token_ids: torch.Tensor
    """[T]."""
    positions: torch.Tensor
    """[T]."""
    slots: torch.Tensor
    """[T]: page * page_size + offset."""
    rows: torch.Tensor
    """[R]: rows of the page table."""
    logits_rows: torch.Tensor
    """[L]."""
    drawing_slots: torch.Tensor
    """[L]: slot for which each row draws."""
    sources: torch.Tensor
    """[L], as in `weft.kernels.ops.step_rows.resolve_rows`."""
    owners: torch.Tensor
    """[L], likewise."""
    verify_rows: torch.Tensor
    """[R, 1 + most drafts]: rows of each request, -1 after its last; [0, 1] without drafts."""
    ancestors: torch.Tensor | None
    """[T]: words that say which rows of its request each row sees; None: all earlier ones."""
    cu_q_lens: torch.Tensor
    """[R + 1]."""
    kv_lens: torch.Tensor
    """[R]."""
    first_several: torch.Tensor | None
    """[1]: the number of requests of one row each that come first; None where `requests` may say
    what the step is.
    """
