"""Tokens that are being drawn: what every way of drawing returns before the device has drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from weft.contract.arrays import Int64Array
from weft.contract.errors import Internal, InvalidRequest, WeftError
from weft.contract.request import TokenLogprob
from weft.engine.base.device_copies import Fetched
from weft.kernels.ops.sampling.spec import ERROR_NOT_FINITE


@dataclass(slots=True)
class SampledRows:
    """Tokens of one step, by row of the logits."""

    token_ids: Int64Array
    """[L]; negative in the rows of `errors`."""
    logprobs: list[TokenLogprob | None]
    """None for rows that want no log-probabilities, and in the rows of `errors`."""
    errors: dict[int, WeftError] = field(default_factory=dict)
    """Errors of rows without a token; the other rows are not affected."""


class PendingTokens:
    """Tokens of one step that a device is sampling or has sampled.

    Args:
        fetch: Waits for the tokens; called once, before the next step draws.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        positions: Int64Array,
        fetch: Callable[[], SampledRows],
        *,
        are_kept: bool = False,
        rows: Callable[[], Int64Array] | None = None,
    ) -> None:
        self.tokens = tokens
        """[L] int64, on the device that samples them; negative where there is none."""
        self.positions = positions
        """[L]: positions of the tokens; the largest possible ones where only the device knows."""
        self.are_kept = are_kept
        """Whether the device has kept the tokens for later steps (`Executor.keep`)."""
        self.rows = rows
        """Waits for the tokens and ancestor masks of the logits' rows ([2, L]); valid until the
        next step draws. None: they are not fetched.
        """
        self.errors: dict[int, WeftError] = {}
        """Errors by row that the host knows before there are tokens."""
        self._fetch = fetch

    @classmethod
    def of_tokens(cls, tokens: torch.Tensor, positions: Int64Array) -> PendingTokens:
        """Tokens without log-probabilities, which are fetched at once."""
        fetched = Fetched(tokens)

        def fetch() -> SampledRows:
            return SampledRows(fetched.wait().numpy(), [None] * len(positions))

        return cls(tokens, positions, fetch)

    def wait(self) -> SampledRows:
        sampled = self._fetch()
        if len(sampled.token_ids) and sampled.token_ids.min() < 0:
            _explain(sampled, self.positions)
        sampled.errors |= self.errors
        return sampled


def _explain(sampled: SampledRows, positions: Int64Array) -> None:
    for r in np.flatnonzero(sampled.token_ids < 0).tolist():
        where = f"at position {int(positions[r])}"
        if sampled.token_ids[r] == ERROR_NOT_FINITE:
            message = f"the model's logits {where} are not finite numbers"
            sampled.errors[r] = Internal(message, stage="sample")
        else:
            message = f"min_tokens masks every token {where}: all of them are stop tokens"
            sampled.errors[r] = InvalidRequest(message, stage="sample", param="min_tokens")
