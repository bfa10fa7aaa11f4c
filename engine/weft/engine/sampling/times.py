"""Whisper's rules for tokens that say times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from weft.contract.arrays import Float32Array
from weft.contract.request import TimeTokens

_NEVER = np.float32(-1e9)
"""Finite, since a row with infinite logits counts as an error of the model."""


class TimeRules:
    """The rules of `TimeTokens` for one sample that has `output_ids` already."""

    def __init__(self, params: TimeTokens, output_ids: Sequence[int]) -> None:
        self._params = params
        self._num_tokens = 0
        self._last, self._one_before = -1, -1
        self._latest = -1
        """The latest time; -1: there is none yet."""
        for token_id in output_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        self._last, self._one_before = token_id, self._last
        self._num_tokens += 1
        if token_id >= self._params.first:
            self._latest = token_id

    def apply(self, row: Float32Array) -> None:
        """Changes the logits of the next token, [vocab_size], in place."""
        params, first = self._params, self._params.first
        row[first - 1] = _NEVER
        is_time = self._num_tokens > 0 and self._last >= first
        is_pair = self._num_tokens < 2 or self._one_before >= first
        if is_time and is_pair:
            row[first:] = _NEVER
        elif is_time:
            row[: params.end] = _NEVER
        if self._latest >= first:
            # What follows a text may be the time at which it began; what begins one is later.
            row[first : self._latest + (not (is_time and not is_pair))] = _NEVER
        if not self._num_tokens:
            row[:first] = _NEVER
            if params.max_initial is not None:
                row[first + params.max_initial + 1 :] = _NEVER
        self._prefer_times(row, first)

    @staticmethod
    def _prefer_times(row: Float32Array, first: int) -> None:
        times, most = row[first:].astype(np.float64), row[:first].max()
        largest = times.max(initial=float(_NEVER))
        if largest <= _NEVER:
            return
        together = largest + np.log(np.exp(times - largest).sum())
        if together > most:
            row[:first] = _NEVER
