"""Log-probabilities of a prompt's tokens, each from the logits of the row before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from weft.contract.request import TokenLogprob
from weft.engine.base.device_copies import Fetched
from weft.engine.sampling.logprobs import token_logprobs

ROWS_AT_ONCE = 64
"""Rows whose logits are computed at a time. The logits of a whole chunk would be larger than all
its other tensors.
"""


class ScoredRows(NamedTuple):
    """Rows of a prompt whose next tokens are to be scored."""

    request: int
    """Index of the request in the step."""
    num_top: int
    """Alternatives wanted for each token."""
    first_row: int
    """The first of these rows, counted from the request's own first row."""
    tokens: list[int]
    """The prompt's token after each of these rows, whose log-probability is wanted."""


class PromptScores:
    """Log-probabilities of a step's prompt tokens, which the device may still be computing.

    Args:
        chunks: At least one.
        hidden: [S, hidden]: hidden states of the scored rows, chunk by chunk.
        logits_of: Computes the logits of rows [first, end) of `hidden`: [end - first, vocab]
            float32.
    """

    def __init__(
        self,
        chunks: Sequence[ScoredRows],
        hidden: torch.Tensor,
        logits_of: Callable[[int, int], torch.Tensor],
    ) -> None:
        self._chunks = chunks
        num_rows, most = hidden.shape[0], max(chunk.num_top for chunk in chunks)
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        tokens = tokens.to(hidden.device, non_blocking=True)
        parts = []
        with torch.inference_mode():
            for first in range(0, num_rows, ROWS_AT_ONCE):
                end = min(first + ROWS_AT_ONCE, num_rows)
                parts.append(_scores(logits_of(first, end), tokens[first:end], most))
            self._fetched = Fetched(torch.cat(parts))

    def wait(self) -> list[tuple[ScoredRows, list[TokenLogprob]]]:
        """Waits for the log-probabilities: one list per chunk, one entry per token."""
        columns = self._fetched.wait().double().numpy()
        most = (columns.shape[1] - 1) // 2
        found, begin = [], 0
        for chunk in self._chunks:
            own = columns[begin : begin + len(chunk.tokens)]
            begin += len(chunk.tokens)
            by_row = token_logprobs(
                dict.fromkeys(range(len(own)), chunk.num_top),
                np.array(chunk.tokens, np.int64),
                own[:, 0],
                own[:, 1 + most :].astype(np.int64),
                own[:, 1 : 1 + most],
            )
            found.append((chunk, list(by_row.values())))
        return found


def _scores(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """[n, 1 + 2 * num_top] float64: the log-probability of each row's token, those of the row's
    most likely tokens, and the ids of these.
    """
    total = logits.logsumexp(dim=1, keepdim=True)
    own = logits.gather(1, tokens.unsqueeze(1)) - total
    values, ids = logits.topk(num_top, dim=1)
    return torch.cat([own.double(), (values - total).double(), ids.double()], dim=1)
