"""Log-probabilities of the tokens of a prompt, from the rows before each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from weft.engine.base.device_copies import Fetched
from weft.engine.base.request import TokenLogprob
from weft.engine.executor.logprobs import token_logprobs
from weft.engine.executor.step import Int32Array
from weft.engine.scheduler.plan import Plan, PlanItem, ScoredChunk

ROWS_AT_ONCE = 64
"""Rows whose logits exist at a time: all of a chunk's are larger than its other states."""


def scored_chunks(plan: Plan, cu_q_lens: Int32Array) -> list[ScoredChunk]:
    """The chunks of a plan whose prompts want log-probabilities, without those that have no token
    behind them.

    Args:
        plan: Its chunks come last in the step.
        cu_q_lens: Start of each request's rows, [R + 1].
    """
    found, before = [], len(cu_q_lens) - 1 - len(plan.chunks)
    for number, item in enumerate(plan.chunks, before):
        num_top = item.request.prompt_logprobs
        if num_top is not None and (count := _num_scored(item)) > 0:
            row, first = int(cu_q_lens[number]) + item.has_lead, item.start + 1
            tokens = item.request.tokens[first : first + count]
            rows = np.arange(row, row + count)
            found.append(ScoredChunk(item.request, num_top, rows, tokens, first))
    return found


def _num_scored(item: PlanItem) -> int:
    """Number of a chunk's rows that are followed by a token of the prompt."""
    last_scored = item.request.num_prompt_tokens - 1
    return min(item.start + item.num_tokens, last_scored) - item.start


class PromptScores:
    """Implements `LaterScores`.

    Args:
        chunks: At least one.
        hidden: [S, hidden]: their rows, one chunk's after another's.
        logits_of: Computes the logits of rows first to end of these, [end - first, vocab] float32.
    """

    def __init__(
        self,
        chunks: Sequence[ScoredChunk],
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

    def wait(self) -> list[tuple[ScoredChunk, list[TokenLogprob]]]:
        """See `LaterScores.wait`."""
        columns = self._fetched.wait().double().numpy()
        most = (columns.shape[1] - 1) // 2
        found, begin = [], 0
        for chunk in self._chunks:
            own = columns[begin : begin + len(chunk.rows)]
            begin += len(chunk.rows)
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
