"""Log-probabilities of the tokens of a prompt, from the rows before each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from weft.engine.base.device_copies import Fetched
from weft.engine.base.request import TokenLogprob
from weft.engine.executor.logprobs import token_logprobs
from weft.engine.executor.step_input import ScoredRows

ROWS_AT_ONCE = 64
"""Rows whose logits exist at a time: all of a chunk's are larger than its other states."""


class PromptScores:
    """Log-probabilities of a step's prompt tokens, which may still be computed.

    Args:
        chunks: At least one.
        hidden: [S, hidden]: their rows, one chunk's after another's.
        logits_of: Computes the logits of rows first to end of these, [end - first, vocab] float32.
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
        """Waits for them: one of each chunk's tokens."""
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
    """[n, 1 + 2 * num_top] float64: the log-probability of each row's token [n], those of its most
    likely ones, and which these are.
    """
    total = logits.logsumexp(dim=1, keepdim=True)
    own = logits.gather(1, tokens.unsqueeze(1)) - total
    values, ids = logits.topk(num_top, dim=1)
    return torch.cat([own.double(), (values - total).double(), ids.double()], dim=1)
